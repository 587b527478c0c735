"""Methods and metrics on a batch of examples: columns in, columns out, as the engines of large data want it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn

from captum_vz import find_layers
from captum_vz.study._extra import pa
from captum_vz.study.encoding import BadExample, Encoded, encode, pad
from captum_vz.study.example import Example
from captum_vz.study.judging import METRICS, Evidence, check_metrics, removal_of
from captum_vz.study.methods import METHODS, Batch, check_methods, part_of
from captum_vz.study.targets import longest_text
from captum_vz.visualization import readable_tokens

Row = dict[str, Any]

#: The columns of a row before those of the metrics, and what they hold.
COLUMNS: Final = {
    "example": pa.string(),
    "group": pa.string(),
    "label": pa.string(),
    "method": pa.string(),
    "layer": pa.int32(),
    "skipped": pa.string(),
    "tokens": pa.list_(pa.string()),
    "target": pa.int32(),
    "cue": pa.list_(pa.int32()),
    "scores": pa.list_(pa.float64()),
}


class Scorer:
    """Scores and judges examples: called with columns of examples, it gives columns of rows.

    This is what the engines of large data take, with a dictionary of columns for a batch. `datasets.Dataset.map`:

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

    Ray Data's `map_batches`, with a scorer in each of two workers:

    .. code-block:: python

        import ray

        rows = ray.data.from_items([example.to_dict() for example in examples]).map_batches(
            Scorer,
            fn_constructor_args=(model, tokenizer),
            fn_constructor_kwargs={"methods": ["value-zeroing", "random"]},
            batch_size=256,
            compute=ray.data.ActorPoolStrategy(size=2),
        )

    Args:
        model: A model of transformers in eval mode; of one with encoder and decoder, the encoder is explained.
        tokenizer: Its tokenizer, a fast one.
        methods: Names of :data:`~captum_vz.study.METHODS`. None: all but gradients and flow.
        metrics: Names of :data:`~captum_vz.study.METRICS`. None: cue alignment and blank-out.
        batch_size: How many sentences the model is given at once. They are sorted by their length first.
        content_only: Whether cue alignment leaves out special tokens and the target, and divides by what is left.
        removal: What takes the place of a token that is blanked out or erased: "unk" or "mask"; or "delete".
        layers: The layers of the model, if :func:`~captum_vz.find_layers` does not find them.

    Raises:
        ValueError: A model in train mode, an unknown method or metric, a removal by a token that the tokenizer does not
            have, or a metric that asks for words a model that has no head for them.

    >>> from captum_vz.study import Example, Scorer
    >>> from captum_vz.testbed import agreement_sentences, load_agreement_model
    >>> model, tokenizer = load_agreement_model()
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
        methods: Iterable[str] | None = None,
        metrics: Iterable[str] | None = None,
        *,
        batch_size: int = 32,
        content_only: bool = False,
        removal: str = "unk",
        layers: list[nn.Module] | None = None,
    ) -> None:
        self.model = part_of(model)
        if self.model.training:  # every method would refuse every example
            raise ValueError("The model is in train mode: call model.eval() first.")
        self.tokenizer = tokenizer
        self.methods = check_methods(methods)
        self.metrics = check_metrics(metrics)
        self.needs_cue = any(METRICS[name].needs_cue for name in self.metrics)
        self.needs_forms = any(METRICS[name].needs_forms for name in self.metrics)
        if self.needs_forms:
            removal_of(tokenizer, removal)
            head = getattr(self.model, "get_output_embeddings", None)
            if head is not None and head() is None:
                raise ValueError(
                    f"{type(self.model).__name__} has no head that predicts words, for which "
                    f"{', '.join(name for name in self.metrics if METRICS[name].needs_forms)} would ask it: pass "
                    "other metrics, such as cue_dot and cue_ap."
                )
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: pass at least 1.")
        self.batch_size = batch_size
        self.content_only = content_only
        self.removal = removal
        self.layers = find_layers(self.model) if layers is None else list(layers)

    @property
    def schema(self) -> Any:
        """The columns and what they hold, a pyarrow schema: a batch in which all are None does not tell."""
        return pa.schema([*COLUMNS.items(), *((name, pa.float64()) for name in self.metrics)])

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Columns of examples, as :meth:`Example.to_dict` names them, to columns of what :meth:`score` gives.

        Args:
            batch: For each attribute of the examples a list or array with one entry an example. One that is no example
                at all is skipped with its reason, like any bad one.

        Returns:
            The columns of the rows, lists of one length.
        """
        examples: list[Example | Row] = []
        for values in zip(*batch.values(), strict=True):
            fields = dict(zip(batch, values, strict=True))
            try:
                examples.append(Example.from_dict(fields))
            except ValueError as error:
                examples.append(self._skipped(str(fields.get("id")), str(error)))
        rows = self._score(examples, None)
        return {name: [row[name] for row in rows] for name in (*COLUMNS, *self.metrics)}

    def score(self, examples: Iterable[Example], advance: Callable[[int], object] | None = None) -> list[Row]:
        """The scores of each method in each layer for each example, and how they are judged.

        Args:
            examples: The examples.
            advance: Called with the number of examples done, after each batch.

        Returns:
            For each example in the order given, for each method, for each of its layers a row: ``example`` (its id),
            ``group``, ``label``, ``method``, ``layer`` (from 0; None where a method has no layers), ``tokens``,
            ``target`` (a token), ``cue`` (tokens), ``scores`` (one a token, summing to 1), and the metrics by their
            names, NaN where there is none to give. A bad example has a single row with the reason in ``skipped``; a
            method that cannot explain an example has one for it. Elsewhere that is None.
        """
        return self._score(list(examples), advance)

    def _score(self, examples: Sequence[Example | Row], advance: Callable[[int], object] | None) -> list[Row]:
        found: list[list[Row]] = [[] for _ in examples]
        encoded: dict[int, Encoded] = {}
        for place, example in enumerate(examples):
            if not isinstance(example, Example):
                found[place] = [example]
                continue
            try:
                encoded[place] = self._encode(example)
            except BadExample as error:
                found[place] = [self._skipped(example.id, str(error), example)]
        if advance is not None:
            advance(len(examples) - len(encoded))
        for places in self._batches(encoded):
            batch = [(example, encoded[place]) for place in places if isinstance(example := examples[place], Example)]
            for place, by_method in zip(places, self._judge(batch, self.methods), strict=True):
                found[place] = [row for method in self.methods for row in by_method[method]]
            if advance is not None:
                advance(len(places))
        return [row for rows in found for row in rows]

    def _encode(self, example: Example) -> Encoded:
        longest = longest_text(self.model, self.tokenizer)
        encoded = encode(
            self.tokenizer, example, longest=longest, needs_cue=self.needs_cue, needs_forms=self.needs_forms
        )
        if self.content_only and self.needs_cue and encoded.target in encoded.cue:
            raise BadExample("the cue is the token that is explained, which content_only leaves out")
        return encoded

    def _batches(self, encoded: Mapping[int, Encoded]) -> Iterator[list[int]]:
        """The examples of each batch: of about one length, and all with two forms or all without."""

        def kind(place: int) -> tuple[bool, int]:
            return encoded[place].forms is None, len(encoded[place].ids)

        for _, alike in groupby(sorted(encoded, key=kind), key=lambda place: kind(place)[0]):
            places = list(alike)
            for start in range(0, len(places), self.batch_size):
                yield places[start : start + self.batch_size]

    def _judge(self, pairs: Sequence[tuple[Example, Encoded]], methods: Sequence[str]) -> list[dict[str, list[Row]]]:
        """For each example of one batch, for each method, its rows."""
        encoded = [one for _, one in pairs]
        inputs = pad(self.tokenizer, encoded, self.model.device)
        forms = [one.forms for one in encoded if one.forms is not None]
        answers, foils = ([form[k] for form in forms] or None for k in (0, 1))
        targets = [one.target for one in encoded]
        batch = Batch(self.model, self.tokenizer, self.layers, inputs, targets, answers, foils)
        evidence = Evidence(self.model, self.tokenizer, inputs, encoded, self.content_only, self.removal)
        found: list[dict[str, list[Row]]] = [{} for _ in pairs]
        for method in sorted(methods, key=lambda name: not METHODS[name].joins):
            try:
                scores = torch.stack([rows.detach().double().cpu() for rows in batch.rows([method])[method]])
                values = {name: METRICS[name].values(evidence, scores) for name in self.metrics}
            except AssertionError as error:  # with which this package refuses models and numbers it cannot use
                for rows, (example, one) in zip(found, pairs, strict=True):
                    # Is it the method, or one example of the batch?
                    alone = len(pairs) > 1
                    rows[method] = (
                        self._judge([(example, one)], [method])[0][method]
                        if alone
                        else [self._skipped(example.id, str(error), example) | {"method": method}]
                    )
                continue
            for place, (example, one) in enumerate(pairs):
                found[place][method] = self._rows(example, one, method, scores[:, place], values, place)
        return found

    def _rows(
        self,
        example: Example,
        encoded: Encoded,
        method: str,
        scores: Tensor,
        values: Mapping[str, Tensor],
        place: int,
    ) -> list[Row]:
        about = self._about(example) | {
            "method": method,
            "skipped": None,
            "tokens": readable_tokens(self.tokenizer, encoded.ids),
            "target": encoded.target,
            "cue": list(encoded.cue),
        }
        return [
            about
            | {"layer": layer if METHODS[method].layered else None, "scores": row[: len(encoded.ids)].tolist()}
            | {name: each[layer, place].item() for name, each in values.items()}
            for layer, row in enumerate(scores)
        ]

    def _about(self, example: Example) -> Row:
        return {"example": example.id, "group": example.group, "label": example.label}

    def _skipped(self, id: str, reason: str, example: Example | None = None) -> Row:
        nothing: Row = dict.fromkeys((*COLUMNS, *self.metrics))
        about = {"example": id, "group": ""} if example is None else self._about(example)
        return nothing | {"tokens": [], "cue": [], "scores": [], "skipped": reason} | about
