"""Paired comparisons: do two methods differ on the same examples?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.metrics._rows import describe
from captum_vz.metrics.intervals import summarize_many

with needs_extra("captum_vz.metrics", "study"):
    from scipy import stats

#: Up to how many examples Wilcoxon's test is exact.
_EXACT: Final = 50


class Difference(NamedTuple):
    """How two methods differ on the same examples.

    Attributes:
        one: The name of the first method.
        other: The name of the second.
        mean: The mean difference, first minus second, over examples where both have a value.
        low: The lower end of its bootstrap interval; NaN for fewer than two examples.
        high: The upper end.
        p: The p-value of Wilcoxon's signed-rank test, corrected by Holm over all pairs; 1 if no example differs.
        examples: The number of examples where both have a value.
        tied: Whether the two do not differ: the interval holds 0, or p is above 1 minus the confidence.
    """

    one: str
    other: str
    mean: float
    low: float
    high: float
    p: float
    examples: int
    tied: bool


def compare_pairs(
    values: Mapping[str, Tensor], confidence: float = 0.95, resamples: int = 9999, seed: int = 0
) -> list[Difference]:
    r"""Compares each pair of methods, example by example.

    .. math:: \bar d = \tfrac1n \textstyle\sum_b (a_b - c_b), \qquad
        p^{\text{Holm}}_{(i)} = \max_{j \le i} \min\big(1, (m - j + 1)\, p_{(j)}\big)

    with the bootstrap interval of :func:`summarize`, Wilcoxon's signed-rank test (`Wilcoxon 1945
    <https://doi.org/10.2307/3001968>`_; zeros are split between both signs, and ties share their mean rank; exact for
    up to 50 examples, and by scipy's normal approximation for more) and Holm's correction for the m pairs (`Holm 1979
    <https://www.jstor.org/stable/4615733>`_). The test looks at ranks and the interval at the mean, so both must
    exclude a tie.

    Args:
        values: For each method one value for each example, `(examples,)`. NaN: the example has none.
        confidence: The confidence level of the intervals and the tests.
        resamples: The number of bootstrap resamples.
        seed: The same seed gives the same intervals.

    Raises:
        ArgumentError: Shapes do not fit, or `summarize` refuses the values.

    >>> import torch
    >>> values = {"a": torch.linspace(0, 1, 30), "b": torch.linspace(0, 1, 30) - 0.2}
    >>> (found,) = compare_pairs(values)
    >>> round(found.mean, 3), found.tied, found.examples
    (0.2, False, 30)
    """
    lengths = {len(one) for one in values.values() if isinstance(one, Tensor) and one.ndim == 1}
    if len(lengths) > 1 or not all(isinstance(one, Tensor) and one.ndim == 1 for one in values.values()):
        shapes = ", ".join(f"{name} {describe(one)}" for name, one in values.items())
        raise ArgumentError(f"values is {shapes}: pass tensors (examples,) of the same examples.")
    pairs = list(combinations(values, 2))
    gaps = [(values[one].double() - values[other].double()).cpu() for one, other in pairs]
    tests = holm([_wilcoxon(gap[~gap.isnan()].numpy()) for gap in gaps])
    found = []
    summaries = summarize_many(gaps, confidence, resamples, seed)
    for (one, other), (mean, _, low, high, examples, _), p in zip(pairs, summaries, tests, strict=True):
        differs = p <= 1 - confidence and (low > 0 or high < 0)
        found.append(Difference(one, other, mean, low, high, p, examples, not differs))
    return found


def holm(ps: Sequence[float]) -> list[float]:
    """P-values corrected for their number by Holm's step-down procedure.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(ps)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = highest
    return corrected


def _wilcoxon(gaps: np.ndarray) -> float:
    """The p-value of Wilcoxon's test; 1 without examples, or if no example differs."""
    # Differences by rounding only would get ranks, and would tell equal gaps apart.
    rounded = gaps.round(12)
    if not rounded.any():
        return 1.0
    return _exact(rounded) if len(gaps) <= _EXACT else float(stats.wilcoxon(rounded, zero_method="zsplit").pvalue)


def _exact(gaps: np.ndarray) -> float:
    """The p-value over all signs of the gaps that are not zero. With ties, scipy tries each sign, up to 13 gaps."""
    ranks = np.rint(2 * stats.rankdata(np.abs(gaps))).astype(int)  # twice, because the ranks of ties may be halves
    chances = np.ones(1)  # of each sum of the positive ranks
    for rank in ranks[gaps != 0]:
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    positive = ranks[gaps > 0].sum()
    return min(1.0, 2 * float(min(chances[: positive + 1].sum(), chances[positive:].sum())))
