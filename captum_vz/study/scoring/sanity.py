"""Checks of methods on copies of a model: with random layers, and with embeddings that are moved a little."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from captum_vz.errors import needs_extra
from captum_vz.metrics import spearman, summarize
from captum_vz.study.examples import Example
from captum_vz.study.scoring import Metric, Row
from captum_vz.study.scoring.metrics import moved_copies, randomized_copies, sensitivity_values
from captum_vz.study.scoring.scorer import Scorer
from captum_vz.subjects.heads import encoder_of

with needs_extra("captum_vz.study", "study"):
    import pandas as pd

if TYPE_CHECKING:
    from pandas import DataFrame


def sanity_checks(
    model: Any,
    tokenizer: Any,
    examples: Iterable[Example],
    methods: Any = None,
    *,
    seed: int = 0,
    batch_size: int = 32,
    confidence: float = 0.95,
    resamples: int = 1999,
) -> DataFrame:
    """Spearman's correlation of each method's scores with its scores for copies of the model with random layers.

    Layers become random from the last to the first (:func:`~captum_vz.study.randomized_copies`). In the last copy all
    layers are random. A correlation near 0 passes the check: the scores depend on what the layers have learned. The
    rows of the last layer are compared, over all tokens. A baseline without a model has 1.

    Args:
        model: The trained model in eval mode, which is not changed.
        tokenizer: Its tokenizer.
        examples: The examples.
        methods: See :func:`~captum_vz.study.run_study`.
        seed: The same seed gives the same random layers.
        batch_size: The number of sentences in a batch.
        confidence: The confidence level of the intervals over examples.
        resamples: The number of bootstrap resamples.

    Returns:
        For each ``method`` and number of ``random`` layers the ``mean``, its interval ``low`` and ``high``, and the
        numbers of ``examples`` and of ``undefined`` ones, whose scores are constant or missing in a copy.

    >>> from captum_vz.testbed import agreement_sentences, load_model
    >>> examples = [Example.from_record(record) for record in agreement_sentences(4)]
    >>> found = sanity_checks(*load_model(), examples, ["attention", "position"], resamples=99)
    >>> found[found["method"] == "position"]["mean"].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    model, examples = encoder_of(model), list(examples)
    scorer = Scorer(model, tokenizer, methods, "cue_dot", batch_size=batch_size)
    trained, found = _last_rows(scorer.scores(examples)), []
    for count, changed, _ in randomized_copies(model, scorer.layers, seed=seed):
        other = _last_rows(scorer.of_methods(scorer.methods, changed).scores(examples))
        values: dict[tuple[str, str], float] = {}
        for key, row in trained.items():
            pair = [torch.tensor([one["scores"]]) for one in (row, other.get(key)) if one is not None]
            values[key] = spearman(*pair).item() if len(pair) == 2 else float("nan")
        found += _summaries(values, confidence, resamples, random=count)
    return pd.DataFrame(found)


def _last_rows(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """The row of the last layer of each method for each example, by both names."""
    return {(row["method"], row["example"]): row for row in rows if row["skipped"] is None}


def _summaries(
    values: Mapping[tuple[str, str], float | None], confidence: float, resamples: int, **more: int
) -> list[dict[str, Any]]:
    """For each method the summary of the values of its examples. None is undefined."""
    found = []
    for method in dict.fromkeys(name for name, _ in values):
        some = [float("nan") if value is None else value for (name, _), value in values.items() if name == method]
        summary = summarize(torch.tensor(some, dtype=torch.float64), confidence, resamples)
        found.append({"method": method} | more | summary._asdict())
    return found


def sensitivity(
    model: Any,
    tokenizer: Any,
    examples: Iterable[Example],
    methods: Any = None,
    *,
    radius: float = 0.1,
    samples: int = 10,
    seed: int = 0,
    batch_size: int = 32,
    confidence: float = 0.95,
    resamples: int = 1999,
) -> DataFrame:
    r"""How far each method's scores move at most if the word embeddings are moved by small random numbers.

    .. math:: \max_k \frac{\lVert s(E + \epsilon_k) - s(E) \rVert_2}{\lVert s(E) \rVert_2}, \qquad
        \epsilon_k \sim \mathcal U(-r\,\sigma_E, r\,\sigma_E)

    of `Yeh et al. 2019 <https://arxiv.org/abs/1901.09392>`_, as `captum.metrics.sensitivity_max` computes it, where s
    is the row of the last layer, E the matrix of word embeddings and :math:`\sigma_E` the standard deviation of its
    entries. A word has the same noise in all places. The output's matrix stays as it is, where it is tied to E.

    Lower is steadier, and says nothing about whether scores are right: a baseline without a model has 0. Flat rows are
    favoured, because a small change of weights moves them little.

    `radius` is the largest noise r, in standard deviations of the embeddings' entries, and `samples` the number of
    noises k. The other arguments are those of :func:`sanity_checks`.

    Returns:
        For each ``method`` the ``mean``, its interval ``low`` and ``high``, and the numbers of ``examples`` and of
        ``undefined`` ones, whose scores are all 0, NaN or missing for a noise.

    Raises:
        ArgumentError: The model has no matrix of word embeddings, or `radius` or `samples` is not positive.
    """
    model = encoder_of(model)
    next(moved_copies(model, radius, samples, seed))  # an error here, not in the reasons of skipped rows
    measure = partial(sensitivity_values, radius=radius, samples=samples, seed=seed)
    scorer = Scorer(model, tokenizer, methods, {"step": Metric("", measure, runs_model=True)}, batch_size=batch_size)
    steps = {key: row["step"] for key, row in _last_rows(scorer.score(examples)).items()}
    return pd.DataFrame(_summaries(steps, confidence, resamples))
