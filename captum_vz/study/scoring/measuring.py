"""Metrics of rows of scores, which are in memory or were read from a study's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics import Bounds, MaskedSentences, Prediction, blank_out
from captum_vz.study.examples import Example
from captum_vz.study.examples.encoding import BadExampleError, Encoded, fill_batches, pad
from captum_vz.study.scoring.rows import Row, reason_of, skipped_row

#: What probabilities sum to 1 over.
Over = Literal["forms", "vocabulary"]

#: Gives rows of scores: of a method by its name, for examples, with a changed copy of the model.
ScoreCopy = Callable[[str, Sequence[Example], Any], Sequence[Row]]


@dataclass(frozen=True)
class Metric:
    """One row of the registry.

    Attributes:
        title: Its name in a figure.
        values: Its values `(rows, batch)` for rows of scores `(rows, batch, tokens)`: a function of an
            :class:`~captum_vz.study.EvaluationBatch` and of these rows. NaN says that it is undefined for an example.
        needs_cue: Whether it needs examples with a cue.
        needs_forms: Whether it needs the probabilities of the right and the wrong form.
        runs_model: Whether it runs the model, or needs the tokenizer. The others only read scores, so a finished study
            computes them without a model.
        version: Names the code of a metric of your own. None: a digest of its source does.
        own: Whether it is a metric of your own, not of this package.
        two_truths: Whether methods that join layers are compared with another truth than those of a single layer.
        removal: What stands in the place of a removed token: "unk", "mask", or "delete" (nothing). None: no token is
            removed.
        words: The words that may follow its name, each after a colon, see :func:`metric_named`.
    """

    title: str
    values: Callable[..., Any]
    needs_cue: bool = False
    needs_forms: bool = False
    runs_model: bool = False
    version: str | None = None
    own: bool = False
    two_truths: bool = False
    removal: str | None = None
    words: tuple[str, ...] = ()

    @property
    def needs_model(self) -> bool:
        """Whether the model is loaded to compute it."""
        return self.runs_model or self.needs_forms


class EvaluationBatch:
    """A batch of examples with what the metrics need: cues, content tokens, and the effects of blanking out.

    Attributes:
        method: The name of the method whose rows are evaluated.
        kept: Cache that the metrics of all methods share.

    Args:
        examples: The examples.
        rows: A row of scores of each example, with its `target`, its `cue` and its `content`.
        encoded: The examples as tokens, if the metrics run the model; otherwise empty.
        load: Gives the model and its tokenizer.
        content_only: Whether cue alignment is over the content tokens only.
        score: Gives the rows of a changed copy of the model.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        rows: Sequence[Row],
        encoded: Sequence[Encoded],
        load: Callable[[], tuple[Any, Any]],
        content_only: bool,
        score: ScoreCopy,
    ) -> None:
        self.examples = examples
        self.encoded = encoded
        self.content_only = content_only
        self.method = ""
        self.kept: dict[Any, Any] = {}
        self._rows = rows
        self._load = load
        self._score = score
        self._predictions: dict[str, Prediction] = {}
        self._effects: dict[tuple[str, str], Tensor] = {}
        self._bounds: dict[Any, Bounds] = {}

    @property
    def model(self) -> Any:
        """The model."""
        return self._load()[0]

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._load()[1]

    # Tensors are made at each use, so that a metric that changes them harms no other one.

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The padded batch, on the model's device. Only for metrics that run the model."""
        return pad(self.tokenizer, self.encoded, self.model.device)

    def rows_of(self, changed: Any) -> Tensor:
        """The rows of the method for a changed copy of the model, `(rows, batch, tokens)`. NaN where there are none.

        Raises:
            ArgumentError: The method fails with this copy for all examples.
        """
        found: dict[str, list[Row]] = {example.id: [] for example in self.examples}
        rows = self._score(self.method, self.examples, changed)
        for row in rows:
            if row["skipped"] is None:
                found[row["example"]].append(row)
        if not any(found.values()):
            raise ArgumentError(f"{self.method} fails with a changed copy of the model: {rows[0]['skipped']}")
        return stacked(list(found.values()), torch.full(self.attended.shape, torch.nan))

    @property
    def targets(self) -> list[int]:
        """The position of each example's target."""
        return [row["target"] for row in self._rows]

    @property
    def cues(self) -> Tensor:
        """Which tokens are cues, booleans `(batch, tokens)`."""
        return self._at("cue")

    @property
    def content(self) -> Tensor:
        """Booleans `(batch, tokens)`: all except special tokens, padding and the target."""
        return self._at("content")

    @property
    def attended(self) -> Tensor:
        """Booleans `(batch, tokens)`: all except padding."""
        counts = torch.tensor([len(row["scores"]) for row in self._rows])
        return torch.arange(int(counts.max())) < counts[:, None]

    def _at(self, name: str) -> Tensor:
        """Booleans `(batch, tokens)`: the positions in a column of the rows."""
        found = torch.zeros_like(self.attended)
        for one, row in zip(found, self._rows, strict=True):
            one[list(row[name])] = True
        return found

    @property
    def prediction(self) -> Prediction:
        """The model's choice between the two forms, with unknown tokens in the place of removed ones."""
        return self.prediction_of()

    @property
    def effects(self) -> Tensor:
        """The effect of blanking out each token with an unknown token, `(batch, tokens)`."""
        return self.effects_of()

    def prediction_of(self, removal: str = "unk", over: Over = "forms") -> Prediction:
        """The model's prediction with tokens removed in one way. What it computes is kept for all metrics.

        Args:
            removal: What stands in the place of a removed token: "unk" or "mask"; or "delete".
            over: What the probabilities sum to 1 over: the two "forms", or the "vocabulary".
        """
        if removal not in self._predictions:
            self._predictions[removal] = Prediction(self.model, self._sentences, removal_of(self.tokenizer, removal))
        return self._predictions[removal].among(over)

    @cached_property
    def _sentences(self) -> MaskedSentences:
        inputs, forms = self.inputs, torch.tensor([one.forms for one in self.encoded])
        return MaskedSentences(inputs["input_ids"], inputs["attention_mask"], self.targets, self.content, forms)

    def effects_of(self, removal: str = "unk", over: Over = "forms") -> Tensor:
        """The effect of blanking out each token in one way, `(batch, tokens)`, see :meth:`prediction_of`."""
        if (removal, over) not in self._effects:
            self._effects[removal, over] = blank_out(self.prediction_of(removal, over))
        return self._effects[removal, over].clone()

    def bounds(self, of: Callable[[Prediction], Bounds], removal: str = "unk") -> Bounds:
        """What the best and the worst order of the tokens give, such as those of :func:`deletion_bounds`."""
        if (of, removal) not in self._bounds:
            self._bounds[of, removal] = of(self.prediction_of(removal))
        return self._bounds[of, removal]


def removal_of(tokenizer: Any, removal: str) -> int | Literal["delete"]:
    """The id in the place of a removed token, or "delete".

    Raises:
        ArgumentError: The name is unknown, or the tokenizer does not have the token.
    """
    if removal == "delete":
        return "delete"
    number = getattr(tokenizer, f"{removal}_token_id", None) if removal in ("unk", "mask") else None
    if number is None:
        raise ArgumentError(f"removal is {removal!r}, and the tokenizer has no such token: pass 'delete'.")
    return int(number)


def stacked(rows: Sequence[Sequence[Row]], missing: Tensor) -> Tensor:
    """Scores `(rows, batch, tokens)` of rows for each example, in float64.

    Args:
        rows: The rows of each example.
        missing: The scores of an example without rows, `(batch, tokens)`.
    """
    found = missing.double().expand(max(map(len, rows)), -1, -1).clone()
    for place, of_example in enumerate(rows):
        for number, row in enumerate(of_example):
            found[number, place] = 0
            found[number, place, : len(row["scores"])] = torch.tensor(row["scores"], dtype=torch.float64)
    return found


@dataclass(frozen=True)
class Measurer:
    """Computes metrics of rows of scores.

    Attributes:
        metrics: The metrics by their names.
        load: Gives the model and its tokenizer. It is called only for metrics that need them.
        encode: Gives the tokens of an example. With `needs_forms=True`, an example without two forms is an error.
        sizes: The most sentences in a batch, and the most tokens.
        content_only: Whether cue alignment is over the content tokens only.
        score: See :class:`~captum_vz.study.EvaluationBatch`.
    """

    metrics: Mapping[str, Metric]
    load: Callable[[], tuple[Any, Any]]
    encode: Callable[..., Encoded]
    sizes: tuple[int, int]
    content_only: bool
    score: ScoreCopy

    def measure(self, examples: Mapping[str, Example], rows: Sequence[Row]) -> list[Row]:
        """Write the metrics into rows of scores.

        Args:
            examples: The examples by their ids.
            rows: Rows with scores. Each gets an entry for each metric: a number, NaN where the metric is undefined, or
                None where it was skipped.

        Returns:
            A row for each metric that was skipped, with the reason.
        """
        by_example: dict[str, dict[str, list[Row]]] = {}
        for row in rows:
            row |= dict.fromkeys(self.metrics)
            by_example.setdefault(row["example"], {}).setdefault(row["method"], []).append(row)
        first = {id: next(iter(of_methods.values()))[0] for id, of_methods in by_example.items()}
        skipped: list[Row] = []

        def needs(name: str) -> tuple[bool, bool, bool]:
            metric = self.metrics[name]
            return metric.needs_cue, metric.needs_forms, metric.needs_model

        def length(id: str) -> int:
            return len(first[id]["scores"])

        for (cue, forms, model), names in groupby(sorted(self.metrics, key=needs), key=needs):
            alike, encoded = list(names), {}
            for id, row in first.items():
                try:
                    encoded[id] = self._usable(examples[id], row, cue, forms, model)
                except BadExampleError as error:
                    skipped += [skipped_row(str(error), examples[id], None, name, self.metrics) for name in alike]
            for some in fill_batches(sorted(encoded, key=length), length, *self.sizes):
                skipped += self._batch({id: examples[id] for id in some}, by_example, encoded, alike)
        return skipped

    def _usable(self, example: Example, row: Row, cue: bool, forms: bool, model: bool) -> Encoded | None:
        """The tokens of an example, if a metric needs the model; an error if the metric cannot use the example."""
        if cue and not row["cue"]:
            raise BadExampleError("there is no cue")
        if cue and self.content_only and row["target"] in row["cue"]:
            raise BadExampleError("the cue is the token that is explained, which content_only ignores")
        return self.encode(example, needs_forms=forms) if model else None

    def _batch(
        self,
        examples: Mapping[str, Example],
        rows: Mapping[str, Mapping[str, list[Row]]],
        encoded: Mapping[str, Encoded | None],
        names: Sequence[str],
    ) -> Iterator[Row]:
        ids = list(examples)
        first = [next(iter(rows[id].values()))[0] for id in ids]
        tokens = [one for id in ids if (one := encoded[id]) is not None]
        batch = EvaluationBatch(list(examples.values()), first, tokens, self.load, self.content_only, self.score)
        for method in dict.fromkeys(method for id in ids for method in rows[id]):
            batch.method = method
            # Equal scores, which are not read, stand for a missing example.
            equal = batch.attended / batch.attended.sum(-1, keepdim=True)
            scores = stacked([rows[id].get(method, []) for id in ids], equal)
            for name in names:
                try:
                    values = _checked(name, self.metrics[name], batch, scores)
                except Exception as error:
                    if len(ids) == 1:
                        yield skipped_row(reason_of(error), examples[ids[0]], method, name, self.metrics)
                        continue
                    # One example may be the reason, or need less memory, so each is tried alone.
                    for id in (id for id in ids if method in rows[id]):
                        yield from self._batch({id: examples[id]}, {id: {method: rows[id][method]}}, encoded, [name])
                    continue
                for place, id in enumerate(ids):
                    for layer, row in enumerate(rows[id].get(method, [])):
                        row[name] = float(values[layer, place])


def _checked(name: str, metric: Metric, batch: EvaluationBatch, scores: Tensor) -> Tensor:
    """The values of a metric, `(layers, batch)`."""
    found = metric.values(batch, scores.clone())  # a metric that changes its rows harms no other one
    shape = tuple(scores.shape[:2])
    try:
        values = torch.as_tensor(found).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _wrong(name, batch, f"an object of type {type(found).__name__}", shape) from error
    if tuple(values.shape) != shape or values.is_complex():
        raise _wrong(name, batch, f"{tuple(values.shape)} of {values.dtype}", shape)
    if values.isinf().any():
        raise _wrong(name, batch, "infinity", shape)
    return values.double()


def _wrong(name: str, batch: EvaluationBatch, came: str, shape: tuple[int, ...]) -> ArgumentError:
    named = ", ".join(repr(example.id) for example in batch.examples[:3])
    return ArgumentError(
        f"metric {name!r}, example {named}: the metric returned {came}; expected finite numbers or NaN (layers, batch) "
        f"of shape {shape}."
    )
