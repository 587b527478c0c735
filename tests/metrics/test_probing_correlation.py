"""The correlation of cue alignment with probing, against scipy's on resampled examples."""

from __future__ import annotations

from itertools import permutations
from math import isnan
from typing import Any

import pytest
import torch
from scipy import stats

from captum_vz.errors import ArgumentError
from captum_vz.metrics import probing_correlation


def test_correlation_equals_scipy() -> None:
    alignment, compression = torch.rand(30, 6) + torch.linspace(0, 0.5, 6), [1.0, 1.2, 1.2, 3.0, 2.0, 5.0]
    found = probing_correlation(alignment, compression)
    assert found.statistic == pytest.approx(stats.spearmanr(alignment.mean(0), compression).statistic)
    assert -1 <= found.low <= found.statistic <= found.high <= 1
    assert found == probing_correlation(alignment, compression)
    holed = torch.cat([alignment, torch.full((2, 6), torch.nan)])
    assert probing_correlation(holed, compression) == found._replace(undefined=2)


def test_interval_equals_loop_of_resamples() -> None:
    alignment, compression = torch.rand(8, 5, dtype=torch.float64), torch.tensor([2.0, 1, 3, 5, 4])
    drawn = torch.randint(8, (4000, 8), generator=torch.Generator().manual_seed(0))
    naive = [stats.spearmanr(alignment[rows].mean(0), compression).statistic for rows in drawn[:2000]]
    found = probing_correlation(alignment, compression)
    low, high = torch.tensor(naive).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert found.low == pytest.approx(low, abs=0.11)  # the next value that five ranks can take
    assert found.high == pytest.approx(high, abs=0.11)


def test_correlation_without_spread_undefined() -> None:
    single = probing_correlation(torch.tensor([[0.1, 0.2, 0.3]]), [1.0, 2.0, 3.0])
    assert single.statistic == pytest.approx(1)
    assert single.low != single.low
    assert single.examples == 1
    none = probing_correlation(torch.full((2, 3), torch.nan), [1.0, 2.0, 3.0])
    assert none.statistic != none.statistic
    assert (none.examples, none.undefined) == (0, 2)
    flat = probing_correlation(torch.rand(4, 3), [2.0, 2.0, 2.0])
    assert flat.statistic != flat.statistic


@pytest.mark.parametrize(
    ("alignment", "compression", "message"),
    [
        (torch.rand(4, 3), [1.0, 2.0], r"alignment is \(4, 3\) of torch.float32 and compression \(2,\)"),
        (torch.rand(3), [1.0, 2.0, 3.0], r"alignment is \(3,\)"),
        (torch.rand(4, 1), [1.0], "of two layers or more"),
        (torch.rand(4, 2), [1.0, torch.inf], r"compression is \[1.0, inf\]"),
    ],
)
def test_bad_correlation_refused(alignment: Any, compression: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        probing_correlation(alignment, compression)


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 6])
def test_p_counts_all_orders(layers: int) -> None:
    """One-sided, over all orders of the layers, also with ties."""
    alignment = torch.randint(0, 3, (7, layers)).double() + torch.tensor([0.0, 3.0]).repeat(3)[:layers]
    compression = torch.tensor([1.0, 2.0, 2.0, 3.0, 1.5, 0.5])[:layers].tolist()
    means = alignment.mean(0).tolist()
    own = stats.spearmanr(means, compression).statistic
    orders = [stats.spearmanr(order, compression).statistic for order in permutations(means)]
    expected = sum(one >= own - 1e-9 for one in orders) / len(orders)
    assert probing_correlation(alignment, compression, resamples=9).p == pytest.approx(expected)


def test_p_of_perfect_order() -> None:
    assert probing_correlation(torch.arange(4.0)[None], [1.0, 2.0, 3.0, 4.0]).p == pytest.approx(1 / 24)
    many = probing_correlation(torch.arange(12.0).repeat(3, 1), list(range(12)), resamples=9)
    assert many.p == pytest.approx(1e-5)  # of 99,999 random orders, none, and the order itself
    assert isnan(probing_correlation(torch.rand(4, 3), [2.0, 2.0, 2.0]).p)
