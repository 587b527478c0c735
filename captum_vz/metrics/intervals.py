"""Means over examples with bootstrap confidence intervals, and paired comparisons: do two methods differ?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.metrics.agreement import describe

with needs_extra("captum_vz.metrics", "study"):
    from scipy import stats

_EXACT: Final = 50  #: up to how many examples Wilcoxon's test is exact


class Summary(NamedTuple):
    """The mean over examples and its interval."""

    mean: float  #: the mean of the examples whose value is not NaN; NaN if there are none
    std: float  #: their standard deviation
    low: float  #: the lower end of the confidence interval of the mean; NaN for fewer than two examples
    high: float  #: its upper end
    examples: int  #: the number of these examples
    undefined: int  #: the number of examples whose value is NaN

    def __str__(self) -> str:
        """As a line of a report."""
        undefined = f", {self.undefined} more undefined" if self.undefined else ""
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.examples} examples{undefined})"


def summarize(values: Tensor, confidence: float = 0.95, resamples: int = 9999, seed: int = 0) -> Summary:
    r"""The mean of one value for each example, with a bootstrap confidence interval over examples.

    .. math:: \bar v = \tfrac1n \textstyle\sum_b v_b, \qquad
        \big[Q_{\alpha/2}(\bar v^*),\, Q_{1-\alpha/2}(\bar v^*)\big]

    where :math:`\bar v^*` is the mean of n examples drawn with replacement: the percentile interval of `Efron 1979
    <https://doi.org/10.1214/aos/1176344552>`_, the same as scipy's. For two methods on the same examples, use the
    interval of their difference, `summarize(one - other)`.

    Args:
        values: `(examples,)`. NaN means that an example has no value, such as a rank correlation with a constant.
            These examples are counted, and are not part of the mean.
        confidence: The confidence level of the interval, between 0 and 1.
        resamples: The number of bootstrap resamples of the examples.
        seed: The same seed gives the same interval.

    >>> import torch
    >>> print(summarize(torch.tensor([0.2, 0.4, 0.6, torch.nan])))
    0.400 [0.200, 0.600] (3 examples, 1 more undefined)
    """
    return summarize_many([values], confidence, resamples, seed)[0]


def summarize_many(
    values: Sequence[Tensor], confidence: float = 0.95, resamples: int = 9999, seed: int = 0
) -> list[Summary]:
    """:func:`summarize` of each of many tensors, of one length or several.

    Resamples are drawn once for all tensors with the same number of known values, and their means are one matrix
    product. This is faster than a bootstrap for each of them, and gives the same intervals.

    Args:
        values: Tensors `(examples,)`.
        confidence: See :func:`summarize`, like the arguments after it.
        resamples: See there.
        seed: See there.
    """
    check_bootstrap(confidence, resamples)
    known = [_known(one) for one in values]
    intervals = [(float("nan"), float("nan"))] * len(known)
    for count in {len(one) for one in known} - {0, 1}:
        alike = [place for place, one in enumerate(known) if len(one) == count]
        found = _intervals(np.stack([known[place] for place in alike]), confidence, resamples, seed)
        for place, interval in zip(alike, found, strict=True):
            intervals[place] = interval
    return [
        Summary(
            float(some.mean()) if some.size else float("nan"),
            float(some.std(ddof=1)) if some.size > 1 else float("nan"),
            *interval,
            some.size,
            len(one) - some.size,
        )
        for one, some, interval in zip(values, known, intervals, strict=True)
    ]


def _known(values: Tensor) -> np.ndarray:
    if not isinstance(values, Tensor) or values.ndim != 1:
        raise ArgumentError(f"values is {describe(values)}: pass a tensor (examples,), one value for each example.")
    if values.isinf().any():
        raise ArgumentError("values holds infinities, whose mean has no meaning: pass finite values or NaN.")
    known: np.ndarray = values[~values.isnan()].detach().double().cpu().numpy()
    return known


def _intervals(rows: np.ndarray, confidence: float, resamples: int, seed: int) -> list[tuple[float, float]]:
    """The bootstrap interval of the mean of each row, `(rows, examples)`."""
    rng, count = np.random.default_rng(seed), rows.shape[1]
    # Without its first entry, a constant row is 0, and its interval has no rounding error.
    first = rows[:, :1]
    columns = (rows - first).T
    means = np.empty((resamples, len(rows)))
    step = max(1, 2**20 // count)  # a few megabytes at a time
    for start in range(0, resamples, step):
        some = min(step, resamples - start)
        drawn = rng.integers(0, count, (some, count)) + count * np.arange(some)[:, None]
        how_often = np.bincount(drawn.ravel(), minlength=some * count).reshape(some, count)
        means[start : start + some] = how_often.astype(float) @ columns / count
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(means, (tail, 100 - tail), axis=0) + first.T
    return list(zip(low.tolist(), high.tolist(), strict=True))


def check_bootstrap(confidence: float, resamples: int) -> None:
    """Refuse wrong arguments of a bootstrap."""
    if not 0 < confidence < 1:
        raise ArgumentError(f"confidence is {confidence!r}: pass a number between 0 and 1, such as 0.95.")
    if resamples < 1:
        raise ArgumentError(f"resamples is {resamples!r}: pass the number of resamples, such as 9999.")


class Difference(NamedTuple):
    """How two methods differ on the same examples."""

    one: str  #: the name of the first method
    other: str  #: the name of the second
    mean: float  #: the mean difference, first minus second, over examples where both have a value
    low: float  #: the lower end of its bootstrap interval; NaN for fewer than two examples
    high: float  #: the upper end
    p: float  #: the p-value of Wilcoxon's signed-rank test, corrected by Holm over all pairs; 1 if no example differs
    examples: int  #: the number of examples where both have a value
    tied: bool  #: whether the two do not differ: the interval holds 0, or p is above 1 minus the confidence


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
        resamples: See :func:`summarize`.
        seed: See there.

    >>> import torch
    >>> values = {"a": torch.linspace(0, 1, 30), "b": torch.linspace(0, 1, 30) - 0.2}
    >>> (found,) = compare_pairs(values)
    >>> round(found.mean, 3), found.tied, found.examples
    (0.2, False, 30)
    """
    if len({one.shape for one in values.values()}) > 1 or any(one.ndim != 1 for one in values.values()):
        shapes = ", ".join(f"{name} {describe(one)}" for name, one in values.items())
        raise ArgumentError(f"values is {shapes}: pass tensors (examples,) of the same examples.")
    pairs = list(combinations(values, 2))
    gaps = [(values[one].double() - values[other].double()).cpu() for one, other in pairs]
    ps = np.array([_wilcoxon(gap[~gap.isnan()].numpy()) for gap in gaps])
    order = ps.argsort(kind="stable")
    ps[order] = np.maximum.accumulate(np.minimum(1, (len(ps) - np.arange(len(ps))) * ps[order]))
    found = []
    summaries = summarize_many(gaps, confidence, resamples, seed)
    for (one, other), (mean, _, low, high, examples, _), p in zip(pairs, summaries, ps.tolist(), strict=True):
        differs = p <= 1 - confidence and (low > 0 or high < 0)
        found.append(Difference(one, other, mean, low, high, p, examples, not differs))
    return found


def _wilcoxon(gaps: np.ndarray) -> float:
    """The p-value of Wilcoxon's test; 1 without examples, or if no example differs."""
    gaps = gaps.round(12)  # differences by rounding only would get ranks, and would tell equal gaps apart
    if not gaps.any():
        return 1.0
    if len(gaps) > _EXACT:
        return float(stats.wilcoxon(gaps, zero_method="zsplit").pvalue)
    # Over all signs of the gaps that are not zero. With ties, scipy tries each sign, up to 13 gaps.
    ranks = np.rint(2 * stats.rankdata(np.abs(gaps))).astype(int)  # twice, because the ranks of ties may be halves
    chances = np.ones(1)  # of each sum of the positive ranks
    for rank in ranks[gaps != 0]:
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    positive = ranks[gaps > 0].sum()
    return min(1.0, 2 * float(min(chances[: positive + 1].sum(), chances[positive:].sum())))
