"""The correlation of cue alignment with probing over layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics._rows import describe
from captum_vz.metrics.extra import study_extra
from captum_vz.metrics.summary import check_confidence

with study_extra("captum_vz.metrics"):
    from scipy import stats


class Correlation(NamedTuple):
    """A rank correlation and its interval.

    Attributes:
        statistic: Spearman's correlation; NaN if one side is constant.
        low: The lower end of its bootstrap confidence interval over examples.
        high: The upper end.
        examples: The number of examples.
        undefined: The number of further examples, which have a NaN in some layer.
    """

    statistic: float
    low: float
    high: float
    examples: int
    undefined: int


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
    b, resampled in all layers together. With few layers the correlation takes few values. After `Mohebbi et al. 2023
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
    check_confidence(confidence, resamples)
    known = ~alignment.isnan().any(-1)
    values = alignment[known].detach().double().cpu().numpy()
    right = stats.rankdata(layers.numpy())

    def statistic(rows: np.ndarray, axis: int = -1) -> np.ndarray:
        """Spearman of the means of these examples, `(..., examples)` to `(...)`; NaN where one side is constant."""
        left = stats.rankdata(values[rows].mean(axis - 1), axis=-1)
        left, fixed = left - left.mean(-1, keepdims=True), right - right.mean()
        spread = np.sqrt((left**2).sum(-1) * (fixed**2).sum())
        return np.divide((left * fixed).sum(-1), spread, out=np.full_like(spread, np.nan), where=spread > 0)

    count, undefined = len(values), len(alignment) - len(values)
    whole = float(statistic(np.arange(count))) if count else float("nan")
    if count < 2 or isnan(whole):
        return Correlation(whole, float("nan"), float("nan"), count, undefined)
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
    return Correlation(whole, low, high, count, undefined)
