"""Methods and metrics on batches of examples: columns in, columns out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn

from captum_vz import find_layers
from captum_vz.errors import RefusedError
from captum_vz.metrics.extra import study_extra
from captum_vz.study.examples.encoding import BadExampleError, Encoded, encode, pad
from captum_vz.study.examples.example import Example
from captum_vz.study.examples.text import max_tokens, predicts_next
from captum_vz.study.methods import METHODS, Batch, check_methods, encoder_of, joined_first
from captum_vz.study.scoring.metrics import METRICS, EvaluationBatch, check_metrics, removal_of
from captum_vz.visualization import readable_tokens

with study_extra("captum_vz.study"):
    import pyarrow as pa

Row = dict[str, Any]

_NO_MEMORY: Final = re.compile(r"out of memory|not enough memory|(can't|cannot) allocate memory", re.IGNORECASE)

#: How the reason begins for which an example is computed again.
OUT_OF_MEMORY: Final = "out of memory: "

#: The columns of a row before the metrics, and their types.
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


def score_rows(
    example: Example,
    encoded: Encoded,
    method: str,
    tokens: Sequence[str],
    scores: Tensor,
    values: Mapping[str, Sequence[float]],
) -> list[Row]:
    """The rows of one method for one example, one for each layer or one for all.

    Args:
        example: The example.
        encoded: The same as token ids.
        method: The name of the method.
        tokens: Its tokens, as a person reads them.
        scores: `(layers, tokens or more)`; scores of padding are dropped.
        values: For each metric its value in each layer.
    """
    about = _about(example) | {
        "method": method,
        "skipped": None,
        "tokens": list(tokens),
        "target": encoded.target,
        "cue": list(encoded.cue),
    }
    return [
        about
        | {"layer": layer if METHODS[method].layered else None, "scores": row[: len(encoded.ids)].tolist()}
        | {name: each[layer] for name, each in values.items()}
        for layer, row in enumerate(scores)
    ]


def skipped_row(metrics: Iterable[str], id: str, reason: str, example: Example | None = None) -> Row:
    """The row of an example that cannot be used, with the reason."""
    nothing: Row = dict.fromkeys((*COLUMNS, *metrics))
    about = {"example": id, "group": ""} if example is None else _about(example)
    return nothing | {"tokens": [], "cue": [], "scores": [], "skipped": reason} | about


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, or was raised because another one said so."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    kinds = (MemoryError, torch.OutOfMemoryError)
    # On a CPU, torch raises a RuntimeError that only its text tells from others.
    return any(isinstance(one, kinds) or _NO_MEMORY.search(str(one)) for one in seen)


def is_out_of_memory(row: Row) -> bool:
    """Whether an example was skipped because there was not enough memory, which another start may have."""
    return (row["skipped"] or "").startswith(OUT_OF_MEMORY)


def _about(example: Example) -> Row:
    return {"example": example.id, "group": example.group, "label": example.label}


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
        model: A model of transformers in eval mode. Of a model with encoder and decoder, the encoder is explained.
        tokenizer: Its tokenizer, a fast one.
        methods: Names of :data:`~captum_vz.study.METHODS`. None: :data:`~captum_vz.study.DEFAULT_METHODS`.
        metrics: Names of :data:`~captum_vz.study.METRICS`. None: cue alignment and blank-out.
        batch_size: The number of sentences in a batch. Sentences of similar length are batched together.
        content_only: Whether cue alignment ignores special tokens and the target. Rows are then divided by the sum of
            the other scores.
        removal: The token in the place of a token that is blanked out or erased, "unk" or "mask"; or "delete".
        layers: The layers of the model, if :func:`~captum_vz.find_layers` does not find them.

    Raises:
        ValueError: The model is in train mode; a method or metric is unknown; the tokenizer does not have the token of
            `removal`; or a metric needs a head for words that the model does not have.

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
        self.model = encoder_of(model)
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
                    f"{type(self.model).__name__} has no head that predicts words, which "
                    f"{', '.join(name for name in self.metrics if METRICS[name].needs_forms)} needs: pass other "
                    "metrics, such as cue_dot and cue_ap."
                )
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: pass at least 1.")
        self.batch_size = batch_size
        self.content_only = content_only
        self.removal = removal
        self.layers = find_layers(self.model) if layers is None else list(layers)

    @property
    def schema(self) -> Any:
        """The columns and their types, a pyarrow schema. A batch whose entries are all None does not show its types."""
        return pa.schema([*COLUMNS.items(), *((name, pa.float64()) for name in self.metrics)])

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The rows of :meth:`score` as columns, for columns of examples.

        Args:
            batch: For each key of :meth:`Example.to_dict` a list or array with one entry for each example. An entry
                that is not an example is skipped with its reason, like any bad example.

        Returns:
            The columns of the rows, lists of the same length.
        """
        examples: list[Example | Row] = []
        for values in zip(*batch.values(), strict=True):
            fields = dict(zip(batch, values, strict=True))
            try:
                examples.append(Example.from_dict(fields))
            except ValueError as error:
                examples.append(skipped_row(self.metrics, str(fields.get("id")), str(error)))
        rows = self._score(examples, None)
        return {name: [row[name] for row in rows] for name in (*COLUMNS, *self.metrics)}

    def score(self, examples: Iterable[Example], advance: Callable[[int], object] | None = None) -> list[Row]:
        """The scores of each method in each layer for each example, and the metrics of these scores.

        Args:
            examples: The examples.
            advance: Called after each batch with the number of its examples.

        Returns:
            For each example in the order given, for each method, for each of its layers a row: ``example`` (its id),
            ``group``, ``label``, ``method``, ``layer`` (from 0; None where a method has no layers), ``tokens``,
            ``target`` (a position), ``cue`` (positions), ``scores`` (one for each token, summing to 1), and the metrics
            by their names, NaN where they are undefined. A bad example has a single row with the reason in
            ``skipped``. A method that refuses an example has one such row. In other rows, ``skipped`` is None.
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
            except BadExampleError as error:
                found[place] = [skipped_row(self.metrics, example.id, str(error), example)]
        if advance is not None:
            advance(len(examples) - len(encoded))
        for places in self._batches(encoded):
            batch = [(example, encoded[place]) for place in places if isinstance(example := examples[place], Example)]
            for place, by_method in zip(places, self._evaluate(batch, self.methods), strict=True):
                found[place] = [row for method in self.methods for row in by_method[method]]
            if advance is not None:
                advance(len(places))
        return [row for rows in found for row in rows]

    def _encode(self, example: Example) -> Encoded:
        most = max_tokens(self.model, self.tokenizer)
        encoded = encode(
            self.tokenizer,
            example,
            max_tokens=most,
            needs_cue=self.needs_cue,
            needs_forms=self.needs_forms,
            until_target=predicts_next(self.model),
        )
        if self.content_only and self.needs_cue and encoded.target in encoded.cue:
            raise BadExampleError("the cue is the token that is explained, which content_only ignores")
        return encoded

    def _batches(self, encoded: Mapping[int, Encoded]) -> Iterator[list[int]]:
        """The examples of each batch: of similar length, and either all with two forms or all without."""

        def kind(place: int) -> tuple[bool, int]:
            return encoded[place].forms is None, len(encoded[place].ids)

        for _, alike in groupby(sorted(encoded, key=kind), key=lambda place: kind(place)[0]):
            places = list(alike)
            for start in range(0, len(places), self.batch_size):
                yield places[start : start + self.batch_size]

    def _evaluate(self, pairs: Sequence[tuple[Example, Encoded]], methods: Sequence[str]) -> list[dict[str, list[Row]]]:
        """For each example of one batch, for each method, its rows."""
        encoded = [one for _, one in pairs]
        inputs = pad(self.tokenizer, encoded, self.model.device)
        forms = [one.forms for one in encoded if one.forms is not None]
        targets, foils = ([form[k] for form in forms] or None for k in (0, 1))
        tokens = [one.target for one in encoded]
        batch = Batch(self.model, self.tokenizer, self.layers, inputs, tokens, targets, foils)
        evaluation = EvaluationBatch(self.model, self.tokenizer, inputs, encoded, self.content_only, self.removal)
        found: list[dict[str, list[Row]]] = [{} for _ in pairs]
        for method in joined_first(methods):
            try:
                scores = torch.stack([rows.detach().double().cpu() for rows in METHODS[method].rows(batch)])
                values = {name: METRICS[name].values(evaluation, scores) for name in self.metrics}
            except (RefusedError, RuntimeError, MemoryError) as error:
                lacks_memory = ran_out_of_memory(error)
                if not lacks_memory and not isinstance(error, RefusedError):
                    raise
                # One example may be the reason for refusing the batch, or need less memory, so each is tried alone.
                for rows, (example, one) in zip(found, pairs, strict=True):
                    if len(pairs) > 1:
                        rows[method] = self._evaluate([(example, one)], [method])[0][method]
                    else:
                        reason = f"{OUT_OF_MEMORY if lacks_memory else ''}{str(error) or type(error).__name__}"
                        skipped = skipped_row(self.metrics, example.id, reason, example)
                        rows[method] = [skipped | {"method": method}]
                continue
            for place, (example, one) in enumerate(pairs):
                own = {name: each[:, place].tolist() for name, each in values.items()}
                words = readable_tokens(self.tokenizer, one.ids)
                found[place][method] = score_rows(example, one, method, words, scores[:, place], own)
        return found
