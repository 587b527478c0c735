"""The mean over examples with a confidence interval, and the number of examples without a value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics._rows import describe
from captum_vz.metrics.extra import study_extra

with study_extra("captum_vz.metrics"):
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
    <https://doi.org/10.1214/aos/1176344552>`_, by scipy. To compare two methods on the same examples, use the interval
    of their difference, `summarize(one - other)`. It takes into account that both have the same examples.

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
    if not isinstance(values, Tensor) or values.ndim != 1:
        raise ArgumentError(f"values is {describe(values)}: pass a tensor (examples,), one value for each example.")
    if values.isinf().any():
        raise ArgumentError("values holds infinities, whose mean has no meaning: pass finite values or NaN.")
    check_confidence(confidence, resamples)
    known = values[~values.isnan()].detach().double().cpu().numpy()
    mean = float(known.mean()) if known.size else float("nan")
    std = low = high = float("nan")
    if known.size > 1:
        std = float(known.std(ddof=1))
        drawn = stats.bootstrap(
            (known,),
            np.mean,
            confidence_level=confidence,
            n_resamples=resamples,
            batch=max(1, 2**20 // known.size),  # a few megabytes at a time
            method="percentile",
            rng=np.random.default_rng(seed),
        )
        low, high = map(float, drawn.confidence_interval)
    return Summary(mean, std, low, high, known.size, len(values) - known.size)


def check_confidence(confidence: float, resamples: int) -> None:
    """Check the arguments of a bootstrap.

    Raises:
        ArgumentError: The confidence is not between 0 and 1, or there are no resamples.
    """
    if not 0 < confidence < 1:
        raise ArgumentError(f"confidence is {confidence!r}: pass a number between 0 and 1, such as 0.95.")
    if resamples < 1:
        raise ArgumentError(f"resamples is {resamples!r}: pass the number of resamples, such as 9999.")
