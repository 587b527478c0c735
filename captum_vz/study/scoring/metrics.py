"""The list of metrics, and the batch of examples that they evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor

from captum_vz._names import chosen_names
from captum_vz.errors import ArgumentError
from captum_vz.metrics import (
    MaskedSentences,
    Prediction,
    blank_out,
    comprehensiveness,
    cue_average_precision,
    cue_dot_product,
    spearman,
    sufficiency,
)
from captum_vz.study.examples.encoding import Encoded, pad
from captum_vz.study.examples.example import Example
from captum_vz.study.examples.patching import (
    Patched,
    activation_patching,
    largest_is_right,
    overlap,
    truth_rows,
    value_patching,
)
from captum_vz.study.methods import METHODS
from captum_vz.study.scoring.rows import COLUMNS, Row


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
    """

    title: str
    values: Callable[[EvaluationBatch, Tensor], Any]
    needs_cue: bool = False
    needs_forms: bool = False
    runs_model: bool = False
    version: str | None = None
    own: bool = False

    @property
    def needs_model(self) -> bool:
        """Whether the model is loaded to compute it."""
        return self.runs_model or self.needs_forms


class EvaluationBatch:
    """A batch of examples with what the metrics need: cues, content tokens, and the effects of blanking out.

    Attributes:
        method: The name of the method whose rows are evaluated.
        kept: What metrics of one method keep for the next method.

    Args:
        examples: The examples.
        rows: A row of scores of each example, with its `target`, its `cue` and its `content`.
        encoded: The examples as tokens, if the metrics run the model; otherwise empty.
        load: Gives the model and its tokenizer.
        content_only: Whether cue alignment is over the content tokens only.
        removal: The token in the place of a removed token, "unk" or "mask"; or "delete".
    """

    def __init__(
        self,
        examples: Sequence[Example],
        rows: Sequence[Row],
        encoded: Sequence[Encoded],
        load: Callable[[], tuple[Any, Any]],
        content_only: bool,
        removal: str,
    ) -> None:
        self.examples = examples
        self.encoded = encoded
        self.content_only = content_only
        self.removal = removal
        self.method = ""
        self.kept: dict[Any, Any] = {}
        self._rows = rows
        self._load = load

    @property
    def model(self) -> Any:
        """The model."""
        return self._load()[0]

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._load()[1]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """The padded batch, on the model's device. Only for metrics that run the model."""
        return pad(self.tokenizer, self.encoded, self.model.device)

    @property
    def targets(self) -> list[int]:
        """The position of each example's target."""
        return [row["target"] for row in self._rows]

    @cached_property
    def cues(self) -> Tensor:
        """Which tokens are cues, booleans `(batch, tokens)`."""
        return self._at("cue")

    @cached_property
    def content(self) -> Tensor:
        """Booleans `(batch, tokens)`: all except special tokens, padding and the target."""
        return self._at("content")

    @cached_property
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

    @cached_property
    def prediction(self) -> Prediction:
        """The model's choice between the two forms."""
        sentences = MaskedSentences(
            ids=self.inputs["input_ids"],
            mask=self.inputs["attention_mask"],
            target=self.targets,
            content=self.content,
            forms=torch.tensor([one.forms for one in self.encoded]),
        )
        return Prediction(self.model, sentences, removal_of(self.tokenizer, self.removal))

    @cached_property
    def effects(self) -> Tensor:
        """The effect of blanking out each token, `(batch, tokens)`."""
        return blank_out(self.prediction)


def _alignment(measure: Callable[..., Tensor], batch: EvaluationBatch, rows: Tensor) -> Tensor:
    keep = batch.content if batch.content_only else batch.attended
    each = len(rows)
    values = measure(rows.flatten(0, 1), batch.cues.repeat(each, 1), keep.repeat(each, 1))
    return values.view(each, -1)


def _blank_out(batch: EvaluationBatch, rows: Tensor) -> Tensor:
    each = len(rows)
    values = spearman(rows.flatten(0, 1), batch.effects.repeat(each, 1), batch.content.repeat(each, 1))
    return values.view(each, -1)


def _eraser(measure: Callable[[Prediction, Tensor], Tensor], batch: EvaluationBatch, rows: Tensor) -> Tensor:
    return torch.stack([measure(batch.prediction, row).mean(-1) for row in rows])


def _patched(
    patching: Callable[..., Patched],
    measure: Callable[[Tensor, Tensor], Tensor],
    batch: EvaluationBatch,
    rows: Tensor,
) -> Tensor:
    method, found = METHODS.get(batch.method), []
    joins = method is not None and method.joined is not None
    for place, example in enumerate(batch.examples):
        truth = truth_rows(patching, batch.model, batch.tokenizer, example, len(rows), joins, batch.kept)
        found.append(measure(truth, rows[:, place, : truth.shape[-1]]))
    return torch.stack(found, 1)


def _patching(title: str, patching: Callable[..., Patched], measure: Callable[[Tensor, Tensor], Tensor]) -> Metric:
    return Metric(title, partial(_patched, patching, measure), needs_cue=True, needs_forms=True, runs_model=True)


#: All metrics by their names. To add a metric, add one row.
METRICS: Final[dict[str, Metric]] = {
    "cue_dot": Metric("cue alignment, dot product", partial(_alignment, cue_dot_product), needs_cue=True),
    "cue_ap": Metric("cue alignment, average precision", partial(_alignment, cue_average_precision), needs_cue=True),
    "blank_out": Metric("Spearman with blank-out", _blank_out, needs_forms=True),
    "comprehensiveness": Metric("comprehensiveness (AOPC)", partial(_eraser, comprehensiveness), needs_forms=True),
    "sufficiency": Metric("sufficiency (AOPC)", partial(_eraser, sufficiency), needs_forms=True),
    "value_patching": _patching("overlap with value patching", value_patching, overlap),
    "value_patching_top": _patching("largest of value patching found", value_patching, largest_is_right),
    "activation_patching": _patching("overlap with activation patching", activation_patching, overlap),
    "activation_patching_top": _patching("largest of activation patching", activation_patching, largest_is_right),
}

#: The metrics of `metrics=None`.
DEFAULT_METRICS: Final = ("cue_dot", "cue_ap", "blank_out")


def register_metric(
    name: str,
    metric: Metric | Callable[[EvaluationBatch, Tensor], Any],
    *,
    title: str | None = None,
    needs_cue: bool = False,
    needs_forms: bool = False,
    runs_model: bool = False,
    version: str | None = None,
) -> Metric:
    """Adds a metric of your own to :data:`~captum_vz.study.METRICS`, by a name that studies and the command take.

    Args:
        name: Its name, the name of a column.
        metric: A function of an :class:`~captum_vz.study.EvaluationBatch` and rows of scores `(rows, batch, tokens)`
            that returns `(rows, batch)`. Or a :class:`~captum_vz.study.Metric`, with which the other arguments except
            `version` are ignored.
        title: Its name in a figure. None: `name`.
        needs_cue: See :class:`~captum_vz.study.Metric`, like the three arguments after it.
        needs_forms: See there.
        runs_model: See there.
        version: See there.

    Raises:
        ArgumentError: The name is taken by a metric of this package or by a column, or `metric` cannot be called.

    >>> from captum_vz.study import METRICS, register_metric
    >>> register_metric("largest", lambda batch, rows: rows.max(-1).values).title
    'largest'
    >>> del METRICS["largest"]
    """
    before = METRICS.get(name)
    if name in {*COLUMNS, "model"} or (before is not None and not before.own):
        raise ArgumentError(f"name is {name!r}, which captum_vz uses: pass another name.")
    if isinstance(metric, Metric):
        made = metric
    elif callable(metric):
        made = Metric(title or name, metric, needs_cue, needs_forms, runs_model)
    else:
        raise ArgumentError(f"metric is of type {type(metric).__name__}: pass a function of a batch and rows.")
    METRICS[name] = replace(made, version=version or made.version, own=True)
    return METRICS[name]


def given_metrics(metrics: Any) -> dict[str, Metric]:
    """The metrics that a user passes, by their names.

    Args:
        metrics: None for the default metrics, names of :data:`METRICS`, or a mapping from names to metrics or
            functions.

    Raises:
        ArgumentError: A name is unknown, or something is no metric.
    """
    if not isinstance(metrics, Mapping):
        return {name: METRICS[name] for name in check_metrics(metrics)}
    found = {}
    for name, one in metrics.items():
        if not isinstance(one, Metric) and not callable(one):
            raise ArgumentError(f"metric {name!r} is of type {type(one).__name__}: pass a Metric or a function.")
        if METRICS.get(name, one) is not one or name in {*COLUMNS, "model"}:
            raise ArgumentError(f"metrics has {name!r}, which is the name of something else: pass another name.")
        found[name] = one if isinstance(one, Metric) else Metric(name, cast(Any, one), own=True)
    if not found:
        check_metrics([])
    return found


_REMOVALS: Final = ("unk", "mask", "delete")


def check_metrics(metrics: Iterable[str] | None) -> tuple[str, ...]:
    """The names, in the order given; None: cue alignment and blank-out.

    Raises:
        ValueError: A name is not in :data:`METRICS`, or there is no name.
    """
    return chosen_names("metrics", metrics, METRICS, DEFAULT_METRICS)


def check_removal(removal: str) -> None:
    """Check the name of a way to remove a token.

    Raises:
        ValueError: The name is unknown.
    """
    if removal not in _REMOVALS:
        raise ValueError(f"removal is {removal!r}: pass one of {', '.join(map(repr, _REMOVALS))}.")


def removal_of(tokenizer: Any, removal: str) -> int | Literal["delete"]:
    """The id in the place of a removed token, or "delete".

    Raises:
        ValueError: The name is unknown, or the tokenizer does not have the token.
    """
    check_removal(removal)
    if removal == "delete":
        return "delete"
    number = getattr(tokenizer, f"{removal}_token_id", None)
    if number is None:
        raise ValueError(f"removal is {removal!r}, but the tokenizer has no such token: pass 'delete'.")
    return int(number)
