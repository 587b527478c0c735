"""Rows of scores, the reasons for missing numbers, and metrics of these rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Literal

import torch
from torch import Tensor

from captum_vz._engine import is_out_of_memory
from captum_vz.errors import ArgumentError, RefusedError, needs_extra
from captum_vz.metrics import MaskedSentences, Prediction, blank_out
from captum_vz.metrics.prediction import Removal
from captum_vz.study.examples import BadExampleError, Encoded, Example, pad
from captum_vz.subjects.texts import content_specials
from captum_vz.text import fill_batches

with needs_extra("captum_vz.study", "study"):
    import pyarrow as pa

Row = dict[str, Any]

OUT_OF_MEMORY: Final = "out of memory: "  #: how the reason begins for which an example is computed again

#: The columns of a row before the metrics, and their types.
COLUMNS: Final = {
    **dict.fromkeys(("example", "group", "label", "method"), pa.string()),
    **dict.fromkeys(("layer", "deciding"), pa.int32()),
    **dict.fromkeys(("metric", "skipped"), pa.string()),
    "tokens": pa.list_(pa.string()),
    "target": pa.int32(),
    **dict.fromkeys(("cue", "content"), pa.list_(pa.int32())),
    "scores": pa.list_(pa.float64()),
}


def row_of(example: Example, **entries: Any) -> Row:
    """A row about an example, with some entries. The others are None."""
    about = {"example": example.id, "group": example.group, "label": example.label}
    return dict.fromkeys(COLUMNS) | about | entries


def skipped_row(reason: str, example: Example, method: str | None = None, metric: str | None = None) -> Row:
    """The row of an example without numbers: of one method, of one metric, or of all methods."""
    empty: Row = {"tokens": [], "cue": [], "content": [], "scores": []}
    return row_of(example, method=method, metric=metric, skipped=reason, **empty)


def reason_of(error: BaseException) -> str:
    """Why something failed, for the table of skipped examples."""
    told = str(error) or type(error).__name__
    if ran_out_of_memory(error):
        return f"{OUT_OF_MEMORY}{told}"
    # A refusal is a sentence of this package. Other errors are named, because their text alone may say little.
    return told if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that there is not enough memory, or was raised because another one said so."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(map(is_out_of_memory, seen))


BATCH_TOKENS: Final = 4096  #: the most tokens in a batch
BLANK: Final = "blank"  #: the removal that is right for a model, see :func:`removal_of`
Over = Literal["forms", "vocabulary"]  #: what probabilities sum to 1 over


@dataclass(frozen=True)
class Metric:
    """One row of the registry.

    Its `values` are a function of an :class:`~captum_vz.study.EvaluationBatch` and of rows of scores `(rows, batch,
    tokens)`, with values `(rows, batch)`. NaN says that it is undefined for an example. A metric that does not run the
    model only reads scores, so a finished study computes it without a model.
    """

    title: str  #: its name in a figure
    values: Callable[..., Any]
    needs_cue: bool = False  #: whether it needs examples with a cue
    needs_forms: bool = False  #: whether it needs the probabilities of the right and the wrong form
    runs_model: bool = False  #: whether it runs the model, or needs the tokenizer
    version: str | None = None  #: names the code of a metric of your own; None: a digest of its source does
    own: bool = False  #: whether it is a metric of your own
    two_truths: bool = False  #: whether methods that join layers are compared with another truth than the others
    removal: str | None = None  #: what replaces a removed token, see :func:`removal_of`
    words: tuple[str, ...] = ()  #: the words that may follow its name, each after a colon, see :func:`metric_named`

    @property
    def needs_model(self) -> bool:
        """Whether the model is loaded to compute it."""
        return self.runs_model or self.needs_forms


@dataclass(eq=False, repr=False)
class EvaluationBatch:
    """A batch of examples with what the metrics need: cues, content tokens, and the effects of blanking out.

    A study makes it. Tensors are made or copied at each use, so that a metric that changes them harms no other one.
    """

    examples: Sequence[Example]  #: the examples
    _rows: Sequence[Row]
    encoded: Sequence[Encoded]  #: the examples as tokens, if the metrics run the model; otherwise empty
    _known_scorer: Any
    method: str = ""  #: the name of the method whose rows are evaluated
    _kept: dict[Any, Any] = field(default_factory=dict)  # what the metrics of all methods share

    @property
    def _scorer(self) -> Any:
        if self._known_scorer is None:
            raise RuntimeError("the metric runs the model: pass it as Metric(..., runs_model=True)")
        return self._known_scorer

    @property
    def model(self) -> Any:
        """The model."""
        return self._scorer.model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._scorer.tokenizer

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The padded batch, on the model's device. Only for metrics that run the model."""
        return pad(self.tokenizer, self.encoded, self.model.device)

    def rows_of(self, changed: Any) -> Tensor:
        """The rows of the method for a changed copy of the model, `(rows, batch, tokens)`. NaN where there are none.

        Raises:
            ArgumentError: The method fails with this copy for all examples.
        """
        rows = self._scorer.of_methods([self.method], changed).scores(self.examples)
        used = [row for row in rows if row["skipped"] is None]
        if not used:
            raise ArgumentError(f"{self.method} fails with a changed copy of the model: {rows[0]['skipped']}")
        found = [[row for row in used if row["example"] == example.id] for example in self.examples]
        return _stacked(found, torch.full(self.attended.shape, torch.nan))

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
        found = torch.zeros_like(self.attended)
        for one, row in zip(found, self._rows, strict=True):
            one[list(row[name])] = True
        return found

    def prediction_of(self, removal: str = BLANK, over: Over = "forms") -> Prediction:
        """The model's prediction with tokens removed in one way. What it computes is kept for all metrics.

        `removal` says what replaces a removed token, see :func:`removal_of`. Probabilities sum to 1 `over` the two
        "forms", or over the "vocabulary".
        """

        def made() -> Prediction:
            inputs, forms = self.inputs, torch.tensor([one.forms for one in self.encoded])
            places = self.targets, self.content, forms
            sentences = MaskedSentences(inputs["input_ids"], inputs["attention_mask"], *places)
            return Prediction(self.model, sentences, removal_of(self.tokenizer, removal)[0])

        return self.once(("prediction", removal), made).among(over)

    def effects_of(self, removal: str = BLANK, over: Over = "forms") -> Tensor:
        """The effect of blanking out each token in one way, `(batch, tokens)`, see :meth:`prediction_of`."""
        key = ("effects", removal, over)
        effects: Tensor = self.once(key, lambda: blank_out(self.prediction_of(removal, over)))
        return effects.clone()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned at the first use of a key, by the metrics of any method."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def removal_of(tokenizer: Any, removal: str = BLANK) -> tuple[Removal, str]:
    """What replaces a removed token in a :class:`~captum_vz.metrics.Prediction`, and its name in words.

    "mask": the tokenizer's mask. "delete": nothing. "blank": the tokenizer's unknown token or, without one, its mask;
    without both, the mean word vector. An unknown token that ends documents, as in GPT-2, does not count as one.
    """
    known = content_specials(tokenizer)
    if removal == "delete":
        return "delete", "nothing"
    if removal == BLANK and not known:
        return "mean", "the mean word vector"
    removal = next(iter(known)) if removal == BLANK else removal
    if removal not in known:
        raise ArgumentError(f"removal is {removal!r}, and the tokenizer has no such token: pass 'blank' or 'delete'.")
    return known[removal], str(getattr(tokenizer, f"{removal}_token"))


def _stacked(rows: Sequence[Sequence[Row]], missing: Tensor) -> Tensor:
    """Scores `(rows, batch, tokens)` in float64, of rows for each example. An example without rows has `missing`."""
    found = missing.double().expand(max(map(len, rows)), -1, -1).clone()
    for place, of_example in enumerate(rows):
        for number, row in enumerate(of_example):
            found[number, place] = 0
            found[number, place, : len(row["scores"])] = torch.tensor(row["scores"], dtype=torch.float64)
    return found


def measure(
    metrics: Mapping[str, Metric],
    examples: Mapping[str, Example],
    rows: Iterable[Row],
    scorer: Any,
    batch_size: int,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Row]:
    """Write metrics into rows with scores: a number, NaN where it is undefined, or None where it was skipped.

    Without a `scorer`, the metrics only read scores. The result has a row for each metric that was skipped, with the
    reason.
    """
    by_example: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        row |= dict.fromkeys(metrics)
        by_example.setdefault(row["example"], {}).setdefault(row["method"], []).append(row)
    first = {id: next(iter(of_methods.values()))[0] for id, of_methods in by_example.items()}
    encoded: dict[str, Encoded | None] = {}
    skipped: list[Row] = []

    def needs(name: str) -> tuple[bool, bool, bool]:
        return metrics[name].needs_cue, metrics[name].needs_forms, metrics[name].needs_model

    def length(id: str) -> int:
        return len(first[id]["scores"])

    def of_batch(ids: Sequence[str], names: Sequence[str], methods: Iterable[str]) -> Iterator[Row]:
        tokens = [one for id in ids if (one := encoded[id]) is not None]
        batch = EvaluationBatch([examples[id] for id in ids], [first[id] for id in ids], tokens, scorer)
        # Equal scores, which are not read, stand for a missing example.
        equal = batch.attended / batch.attended.sum(-1, keepdim=True)
        for method in methods:
            batch.method = method
            scores = _stacked([by_example[id].get(method, []) for id in ids], equal)
            for name in names:
                try:
                    values = _checked(name, metrics[name], batch, scores)
                except Exception as error:
                    if len(ids) == 1:
                        yield skipped_row(reason_of(error), examples[ids[0]], method, name)
                        continue
                    # One example may be the reason, or need less memory, so each is tried alone.
                    for id in (id for id in ids if method in by_example[id]):
                        yield from of_batch([id], [name], [method])
                    continue
                for place, id in enumerate(ids):
                    for layer, row in enumerate(by_example[id].get(method, [])):
                        row[name] = float(values[layer, place])

    for (cue, forms, model), alike in groupby(sorted(metrics, key=needs), key=needs):
        names = list(alike)
        encoded.clear()
        for id, row in first.items():
            try:
                if cue and not row["cue"]:
                    raise BadExampleError("there is no cue")
                if cue and row["target"] in row["cue"]:
                    raise BadExampleError("the cue is the token that is explained: name another word as the cue")
                if cue and 0 in row["cue"] and row["target"] == length(id) - 1:
                    raise BadExampleError(
                        "the cue is the first token, on which models of next words draw whatever it is (put words "
                        "before the text, such as --prefix)"
                    )
                encoded[id] = scorer.encode(examples[id], needs_forms=forms) if model and scorer else None
            except BadExampleError as error:
                skipped += [skipped_row(str(error), examples[id], None, name) for name in names]
        for ids in fill_batches(sorted(encoded, key=length), length, batch_size, batch_tokens):
            skipped += of_batch(ids, names, dict.fromkeys(method for id in ids for method in by_example[id]))
    return skipped


def _checked(name: str, metric: Metric, batch: EvaluationBatch, scores: Tensor) -> Tensor:
    """The values of a metric, `(layers, batch)`."""
    found = metric.values(batch, scores.clone())  # a metric that changes its rows harms no other one
    shape, values, cause = tuple(scores.shape[:2]), torch.empty(0), None
    try:
        values = torch.as_tensor(found).detach().cpu()
        came = f"{tuple(values.shape)} of {values.dtype}"
    except (TypeError, ValueError, RuntimeError) as error:
        came, cause = f"an object of type {type(found).__name__}", error
    infinite = bool(values.isinf().any())
    if tuple(values.shape) != shape or values.is_complex() or infinite:
        named = ", ".join(repr(example.id) for example in batch.examples[:3])
        raise ArgumentError(
            f"metric {name!r}, example {named}: the metric returned {'infinity' if infinite else came}; expected "
            f"finite numbers or NaN (layers, batch) of shape {shape}."
        ) from cause
    return values.double()
