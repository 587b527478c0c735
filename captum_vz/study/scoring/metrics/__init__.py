"""The metrics of a study, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor

from captum_vz import find_layers
from captum_vz._names import chosen_names
from captum_vz.errors import ArgumentError
from captum_vz.methods import METHODS
from captum_vz.metrics import (
    Bounds,
    Prediction,
    comprehensiveness,
    comprehensiveness_bounds,
    cue_average_precision,
    cue_dot_product,
    cue_precision,
    cue_reciprocal_rank,
    deletion_area,
    deletion_bounds,
    infidelity,
    monotonicity,
    normalized,
    soft_comprehensiveness,
    soft_sufficiency,
    spearman,
    sufficiency,
    sufficiency_bounds,
)
from captum_vz.study.examples.patching import Pair, Patched, largest_is_right, overlap, truth_rows
from captum_vz.study.scoring.metrics.batch import (
    EvaluationBatch,
    Over,
    check_removal,
    moved_copies,
    randomized_copies,
    removal_of,
    stacked,
)
from captum_vz.study.scoring.rows import COLUMNS

__all__ = [
    "DEFAULT_METRICS",
    "METRICS",
    "VARIANTS",
    "EvaluationBatch",
    "Metric",
    "Variant",
    "check_metrics",
    "check_removal",
    "given_metrics",
    "moved_copies",
    "randomized_copies",
    "register_metric",
    "removal_of",
    "sensitivity_values",
    "stacked",
]


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
    """

    title: str
    values: Callable[[EvaluationBatch, Tensor], Any]
    needs_cue: bool = False
    needs_forms: bool = False
    runs_model: bool = False
    version: str | None = None
    own: bool = False
    two_truths: bool = False

    @property
    def needs_model(self) -> bool:
        """Whether the model is loaded to compute it."""
        return self.runs_model or self.needs_forms


def _alignment(measure: Callable[..., Tensor], batch: EvaluationBatch, rows: Tensor) -> Tensor:
    keep = batch.content if batch.content_only else batch.attended
    each = len(rows)
    values = measure(rows.flatten(0, 1), batch.cues.repeat(each, 1), keep=keep.repeat(each, 1))
    return values.view(each, -1)


def _of_prediction(measure: Callable[[Prediction, Tensor], Tensor], batch: EvaluationBatch, rows: Tensor) -> Tensor:
    """A metric of a prediction and scores for each row; the mean, if it has several values for an example."""
    found = [measure(batch.prediction, row) for row in rows]
    return torch.stack([one.mean(-1) if one.ndim > 1 else one for one in found])


def _normalized(
    measure: Callable[[Prediction, Tensor], Tensor],
    bounds: Callable[[Prediction], Bounds],
    batch: EvaluationBatch,
    rows: Tensor,
) -> Tensor:
    limits = batch.bounds(bounds)
    return torch.stack([normalized(values, limits) for values in _of_prediction(measure, batch, rows)])


def _cues(title: str, measure: Callable[..., Tensor], **options: Any) -> Metric:
    values = partial(measure, **options) if options else measure
    return Metric(f"cue alignment, {title}", partial(_alignment, values), needs_cue=True)


def _faithful(title: str, measure: Any, bounds: Any = None) -> Metric:
    values = partial(_of_prediction, measure) if bounds is None else partial(_normalized, measure, bounds)
    return Metric(title, values, needs_forms=True)


def _patched(
    patching: Callable[[Pair, bool], Patched],
    measure: Callable[[Tensor, Tensor], Tensor],
    batch: EvaluationBatch,
    rows: Tensor,
) -> Tensor:
    joins, found = len(rows) == 1 or _joins(batch.method), []
    for place, example in enumerate(batch.examples):
        truth = truth_rows(patching, batch.model, batch.tokenizer, example, len(rows), joins, batch.kept)
        found.append(measure(truth, rows[:, place, : truth.shape[-1]]))
    return torch.stack(found, 1)


def _joins(name: str) -> bool:
    """Whether the rows of a method join the layers up to their own.

    Raises:
        ArgumentError: It is unknown. The truth of each layer's own values would be compared with joined rows.
    """
    method = METHODS.get(name)
    if method is not None and not method.is_foreign:
        return method.joins
    raise ArgumentError(
        f"it is unknown whether the rows of {name} join the layers up to each: pass a method of captum_vz by its name, "
        "or register a class of rollouts or of maps by register_method."
    )


def _patching(
    title: str, patching: Callable[[Pair, bool], Patched], measure: Callable[[Tensor, Tensor], Tensor]
) -> Metric:
    values = partial(_patched, patching, measure)
    return Metric(title, values, needs_cue=True, needs_forms=True, runs_model=True, two_truths=True)


@dataclass(frozen=True)
class Variant:
    """One way to blank out tokens, and to read their effects.

    Attributes:
        removal: "unk", "mask" or "delete".
        over: What the probabilities sum to 1 over: the two "forms", or the "vocabulary".
        by_size: Whether only the size of an effect counts, and not whether the probability falls or rises.
    """

    removal: str
    over: Over = "forms"
    by_size: bool = False

    @property
    def name(self) -> str:
        """The name of its metric."""
        return f"blank_out_{self.removal}_{self.over}{'_size' if self.by_size else ''}"

    def __str__(self) -> str:
        """In words, such as "MASK, vocabulary, size"."""
        how = "deletion" if self.removal == "delete" else self.removal.upper()
        return f"{how}, {self.over}{', size' if self.by_size else ''}"

    def values(self, batch: EvaluationBatch, rows: Tensor) -> Tensor:
        """Spearman's correlation of rows with the effects."""
        return blank_out_values(batch, rows, batch.effects_of(self.removal, self.over), self.by_size)


OVERS: Final[tuple[Over, ...]] = ("forms", "vocabulary")

#: All ways to blank out tokens.
VARIANTS: Final = tuple(
    Variant(removal, over, by_size)
    for removal in ("unk", "mask", "delete")
    for over in OVERS
    for by_size in (False, True)
)


def blank_out_values(batch: EvaluationBatch, rows: Tensor, effects: Tensor, by_size: bool = False) -> Tensor:
    """Spearman's correlation of rows of scores with effects, over the content tokens, `(rows, batch)`."""
    each, effects = len(rows), effects.abs() if by_size else effects
    values = spearman(rows.flatten(0, 1), effects.repeat(each, 1), batch.content.repeat(each, 1))
    return values.view(each, -1)


def random_layers_values(batch: EvaluationBatch, rows: Tensor, count: int | None = None, seed: int = 0) -> Tensor:
    """Spearman's correlation of rows with the same rows of a copy whose layers are random, `(rows, batch)`.

    Args:
        batch: The batch.
        rows: Rows of scores `(rows, batch, tokens)`.
        count: How many layers are random, from the last. None: all.
        seed: The same seed gives the same random layers.
    """
    layers = find_layers(batch.model)
    copies = randomized_copies(batch.model, layers, cascading=count is not None, seed=seed)
    other = next(batch.rows_of(changed) for number, changed, _ in copies if number == count or count is None)
    keep = batch.attended.repeat(len(rows), 1)
    values = spearman(rows.flatten(0, 1), other.nan_to_num().flatten(0, 1), keep).view(rows.shape[:2])
    return values.masked_fill(other.isnan().any(-1), torch.nan)


def sensitivity_values(
    batch: EvaluationBatch, rows: Tensor, radius: float = 0.1, samples: int = 10, seed: int = 0
) -> Tensor:
    """How far rows move at most, see :func:`~captum_vz.study.sensitivity`, `(rows, batch)`."""
    largest = torch.zeros(rows.shape[:2], dtype=torch.float64)
    for moved in moved_copies(batch.model, radius, samples, seed):
        steps = (batch.rows_of(moved) - rows).norm(dim=-1)
        largest = torch.maximum(largest, steps)  # which remembers NaN
    sizes = rows.norm(dim=-1)
    return (largest / sizes).masked_fill(sizes == 0, torch.nan)


#: All metrics by their names. To add a metric, add one row.
METRICS: Final[dict[str, Metric]] = {
    "cue_dot": _cues("dot product", cue_dot_product),
    "cue_ap": _cues("average precision", cue_average_precision),
    "cue_mrr": _cues("reciprocal rank", cue_reciprocal_rank),
    "cue_p1": _cues("precision at 1", cue_precision, k=1),
    "cue_p3": _cues("precision at 3", cue_precision, k=3),
    "blank_out": Metric(
        "Spearman with blank-out", lambda batch, rows: blank_out_values(batch, rows, batch.effects), needs_forms=True
    ),
    **{one.name: Metric(f"Spearman with blank-out ({one})", one.values, needs_forms=True) for one in VARIANTS},
    "comprehensiveness": _faithful("comprehensiveness (AOPC)", comprehensiveness),
    "sufficiency": _faithful("sufficiency (AOPC)", sufficiency),
    "comprehensiveness_normalized": _faithful(
        "comprehensiveness, 0: worst order, 1: best", comprehensiveness, comprehensiveness_bounds
    ),
    "sufficiency_normalized": _faithful("sufficiency, 0: worst order, 1: best", sufficiency, sufficiency_bounds),
    "deletion_normalized": _faithful("deletion area, 0: worst order, 1: best", deletion_area, deletion_bounds),
    "monotonicity": _faithful("monotonicity (Arya)", monotonicity),
    "soft_comprehensiveness": _faithful("soft comprehensiveness", soft_comprehensiveness),
    "soft_sufficiency": _faithful("soft sufficiency", soft_sufficiency),
    "infidelity": _faithful("infidelity (Captum)", infidelity),
    "value_patching": _patching("overlap with value patching", Pair.values, overlap),
    "value_patching_top": _patching("largest of value patching found", Pair.values, largest_is_right),
    "activation_patching": _patching("overlap with activation patching", Pair.states, overlap),
    "activation_patching_top": _patching("largest of activation patching", Pair.states, largest_is_right),
    "sensitivity": Metric("largest step under small noise (Captum)", sensitivity_values, runs_model=True),
    "sanity": Metric("correlation with random layers", random_layers_values, runs_model=True),
    "sanity_last": Metric("correlation, last layer random", partial(random_layers_values, count=1), runs_model=True),
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


def check_metrics(metrics: Iterable[str] | None) -> tuple[str, ...]:
    """The names, in the order given; None: cue alignment and blank-out.

    Raises:
        ValueError: A name is not in :data:`METRICS`, or there is no name.
    """
    return chosen_names("metrics", metrics, METRICS, DEFAULT_METRICS)
