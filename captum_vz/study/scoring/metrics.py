"""The metrics of a study, by their names, and the copies of a model that some of them need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from captum_vz import find_layers
from captum_vz import metrics as measures
from captum_vz._names import meant
from captum_vz._private import input_embeddings
from captum_vz.errors import ArgumentError
from captum_vz.functional.scores import overlap
from captum_vz.methods import METHODS
from captum_vz.metrics import Bounds, Prediction, normalized, spearman
from captum_vz.study.examples.patching import Pair, Patching, largest_is_right
from captum_vz.study.scoring import BLANK, COLUMNS, EvaluationBatch, Metric, Over
from captum_vz.subjects.heads import encoder_of

#: What a word after a metric's name says, such as "mask" in `blank_out:mask`. Names have words in this order.
WORDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "content": {"content": True},
    "mask": {"removal": "mask"},
    "delete": {"removal": "delete"},
    "vocabulary": {"over": "vocabulary"},
    "size": {"by_size": True},
}


def _cues(title: str, measure: Callable[..., Tensor], **options: Any) -> Metric:
    def values(batch: EvaluationBatch, rows: Tensor, content: bool = False) -> Tensor:
        keep, each = batch.content if content else batch.attended, len(rows)
        found = measure(rows.flatten(0, 1), batch.cues.repeat(each, 1), keep=keep.repeat(each, 1), **options)
        return found.view(each, -1)

    return Metric(f"cue alignment, {title}", values, needs_cue=True, words=("content",))


def _removing(title: str, values: Callable[..., Any], *further: str) -> Metric:
    """A metric that removes tokens. Its name may say how."""
    return Metric(title, values, needs_forms=True, removal=BLANK, words=("mask", "delete", *further))


def _of_prediction(
    measure: Callable[[Prediction, Tensor], Tensor],
    batch: EvaluationBatch,
    rows: Tensor,
    removal: str = BLANK,
    bounds: Callable[[Prediction], Bounds] | None = None,
) -> Tensor:
    """A metric of a prediction and scores for each row; the mean, if it has several values for an example."""
    found = [measure(batch.prediction_of(removal), row) for row in rows]
    found = [one.mean(-1) if one.ndim > 1 else one for one in found]
    if bounds is not None:
        both = batch.once(("bounds", bounds, removal), partial(bounds, batch.prediction_of(removal)))
        found = [normalized(one, both) for one in found]
    return torch.stack(found)


def _faithful(title: str, measure: Callable[..., Tensor], **options: Any) -> Metric:
    return _removing(title, partial(_of_prediction, measure, **options))


def _soft(title: str, measure: Callable[[Prediction, Tensor], Tensor]) -> Metric:
    return Metric(title, partial(_of_prediction, measure, removal="delete"), needs_forms=True)


def _patching(title: str, patching: Patching, measure: Callable[[Tensor, Tensor], Tensor]) -> Metric:
    def values(batch: EvaluationBatch, rows: Tensor) -> Tensor:
        joins, layers, found = len(rows) == 1 or _joins(batch.method), find_layers(batch.model), []
        if len(rows) not in (1, len(layers)):
            told = f"the method has {len(rows)} rows, and the model {len(layers)} layers"
            raise ArgumentError(f"{told}: patching needs as many.")
        for place, example in enumerate(batch.examples):
            pair = batch.once(("pair", example.id), partial(Pair.of_example, batch.model, batch.tokenizer, example))
            patched = batch.once((patching.__name__, example.id, joins), partial(patching, pair, joins))
            truth = patched.shares[-len(rows) :]
            found.append(measure(truth, rows[:, place, : truth.shape[-1]]))
        return torch.stack(found, 1)

    return Metric(title, values, needs_cue=True, needs_forms=True, runs_model=True, two_truths=True)


def _joins(name: str) -> bool:
    """Whether the rows of a method join the layers up to their own, and so have the truth of all of these layers."""
    method = METHODS.get(name)
    if method is not None and not method.is_foreign:
        return method.joins
    raise ArgumentError(
        f"it is unknown whether the rows of {name} join the layers: register a rollout, or a class of maps."
    )


@torch.no_grad()
def random_copy(model: nn.Module, layers: Sequence[nn.Module], count: int | None = None, seed: int = 0) -> nn.Module:
    r"""A copy of a model with random layers.

    .. math:: W_{ij} \sim \mathcal N\big(\operatorname{mean}(W), \operatorname{std}(W)\big)

    for each parameter W of the random layers, for the sanity check of `Adebayo et al. 2018
    <https://arxiv.org/abs/1810.03292>`_. A method whose scores do not depend on these layers' weights gives the same
    scores for the copy. Embeddings and the head stay as they are.

    The last `count` of the layers, in the order in which they run, are random. None: all. The same seed gives the same
    copies. Layers that are random in two copies are the same in both.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> random = random_copy(model, list(model), 1)
    >>> [bool((one.weight == other.weight).all()) for one, other in zip(random, model)]
    [True, False]
    """
    places = {id(module): name for name, module in model.named_modules()}
    names = list(dict.fromkeys(places.get(id(layer), "") for layer in layers))
    count = len(names) if count is None else count
    if "" in names or not 0 < count <= len(names):
        raise ArgumentError(f"{count} of {len(layers)} layers: pass layers of the model, and a number of them.")
    changed = copy.deepcopy(model)
    for number, name in enumerate(names[: -count - 1 : -1], start=1):
        generator = torch.Generator().manual_seed(seed * len(names) + number)
        for values in changed.get_submodule(name).parameters():
            drawn: Any = torch.randn(values.shape, generator=generator, dtype=torch.float64)
            spread = values.double().std(correction=0)
            values.copy_((values.double().mean() + spread * drawn.to(values.device)).to(values.dtype))
    return changed


@torch.no_grad()
def _moved_copies(model: Any, radius: float, samples: int, seed: int) -> Iterator[nn.Module]:
    """The model with each of the noises on its word embeddings, one copy that is changed in place."""
    embedding = input_embeddings(model)
    if not isinstance(embedding, nn.Embedding):
        raise ArgumentError(
            f"{type(model).__name__} has word embeddings of {type(embedding).__name__}: expected an nn.Embedding."
        )
    changed, own = copy.deepcopy(model), copy.deepcopy(embedding)
    changed.set_input_embeddings(own)  # a matrix of its own, which no output layer shares
    clean = embedding.weight.double()
    for number in range(samples):
        generator = torch.Generator().manual_seed(seed * samples + number)
        noise: Any = 2 * torch.rand(clean.shape, generator=generator, dtype=torch.float64) - 1
        own.weight.copy_(clean + radius * clean.std(correction=0) * noise.to(clean.device))
        yield changed


def _spearman(one: Tensor, other: Tensor, keep: Tensor) -> Tensor:
    """Spearman's correlation of rows `(rows, batch, tokens)`, over the tokens `(batch, tokens)`: `(rows, batch)`."""
    return spearman(one.flatten(0, 1), other.flatten(0, 1), keep.repeat(len(one), 1)).view(one.shape[:2])


def random_layers(count: int | None = None) -> Metric:
    """The metric of a sanity check: Spearman's correlation with the rows of a copy of the model with random layers.

    A correlation near 0 passes: the scores depend on what the layers have learned. All tokens count. A baseline without
    a model has 1, and NaN says that a row is constant or missing.

    `count` says how many layers are random, the last ones, see :func:`~captum_vz.study.random_copy`. None: all.

    >>> from captum_vz.study import Example, Scorer
    >>> from captum_vz.testbed import agreement_sentences, load_model
    >>> examples = [Example.from_record(record) for record in agreement_sentences(2)]
    >>> checks = {"one random": random_layers(1), "two random": random_layers(2)}
    >>> [(row["one random"], row["two random"]) for row in Scorer(*load_model(), ["position"], checks).score(examples)]
    [(1.0, 1.0), (1.0, 1.0)]
    """

    def values(batch: EvaluationBatch, rows: Tensor) -> Tensor:
        copied = partial(random_copy, batch.model, find_layers(batch.model), count)
        other = batch.rows_of(batch.once(("random layers", count), copied))
        found = _spearman(rows, other.nan_to_num(), batch.attended)
        return found.masked_fill(other.isnan().any(-1), torch.nan)

    told = "random layers" if count is None else f"{count} random layer{'s' * (count > 1)}"
    return Metric(f"correlation with {told}", values, runs_model=True)


def sensitivity(radius: float = 0.1, samples: int = 10, seed: int = 0) -> Metric:
    r"""The metric of how far scores move at most if the word embeddings are moved by small random numbers.

    .. math:: \max_k \frac{\lVert s(E + \epsilon_k) - s(E) \rVert_2}{\lVert s(E) \rVert_2}, \qquad
        \epsilon_k \sim \mathcal U(-r\,\sigma_E, r\,\sigma_E)

    of `Yeh et al. 2019 <https://arxiv.org/abs/1901.09392>`_, as `captum.metrics.sensitivity_max` computes it, where s
    is a row of scores, E the matrix of word embeddings and :math:`\sigma_E` the standard deviation of its entries. A
    word has the same noise in all places. The output's matrix stays as it is, where it is tied to E.

    Lower is steadier, and says nothing about whether scores are right: a baseline without a model has 0. Flat rows are
    favoured, because a small change of weights moves them little.

    `radius` is r, in standard deviations of the embeddings' entries, and `samples` the number of noises. The same seed
    gives the same noises.
    """
    if not radius > 0 or samples < 1:
        raise ArgumentError(f"radius is {radius} and samples {samples}: pass numbers above 0.")

    def values(batch: EvaluationBatch, rows: Tensor) -> Tensor:
        copies = _moved_copies(batch.model, radius, samples, seed)
        steps = [(batch.rows_of(moved) - rows).norm(dim=-1) for moved in copies]
        sizes = rows.norm(dim=-1)
        return (torch.stack(steps).amax(0) / sizes).masked_fill(sizes == 0, torch.nan)  # NaN is the largest

    return Metric("largest step under small noise (Captum)", values, runs_model=True)


def _blank_out(
    batch: EvaluationBatch, rows: Tensor, removal: str = BLANK, over: Over = "forms", by_size: bool = False
) -> Tensor:
    """Spearman's correlation with the effects of blanking out, or with their sizes only."""
    effects = batch.effects_of(removal, over)
    return _spearman(rows, (effects.abs() if by_size else effects).expand_as(rows), batch.content)


#: All metrics by their names. To add a metric, add one row.
METRICS: Final[dict[str, Metric]] = {
    "cue_dot": _cues("dot product", measures.cue_dot_product),
    "cue_ap": _cues("average precision", measures.cue_average_precision),
    "cue_mrr": _cues("reciprocal rank", measures.cue_reciprocal_rank),
    "cue_p1": _cues("precision at 1", measures.cue_precision, k=1),
    "cue_p3": _cues("precision at 3", measures.cue_precision, k=3),
    "blank_out": _removing("Spearman with blank-out", _blank_out, "vocabulary", "size"),
    "comprehensiveness": _faithful("comprehensiveness (AOPC)", measures.comprehensiveness),
    "sufficiency": _faithful("sufficiency (AOPC)", measures.sufficiency),
    "comprehensiveness_normalized": _faithful(
        "comprehensiveness, 0: worst order, 1: best",
        measures.comprehensiveness,
        bounds=measures.comprehensiveness_bounds,
    ),
    "sufficiency_normalized": _faithful(
        "sufficiency, 0: worst order, 1: best", measures.sufficiency, bounds=measures.sufficiency_bounds
    ),
    "deletion_normalized": _faithful(
        "deletion area, 0: worst order, 1: best", measures.deletion_area, bounds=measures.deletion_bounds
    ),
    "monotonicity": _faithful("monotonicity (Arya)", measures.monotonicity),
    "soft_comprehensiveness": _soft("soft comprehensiveness", measures.soft_comprehensiveness),
    "soft_sufficiency": _soft("soft sufficiency", measures.soft_sufficiency),
    "infidelity": _faithful("infidelity (Captum)", measures.infidelity),
    "value_patching": _patching("overlap with value patching", Pair.values, overlap),
    "value_patching_top": _patching("largest of value patching found", Pair.values, largest_is_right),
    "activation_patching": _patching("overlap with activation patching", Pair.states, overlap),
    "activation_patching_top": _patching("largest of activation patching", Pair.states, largest_is_right),
    "sensitivity": sensitivity(),
    "sanity": random_layers(),
    "sanity_last": random_layers(1),
}

_TAKEN: Final = {*COLUMNS, "model", ""}  #: the names of other columns; the empty one stands for the scores
#: The metrics of `metrics=None`.
DEFAULT_METRICS: Final = ("cue_dot", "cue_ap", "blank_out")


def register_metric(
    name: str, metric: Metric | Callable[[EvaluationBatch, Tensor], Any], *, version: str | None = None
) -> Metric:
    """Adds a metric of your own to :data:`~captum_vz.study.METRICS`, by a name that studies and the command take.

    `metric` is a function of an :class:`~captum_vz.study.EvaluationBatch` and rows of scores `(rows, batch, tokens)`
    that returns `(rows, batch)`. Or it is a :class:`~captum_vz.study.Metric`, which also says what the function needs.

    Raises:
        ArgumentError: The name is taken by a metric of this package or by a column, or `metric` cannot be called.

    >>> from captum_vz.study import METRICS, register_metric
    >>> register_metric("largest", lambda batch, rows: rows.max(-1).values).title
    'largest'
    >>> del METRICS["largest"]
    """
    before = METRICS.get(name)
    if name in _TAKEN or (before is not None and not before.own):
        raise ArgumentError(f"name is {name!r}, which captum_vz uses: pass another name.")
    if not isinstance(metric, Metric) and not callable(metric):
        raise ArgumentError(f"metric is of type {type(metric).__name__}: pass a function of a batch and rows.")
    made = metric if isinstance(metric, Metric) else Metric(name, metric)
    METRICS[name] = replace(made, version=version or made.version, own=True)
    return METRICS[name]


def metric_named(name: str) -> Metric:
    """The metric of a name: a key of :data:`~captum_vz.study.METRICS`, and after it words that say how it measures.

    With `:content`, special tokens and the target do not count for a metric of cues, and rows are divided by the sum of
    the other scores. Metrics that remove tokens put an unknown token in their place or, where this ends documents, the
    mean word vector. `:mask` puts a mask there, `:delete` nothing. `blank_out` takes two further words. With
    `:vocabulary`, probabilities sum to 1 over the vocabulary, not over the two forms. With `:size`, only the sizes of
    the effects count.

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
        takes = ", ".join(f":{word}" for word in metric.words) or "no words"
        one = ", and not both :mask and :delete" if "mask" in metric.words else ""
        raise ArgumentError(f"metrics has {name!r}: {base} takes {takes}{one}.")
    named = replace(
        metric,
        title=f"{metric.title} ({', '.join(words)})",
        values=partial(metric.values, **dict(options)),
        removal=dict(options).get("removal", metric.removal),
        words=(),
    )
    return ":".join([base, *words]), named


def given_metrics(metrics: Any) -> dict[str, Metric]:
    """The metrics that a user passes, by their names: None, names, or a mapping from names to metrics or functions."""
    if not isinstance(metrics, Mapping):
        names = (metrics,) if isinstance(metrics, str) else metrics
        found = dict(map(_spelled, DEFAULT_METRICS if names is None else names))
    else:
        found = {}
        for name, one in metrics.items():
            if not isinstance(one, Metric) and not callable(one):
                raise ArgumentError(f"metric {name!r} is of type {type(one).__name__}: pass a Metric or a function.")
            if METRICS.get(name, one) is not one or name in _TAKEN:
                raise ArgumentError(f"metrics has {name!r}, which is the name of something else: pass another name.")
            found[name] = one if isinstance(one, Metric) else Metric(name, cast(Any, one), own=True)
    if not found:
        raise ArgumentError(f"metrics is empty: pass some of {', '.join(METRICS)}.")
    return found


def lacks(metric: Metric, model: Any, tokenizer: Any) -> str | None:
    """What a model or its tokenizer lacks for a metric, in words. None: they have all that the metric needs."""
    model = encoder_of(model)
    head = getattr(model, "get_output_embeddings", None)
    if metric.needs_forms and head is not None and head() is None:
        return f"{type(model).__name__} has no head that predicts words"
    if metric.removal == "mask" and tokenizer.mask_token_id is None:
        return "the tokenizer has no mask token, and a metric with :delete needs none"
    return None
