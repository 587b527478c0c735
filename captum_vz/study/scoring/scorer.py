"""Methods and metrics on batches of examples: columns in, columns out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_vz import find_layers
from captum_vz._engine import LayerPass, LayerRecord, first_tensor
from captum_vz.errors import UnsupportedLayerError, needs_extra
from captum_vz.methods import Question, checked_shares, given_methods, joined_first
from captum_vz.methods.decision import DecidingMethod
from captum_vz.metrics import content_tokens
from captum_vz.study import scoring
from captum_vz.study.examples import BadExampleError, Encoded, Example, encode, pad
from captum_vz.study.scoring import BATCH_TOKENS, COLUMNS, Row, measure, row_of, skipped_row
from captum_vz.study.scoring.metrics import given_metrics, lacks
from captum_vz.subjects import Subject
from captum_vz.subjects.heads import encoder_of, max_tokens, predicts_next
from captum_vz.text import fill_batches
from captum_vz.visualization import readable_tokens

with needs_extra("captum_vz.study", "study"):
    import pyarrow as pa
    from accelerate.utils.memory import clear_device_cache


class Scorer:
    """Scores examples with methods and evaluates the scores: columns of examples in, columns of rows out.

    Libraries for large data call such a function with a dictionary of columns for each batch. `datasets.Dataset.map`:

    .. code-block:: python

        from datasets import Dataset, Features

        sentences = Dataset.from_list([example.to_dict() for example in examples])
        scorer = Scorer(model, tokenizer, ["value-zeroing", "random"])
        rows = sentences.map(
            scorer,
            batched=True,
            batch_size=256,
            remove_columns=sentences.column_names,
            features=Features.from_arrow_schema(scorer.schema),
        )

    Ray Data's `map_batches` takes this class, with `fn_constructor_args=(model, tokenizer)`.

    Args:
        model: A model of transformers in eval mode. In a model with encoder and decoder, the encoder is explained.
        tokenizer: Its tokenizer, a fast one.
        methods: Any of :func:`~captum_vz.study.as_method`, several, or a mapping from names to these. None:
            :data:`~captum_vz.study.DEFAULT_METHODS`.
        metrics: Names of :data:`~captum_vz.study.METRICS`, or a mapping from names to functions, see
            :func:`~captum_vz.study.register_metric`. None: cue alignment and blank-out.
        batch_size: The most sentences in a batch. Sentences of similar length are batched together.
        batch_tokens: The most tokens in a batch, padding included; a longer sentence is a batch of its own. A method
            that runs out of memory gets batches of half as many tokens from then on. Batches change numbers by
            rounding only.

    Raises:
        ValueError: The model is in train mode; a method or metric is unknown; or a metric needs what the model lacks.

    >>> from captum_vz.study import Example, Scorer
    >>> from captum_vz.testbed import agreement_sentences, load_model
    >>> model, tokenizer = load_model()
    >>> scorer = Scorer(model, tokenizer, ["value-zeroing", "random"], ["cue_dot"])
    >>> example = Example.from_record(agreement_sentences(1)[0])
    >>> found = scorer({name: [value] for name, value in example.to_dict().items()})
    >>> found["method"], found["layer"]
    (['value-zeroing', 'value-zeroing', 'value-zeroing', 'value-zeroing', 'random'], [0, 1, 2, 3, None])
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        methods: Any = None,
        metrics: Any = None,
        *,
        batch_size: int = 32,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self.model = encoder_of(model)
        if self.model.training:  # every method would refuse every example
            raise ValueError("The model is in train mode: call model.eval() first.")
        self.tokenizer = tokenizer
        self.methods = given_methods(methods)
        self.metrics = given_metrics(metrics)
        for name, metric in self.metrics.items():
            if missing := lacks(metric, self.model, tokenizer):
                raise ValueError(f"{name} cannot be measured: {missing}. Pass others, such as cue_dot and cue_ap.")
        if min(batch_size, batch_tokens) < 1:
            raise ValueError(f"batch_size is {batch_size} and batch_tokens {batch_tokens}: pass at least 1 of each.")
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        self._fitting: dict[str, int] = {}  # the most tokens for a method that ran out of memory
        self.layers = find_layers(self.model)

    @property
    def schema(self) -> Any:
        """The columns and their types, a pyarrow schema. A batch whose entries are all None does not show its types."""
        return pa.schema([*COLUMNS.items(), *((name, pa.float64()) for name in self.metrics)])

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The rows of :meth:`score` as columns, for columns of examples with the keys of :meth:`Example.to_dict`.

        An entry that is not an example is skipped with its reason, like any bad example.
        """
        examples, rows, places = list[Example](), list[Row](), dict[str, int]()
        for place, values in enumerate(zip(*batch.values(), strict=True)):
            fields = dict(zip(batch, values, strict=True))
            try:
                example = Example.from_dict(fields)
                examples.append(example)
            except ValueError as error:
                example = Example(str(fields.get("id")), (), 0)
                rows.append(skipped_row(str(error), example))
            places[example.id] = place
        rows = sorted([*rows, *self.score(examples)], key=lambda row: places[row["example"]])
        return {name: [row.get(name) for row in rows] for name in (*COLUMNS, *self.metrics)}

    def score(self, examples: Iterable[Example], advance: Callable[[int], object] | None = None) -> list[Row]:
        """The scores of each method in each layer for each example, and the metrics of these scores.

        After each batch, `advance` is called with the number of its examples. There is a row for each example in the
        order given, for each method, for each of its layers: ``example`` (its id), ``group``, ``label``, ``method``,
        ``layer`` (from 0; None where a method has no layers), ``deciding`` (the layer that a method NAME:deciding has
        chosen), ``tokens``, ``target`` (a position), ``cue`` and ``content`` (positions), ``scores`` (one for each
        token, summing to 1), and the metrics by their names, NaN where they are undefined. A bad example has a single
        row with the reason in ``skipped``. A method that refuses an example or fails has one such row with its name in
        ``method``, and a metric one with its name in ``metric``. In other rows, ``skipped`` is None.
        """
        given = list(examples)
        places = {example.id: place for place, example in enumerate(given)}
        rows = self.scores(given, advance)
        by_id, usable = {example.id: example for example in given}, [row for row in rows if row["skipped"] is None]
        rows += measure(self.metrics, by_id, usable, self, self.batch_size, self.batch_tokens)
        rows.sort(key=lambda row: places[row["example"]])
        return [dict.fromkeys(self.metrics) | row for row in rows]

    def scores(self, examples: Iterable[Example], advance: Callable[[int], object] | None = None) -> list[Row]:
        """The rows of :meth:`score` without metrics."""
        given = list(examples)
        found: list[list[Row]] = [[] for _ in given]
        encoded: dict[int, Encoded] = {}
        for place, example in enumerate(given):
            try:
                encoded[place] = self.encode(example)
            except BadExampleError as error:
                found[place] = [skipped_row(str(error), example)]
        if advance is not None:
            advance(len(given) - len(encoded))

        def length(place: int) -> int:
            return len(encoded[place].ids)

        for formless in (False, True):  # a batch has two forms for all of its examples, or for none
            alike = sorted((place for place, one in encoded.items() if (one.forms is None) == formless), key=length)
            for places in fill_batches(alike, length, self.batch_size, self.batch_tokens):
                scored = self._evaluate([(given[place], encoded[place]) for place in places], list(self.methods))
                for place, by_method in zip(places, scored, strict=True):
                    found[place] = [row for method in self.methods for row in by_method[method]]
                if advance is not None:
                    advance(len(places))
        return [row for rows in found for row in rows]

    def encode(self, example: Example, *, needs_cue: bool = False, needs_forms: bool = False) -> Encoded:
        """The tokens of an example as the model takes them, see :func:`~captum_vz.study.encode`."""
        most, causal = max_tokens(self.model, self.tokenizer), predicts_next(self.model)
        needs = {"needs_cue": needs_cue, "needs_forms": needs_forms}
        return encode(self.tokenizer, example, max_tokens=most, until_target=causal, **needs)

    def of_methods(self, methods: Iterable[str], changed: Any = None) -> Scorer:
        """A scorer of some of the methods, with a changed copy of the model if it is given."""
        found = copy(self)
        found.methods = {name: self.methods[name] for name in methods}
        if changed is not None:
            names = {id(module): name for name, module in self.model.named_modules()}
            found.model, found.layers = changed, [changed.get_submodule(names[id(layer)]) for layer in self.layers]
        return found

    @torch.no_grad()
    def target_states(self, examples: Iterable[Example]) -> Tensor:
        """The output of each layer at each example's target, such as a probe reads, `(layers, examples, d)`.

        It is in float32 on the CPU. A layer that runs many times (in ALBERT) counts once for each run.

        Raises:
            BadExampleError: An example cannot be used.
            UnsupportedLayerError: A layer does not return a tensor `(batch, tokens, d)`.
        """
        encoded = [self.encode(example) for example in examples]
        found = []
        for start in range(0, len(encoded), self.batch_size):
            batch = encoded[start : start + self.batch_size]
            targets = torch.tensor([one.target for one in batch], device=self.model.device)

            def at_target(record: LayerRecord, targets: Tensor = targets) -> Tensor:
                states = first_tensor(record.output)
                if states is None or states.ndim != 3:
                    raise UnsupportedLayerError(
                        f"Layer {record.index} ({record.name}) returns no tensor (batch, tokens, d)."
                    )
                return states[torch.arange(len(states), device=states.device), targets].float().cpu()

            this = LayerPass(self.layers, at_target)
            this.run(partial(self.model, **pad(self.tokenizer, batch, self.model.device)))
            found.append(torch.stack([states for _, states in this.results]))
        return torch.cat(found, dim=1)

    def _evaluate(self, pairs: Sequence[tuple[Example, Encoded]], methods: Sequence[str]) -> list[dict[str, list[Row]]]:
        """For each example of one batch, for each method, its rows."""
        encoded = [one for _, one in pairs]
        inputs = pad(self.tokenizer, encoded, self.model.device)
        forms = [one.forms for one in encoded if one.forms is not None]
        targets, foils = ([form[k] for form in forms] or None for k in (0, 1))
        subject = Subject(self.model, self.model, self.layers, self.tokenizer)
        question = Question(inputs, [one.target for one in encoded], targets, foils)
        special = [getattr(self.tokenizer, f"{name}_token_id", None) for name in ("cls", "sep", "bos", "eos", "pad")]
        content = content_tokens(inputs["input_ids"].cpu(), special)
        about = [
            {
                "tokens": readable_tokens(self.tokenizer, one.ids),
                "target": one.target,
                "cue": list(one.cue),
                "content": [at for at in range(len(one.ids)) if content[place, at] and at != one.target],
            }
            for place, one in enumerate(encoded)
        ]
        found: list[dict[str, list[Row]]] = [{} for _ in pairs]
        for name in joined_first(methods, self.methods):
            size, scores = inputs["input_ids"].numel(), None
            fits, halves = len(pairs) == 1 or size <= self._fitting.get(name, size), -(-len(pairs) // 2)
            step = 1 if fits else halves
            try:
                if fits:
                    method = self.methods[name].of(subject)
                    scores = checked_shares(name, method, subject, question, [example.id for example, _ in pairs])
            except Exception as error:  # a method that fails costs its own rows, not the study
                if scoring.ran_out_of_memory(error):
                    self._fitting[name], step = size // 2, halves
                if len(pairs) == 1:
                    found[0][name] = [skipped_row(scoring.reason_of(error), pairs[0][0], name)]
                    continue
            if scores is None:
                # Of an error, one example may be the reason, so each is tried alone. After the `except` block, because
                # the error holds the memory of the batch.
                clear_device_cache()
                for start in range(0, len(pairs), step):
                    some = self._evaluate(pairs[start : start + step], [name])
                    for rows, new in zip(found[start : start + step], some, strict=True):
                        rows |= new
                continue
            chosen = method.layers(question) if isinstance(method, DecidingMethod) else [None] * len(pairs)
            for place, (example, one) in enumerate(pairs):
                own = about[place] | {"method": name, "deciding": chosen[place]}
                found[place][name] = [
                    row_of(example, layer=layer if method.layered else None, scores=row, **own)
                    for layer, row in enumerate(scores[:, place, : len(one.ids)].tolist())
                ]
        return found
