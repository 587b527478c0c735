"""Means and correlations over examples, with bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.metrics._rows import describe

with needs_extra("captum_vz.metrics", "study"):
    from scipy import stats


class Summary(NamedTuple):
    """The mean over examples and its interval.

    Attributes:
        mean: The mean of the examples whose value is not NaN; NaN if there are none.
        std: Their standard deviation.
        low: The lower end of the confidence interval of the mean; NaN for fewer than two examples.
        high: Its upper end.
        examples: The number of these examples.
        undefined: The number of examples whose value is NaN.
    """

    mean: float
    std: float
    low: float
    high: float
    examples: int
    undefined: int

    def __str__(self) -> str:
        """As a line of a report."""
        undefined = f", {self.undefined} more undefined" if self.undefined else ""
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.examples} examples{undefined})"


def summarize(values: Tensor, confidence: float = 0.95, resamples: int = 9999, seed: int = 0) -> Summary:
    r"""The mean of one value for each example, with a bootstrap confidence interval over examples.

    .. math:: \bar v = \tfrac1n \textstyle\sum_b v_b, \qquad
        \big[Q_{\alpha/2}(\bar v^*),\, Q_{1-\alpha/2}(\bar v^*)\big]

    where :math:`\bar v^*` is the mean of n examples drawn with replacement: the percentile interval of `Efron 1979
    <https://doi.org/10.1214/aos/1176344552>`_, the same as scipy's. To compare two methods on the same examples, use
    the interval of their difference, `summarize(one - other)`. It takes into account that both have the same examples.

    Args:
        values: `(examples,)`. NaN means that an example has no value, such as a rank correlation with a constant.
            These examples are counted, and are not part of the mean.
        confidence: The confidence level of the interval, between 0 and 1.
        resamples: The number of bootstrap resamples of the examples.
        seed: The same seed gives the same interval.

    Returns:
        Mean, standard deviation, interval and both counts.

    Raises:
        ArgumentError: `values` is not one-dimensional or holds infinities, or the confidence is not between 0 and 1.

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

    Raises:
        ArgumentError: See there.

    >>> import torch
    >>> one, other = summarize_many([torch.tensor([0.2, 0.4]), torch.tensor([0.5, 0.5])])
    >>> other.mean, other.low, other.high
    (0.5, 0.5, 0.5)
    """
    check_bootstrap(confidence, resamples)
    known = [_known(one) for one in values]
    counts = [len(one) for one in known]
    intervals = [(float("nan"), float("nan"))] * len(known)
    for count in {count for count in counts if count > 1}:
        alike = [place for place, its in enumerate(counts) if its == count]
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
    """The values that are not NaN."""
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


def macro_summary(groups: Sequence[Tensor], confidence: float = 0.95, resamples: int = 9999, seed: int = 0) -> Summary:
    r"""The mean of the means of groups, in which each group counts the same, whatever its size.

    .. math:: \tfrac1G \textstyle\sum_g \bar v_g

    with a percentile interval over examples that are drawn with replacement within each group.

    Args:
        groups: For each group its values `(examples,)`, as in :func:`summarize`.
        confidence: The confidence level of the interval.
        resamples: The number of bootstrap resamples.
        seed: The same seed gives the same interval.

    Returns:
        As :func:`summarize`; `std` is the standard deviation of the groups' means. All is NaN if a group has no value.

    Raises:
        ArgumentError: There is no group, or the confidence is not between 0 and 1.

    >>> import torch
    >>> macro_summary([torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0])]).mean
    0.5
    """
    if not groups:
        raise ArgumentError("groups is empty: pass the values of at least one group.")
    check_bootstrap(confidence, resamples)
    known = [values[~values.isnan()].detach().double().cpu().numpy() for values in groups]
    examples = sum(map(len, known))
    undefined, nan = sum(map(len, groups)) - examples, float("nan")
    if not all(map(len, known)):
        return Summary(nan, nan, nan, nan, examples, undefined)
    rng, total = np.random.default_rng(seed), np.zeros(resamples)
    for values in known:
        for start in range(0, resamples, step := max(1, 2**20 // len(values))):
            some = min(step, resamples - start)
            total[start : start + some] += values[rng.integers(0, len(values), (some, len(values)))].mean(-1)
    means = np.array([values.mean() for values in known])
    tail = (1 - confidence) / 2
    low, high = np.quantile(total / len(groups), [tail, 1 - tail]).tolist() if examples > 1 else (nan, nan)
    spread = float(means.std(ddof=1)) if len(means) > 1 else nan
    return Summary(float(means.mean()), spread, low, high, examples, undefined)


class Correlation(NamedTuple):
    """A rank correlation and its interval.

    Attributes:
        statistic: Spearman's correlation; NaN if one side is constant.
        low: The lower end of its bootstrap confidence interval over examples.
        high: The upper end.
        examples: The number of examples.
        undefined: The number of further examples, which have a NaN in some layer.
        p: The share of the orders of the layers whose correlation is at least as high; NaN like `statistic`.
    """

    statistic: float
    low: float
    high: float
    examples: int
    undefined: int
    p: float


def probing_correlation(
    alignment: Tensor,
    compression: Sequence[float] | Tensor,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> Correlation:
    r"""The rank correlation over layers of cue alignment with the compression of the labels.

    .. math:: \rho = \operatorname{Spearman}_l\big(\tfrac1n \textstyle\sum_b a_{bl},\; c_l\big)

    over layers l, with the bootstrap interval of `Efron 1979 <https://doi.org/10.1214/aos/1176344552>`_ over examples
    b, resampled in all layers together. The p-value is one-sided: all n! orders of the n layers are equally likely, and
    it is exact for up to 8 layers, and from 99,999 random orders beyond. With few layers the correlation takes few
    values: of 4 layers, p is never below 1/24, so that it cannot tell many methods apart. After `Mohebbi et al. 2023
    <https://aclanthology.org/2023.eacl-main.245>`_, section 6.

    Args:
        alignment: Cue alignment of each example in each layer, `(examples, layers)`, as :func:`cue_dot_product` returns
            it.
        compression: The compression given each layer's representations, `(layers,)`, see :func:`description_length`.
        confidence: The confidence level of the interval.
        resamples: The number of bootstrap resamples of the examples.
        seed: The same seed gives the same interval.

    Returns:
        The correlation, its interval (NaN for fewer than two examples, or a constant side) and both counts.

    Raises:
        ArgumentError: Shapes do not fit, there are fewer than two layers, or the confidence is not between 0 and 1.

    >>> import torch
    >>> alignment = torch.tensor([[0.1, 0.2, 0.5], [0.2, 0.3, 0.6]])
    >>> probing_correlation(alignment, [1.1, 1.9, 6.0]).statistic
    1.0
    """
    layers = torch.as_tensor(compression, dtype=torch.float64)
    fits = isinstance(alignment, Tensor) and alignment.ndim == 2 and layers.shape == alignment.shape[1:]
    if not fits or len(layers) < 2:
        raise ArgumentError(
            f"alignment is {describe(alignment)} and compression {tuple(layers.shape)}: pass (examples, layers) and "
            "(layers,), of two layers or more."
        )
    if not layers.isfinite().all():
        raise ArgumentError(f"compression is {layers.tolist()}: pass finite numbers.")
    check_bootstrap(confidence, resamples)
    known = ~alignment.isnan().any(-1)
    values = alignment[known].detach().double().cpu().numpy()
    right = stats.rankdata(layers.numpy())

    def statistic(rows: np.ndarray, axis: int = -1) -> np.ndarray:
        """Spearman of the means of these examples, `(..., examples)` to `(...)`; NaN where one side is constant."""
        left = stats.rankdata(values[rows].mean(axis - 1), axis=-1)
        left, fixed = left - left.mean(-1, keepdims=True), right - right.mean()
        spread = np.sqrt((left**2).sum(-1) * (fixed**2).sum())
        return np.divide((left * fixed).sum(-1), spread, out=np.full_like(spread, np.nan), where=spread > 0)

    def of_orders(ranks: np.ndarray, axis: int = -1) -> np.ndarray:
        """The covariance of rows of ranks with the compression, which orders them as the correlation does."""
        found: np.ndarray = (ranks * (right - right.mean())).sum(axis)
        return found

    count, undefined = len(values), len(alignment) - len(values)
    whole = float(statistic(np.arange(count))) if count else float("nan")
    if isnan(whole):
        return Correlation(whole, whole, whole, count, undefined, whole)
    orders = stats.permutation_test(
        (stats.rankdata(values.mean(0)),),
        of_orders,
        permutation_type="pairings",
        vectorized=True,
        n_resamples=99_999,
        alternative="greater",
        rng=np.random.default_rng(seed),
    )
    p = float(orders.pvalue)
    if count < 2:
        return Correlation(whole, float("nan"), float("nan"), count, undefined, p)
    drawn = stats.bootstrap(
        (np.arange(count),),
        statistic,
        vectorized=True,
        batch=max(1, 2**20 // values.size),
        confidence_level=confidence,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = map(float, drawn.confidence_interval)
    return Correlation(whole, low, high, count, undefined, p)


def check_bootstrap(confidence: float, resamples: int) -> None:
    """Check the arguments of a bootstrap.

    Raises:
        ArgumentError: The confidence is not between 0 and 1, or there are no resamples.
    """
    if not 0 < confidence < 1:
        raise ArgumentError(f"confidence is {confidence!r}: pass a number between 0 and 1, such as 0.95.")
    if resamples < 1:
        raise ArgumentError(f"resamples is {resamples!r}: pass the number of resamples, such as 9999.")
