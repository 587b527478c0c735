"""The metrics of a study, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor

from captum_vz import find_layers
from captum_vz._measures import overlap
from captum_vz._names import meant
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
from captum_vz.study.examples.patching import Pair, Patched, largest_is_right, truth_rows
from captum_vz.study.scoring.copies import moved_copies, randomized_copies
from captum_vz.study.scoring.measuring import EvaluationBatch, Metric, Over
from captum_vz.study.scoring.rows import COLUMNS
from captum_vz.subjects.heads import encoder_of

#: What a word after a metric's name says, such as "mask" in `blank_out:mask`. Names have words in this order.
WORDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mask": {"removal": "mask"},
    "delete": {"removal": "delete"},
    "vocabulary": {"over": "vocabulary"},
    "size": {"by_size": True},
}


def _alignment(measure: Callable[..., Tensor], batch: EvaluationBatch, rows: Tensor, **options: Any) -> Tensor:
    keep = batch.content if batch.content_only else batch.attended
    each = len(rows)
    found = measure(rows.flatten(0, 1), batch.cues.repeat(each, 1), keep=keep.repeat(each, 1), **options)
    return found.view(each, -1)


def _cues(title: str, measure: Callable[..., Tensor], **options: Any) -> Metric:
    return Metric(f"cue alignment, {title}", partial(_alignment, measure, **options), needs_cue=True)


def _of_prediction(
    measure: Callable[[Prediction, Tensor], Tensor],
    batch: EvaluationBatch,
    rows: Tensor,
    removal: str = "unk",
    bounds: Callable[[Prediction], Bounds] | None = None,
) -> Tensor:
    """A metric of a prediction and scores for each row; the mean, if it has several values for an example."""
    found = [measure(batch.prediction_of(removal), row) for row in rows]
    found = [one.mean(-1) if one.ndim > 1 else one for one in found]
    return torch.stack(found if bounds is None else [normalized(one, batch.bounds(bounds, removal)) for one in found])


def _removing(title: str, values: Callable[..., Any], *further: str) -> Metric:
    """A metric that removes tokens. Its name may say how."""
    return Metric(title, values, needs_forms=True, removal="unk", words=("mask", "delete", *further))


def _faithful(title: str, measure: Callable[..., Tensor], **options: Any) -> Metric:
    return _removing(title, partial(_of_prediction, measure, **options))


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


def _soft(title: str, measure: Callable[[Prediction, Tensor], Tensor]) -> Metric:
    """A metric that removes entries of word vectors, and no tokens."""
    return Metric(title, partial(_of_prediction, measure, removal="delete"), needs_forms=True)


def _patching(
    title: str, patching: Callable[[Pair, bool], Patched], measure: Callable[[Tensor, Tensor], Tensor]
) -> Metric:
    values = partial(_patched, patching, measure)
    return Metric(title, values, needs_cue=True, needs_forms=True, runs_model=True, two_truths=True)


def _spearman(one: Tensor, other: Tensor, keep: Tensor) -> Tensor:
    """Spearman's correlation of rows `(rows, batch, tokens)`, over the tokens `(batch, tokens)`: `(rows, batch)`."""
    return spearman(one.flatten(0, 1), other.flatten(0, 1), keep.repeat(len(one), 1)).view(one.shape[:2])


def blank_out_values(
    batch: EvaluationBatch, rows: Tensor, removal: str = "unk", over: Over = "forms", by_size: bool = False
) -> Tensor:
    """Spearman's correlation of rows of scores with the effects of blanking out, over the content tokens.

    Args:
        batch: The batch.
        rows: Rows of scores `(rows, batch, tokens)`.
        removal: What stands in the place of a removed token: "unk" or "mask"; or "delete".
        over: What the probabilities sum to 1 over: the two "forms", or the "vocabulary".
        by_size: Whether only the size of an effect counts, and not whether the probability falls or rises.
    """
    effects = batch.effects_of(removal, over)
    return _spearman(rows, (effects.abs() if by_size else effects).expand_as(rows), batch.content)


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
    values = _spearman(rows, other.nan_to_num(), batch.attended)
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
    "blank_out": _removing("Spearman with blank-out", blank_out_values, "vocabulary", "size"),
    "comprehensiveness": _faithful("comprehensiveness (AOPC)", comprehensiveness),
    "sufficiency": _faithful("sufficiency (AOPC)", sufficiency),
    "comprehensiveness_normalized": _faithful(
        "comprehensiveness, 0: worst order, 1: best", comprehensiveness, bounds=comprehensiveness_bounds
    ),
    "sufficiency_normalized": _faithful("sufficiency, 0: worst order, 1: best", sufficiency, bounds=sufficiency_bounds),
    "deletion_normalized": _faithful("deletion area, 0: worst order, 1: best", deletion_area, bounds=deletion_bounds),
    "monotonicity": _faithful("monotonicity (Arya)", monotonicity),
    "soft_comprehensiveness": _soft("soft comprehensiveness", soft_comprehensiveness),
    "soft_sufficiency": _soft("soft sufficiency", soft_sufficiency),
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


def metric_named(name: str) -> Metric:
    """The metric of a name: a key of :data:`~captum_vz.study.METRICS`, and after it words that say how it measures.

    Metrics that remove tokens put an unknown token in their place. `:mask` puts a mask there, `:delete` nothing.
    `blank_out` takes two further words. With `:vocabulary`, probabilities sum to 1 over the vocabulary, not over the
    two forms. With `:size`, only the sizes of the effects count.

    Raises:
        ArgumentError: There is no such metric, or it does not take these words.

    >>> metric_named("blank_out:mask:size").title
    'Spearman with blank-out (mask, size)'
    """
    return _spelled(name)[1]


def _spelled(name: str) -> tuple[str, Metric]:
    """The one spelling of a metric's name, and the metric."""
    if name in METRICS:
        return name, METRICS[name]
    base, *said = str(name).split(":")
    if base not in METRICS:
        raise ArgumentError(f"metrics has {name!r}{meant([base], METRICS)}: pass some of {', '.join(METRICS)}.")
    metric = METRICS[base]
    words = [word for word in metric.words if word in said]
    options = [option for word in words for option in WORDS[word].items()]
    if len(words) < len(said) or len(dict(options)) < len(options):
        takes = f"one of :mask and :delete{''.join(f', and :{word}' for word in metric.words[2:])}"
        raise ArgumentError(f"metrics has {name!r}: {base} takes {takes if metric.words else 'no words'}.")
    named = replace(
        metric,
        title=f"{metric.title} ({', '.join(words)})",
        values=partial(metric.values, **dict(options)),
        removal=dict(options).get("removal", metric.removal),
        words=(),
    )
    return ":".join([base, *words]), named


def given_metrics(metrics: Any) -> dict[str, Metric]:
    """The metrics that a user passes, by their names.

    Args:
        metrics: None for the default metrics, names as :func:`metric_named` takes them, or a mapping from names to
            metrics or functions.

    Raises:
        ArgumentError: A name is unknown, or something is no metric.
    """
    if not isinstance(metrics, Mapping):
        names = (metrics,) if isinstance(metrics, str) else metrics
        found = dict(map(_spelled, DEFAULT_METRICS if names is None else names))
    else:
        found = {}
        for name, one in metrics.items():
            if not isinstance(one, Metric) and not callable(one):
                raise ArgumentError(f"metric {name!r} is of type {type(one).__name__}: pass a Metric or a function.")
            if METRICS.get(name, one) is not one or name in {*COLUMNS, "model"}:
                raise ArgumentError(f"metrics has {name!r}, which is the name of something else: pass another name.")
            found[name] = one if isinstance(one, Metric) else Metric(name, cast(Any, one), own=True)
    if not found:
        raise ArgumentError(f"metrics is empty: pass some of {', '.join(METRICS)}.")
    return found


def lacks(metric: Metric, model: Any, tokenizer: Any) -> str | None:
    """What a model lacks for a metric, in words. None: it has all that the metric needs.

    Args:
        metric: The metric.
        model: The model, a study's or the encoder of it.
        tokenizer: Its tokenizer.
    """
    model = encoder_of(model)
    head = getattr(model, "get_output_embeddings", None)
    if metric.needs_forms and head is not None and head() is None:
        return f"{type(model).__name__} has no head that predicts words"
    if metric.removal in ("unk", "mask") and getattr(tokenizer, f"{metric.removal}_token_id", None) is None:
        return f"the tokenizer has no {metric.removal} token, and a metric with :delete needs none"
    return None
