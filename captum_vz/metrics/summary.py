"""One number for many examples, with a confidence interval, and a count of those that had none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from captum_vz.metrics._rows import describe
from captum_vz.metrics._study import stats


class Summary(NamedTuple):
    """The mean over examples and how sure it is.

    Attributes:
        mean: Over the examples whose value is a number; NaN if there is none.
        std: Their standard deviation.
        low: The lower end of the confidence interval of the mean; NaN if there are fewer than two.
        high: Its upper end.
        examples: How many examples the mean is over.
        undefined: How many more there were, whose value is NaN.
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
    r"""The mean of one value an example, with a bootstrap confidence interval over examples.

    .. math:: \bar v = \tfrac1n \textstyle\sum_b v_b, \qquad
        \big[Q_{\alpha/2}(\bar v^*),\, Q_{1-\alpha/2}(\bar v^*)\big]

    where :math:`\bar v^*` is the mean of n examples drawn again with replacement: the percentile interval of `Efron
    1979 <https://doi.org/10.1214/aos/1176344552>`_, by scipy. Two methods on the same examples are compared by the
    interval of their difference, `summarize(one - other)`, which is narrower than their own ones tell.

    Args:
        values: `(examples,)`. NaN says that an example has no value, as a rank correlation with a constant has none:
            it is left out of the mean and counted.
        confidence: The share of intervals that hold the truth, between 0 and 1.
        resamples: How often the examples are drawn again.
        seed: The same seed gives the same interval.

    Returns:
        Mean, standard deviation, interval and both counts.

    Raises:
        AssertionError: Not one value an example, an infinite one, or a confidence that is not between 0 and 1.

    >>> import torch
    >>> print(summarize(torch.tensor([0.2, 0.4, 0.6, torch.nan])))
    0.400 [0.200, 0.600] (3 examples, 1 more undefined)
    """
    assert isinstance(values, Tensor) and values.ndim == 1, (
        f"values is {describe(values)}: pass a tensor (examples,), one value an example."
    )
    assert not values.isinf().any(), "values holds infinities, whose mean says nothing: find out where they come from."
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
    """What both bootstraps of this package demand."""
    assert 0 < confidence < 1, f"confidence is {confidence!r}: pass a share between 0 and 1, such as 0.95."
    assert resamples >= 1, f"resamples is {resamples!r}: pass how often the examples are drawn again, such as 9999."
