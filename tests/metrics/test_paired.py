"""Paired comparisons against scipy on single pairs, and against Holm's procedure written in a loop."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from captum_vz.errors import ArgumentError
from captum_vz.metrics import compare_pairs, summarize
from captum_vz.metrics.intervals import _wilcoxon


def drawn(count: int = 40) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(3)
    base = random.normal(size=count)
    values = {"a": base, "b": base + random.normal(0.4, 0.3, count), "c": base + random.normal(0, 0.3, count)}
    found = {name: torch.tensor(one) for name, one in values.items()}
    found["c"][5] = torch.nan
    return found


def naive_holm(ps: list[float]) -> list[float]:
    """Reject one after the other: the smallest level at which a hypothesis is rejected."""
    found = []
    for p in ps:
        smaller = [other for other in ps if other <= p]
        steps = [min(1, other * sum(another >= other for another in ps)) for other in smaller]
        found.append(max(steps))
    return found


def test_pairs_equal_scipy_in_a_loop() -> None:
    values = drawn()
    names = [("a", "b"), ("a", "c"), ("b", "c")]
    found = compare_pairs(values, resamples=200)
    assert [(one.one, one.other) for one in found] == names
    ps = []
    for (one, other), pair in zip(names, found, strict=True):
        gap = np.array(
            [x - y for x, y in zip(values[one].tolist(), values[other].tolist(), strict=True) if x == x and y == y]
        )
        assert pair.examples == len(gap)
        assert pair.mean == pytest.approx(gap.mean())
        whole = summarize(torch.tensor(gap), resamples=200)
        assert (pair.low, pair.high) == pytest.approx((whole.low, whole.high))
        ps.append(stats.wilcoxon(gap, zero_method="zsplit").pvalue)
    assert [pair.p for pair in found] == pytest.approx(naive_holm(ps))
    assert [pair.tied for pair in found] == [False, True, False]


@pytest.mark.parametrize("count", [1, 2, 5, 10])
@pytest.mark.parametrize("digits", [0, 1, 8])
def test_exact_p_counts_all_signs(count: int, digits: int) -> None:
    """With ties and zeros: each of the signs is equally likely."""
    gaps = np.random.default_rng(count).normal(0.3, 1, count).round(digits)
    ranks = stats.rankdata(np.abs(gaps))
    sums = [
        sum(rank for rank, gap, up in zip(ranks, gaps, signs, strict=True) if up and gap)
        for signs in product([True, False], repeat=count)
    ]
    own = ranks[gaps > 0].sum()
    expected = 2 * min(np.mean([one <= own for one in sums]), np.mean([one >= own for one in sums]))
    assert _wilcoxon(gaps) == pytest.approx(min(1.0, expected))
    assert _wilcoxon(gaps) == pytest.approx(stats.wilcoxon(gaps, zero_method="zsplit").pvalue if gaps.any() else 1)


def test_gaps_equal_but_for_rounding_are_ties() -> None:
    exact = np.array([1.0, 1.0, -1.0, 2.0, 3.0] * 3)
    noise = np.random.default_rng(0).normal(0, 1e-15, 15)
    assert _wilcoxon(exact / 10 + noise) == _wilcoxon(exact)


def test_equal_methods_are_tied() -> None:
    one = torch.linspace(0, 1, 20, dtype=torch.float64)
    for gap in (0.0, 1e-15):
        (pair,) = compare_pairs({"a": one, "b": one + gap})
        assert (pair.p, pair.tied) == (1.0, True)


def test_few_examples_are_tied() -> None:
    (pair,) = compare_pairs({"a": torch.tensor([0.1]), "b": torch.tensor([0.9])})
    assert pair.tied
    (pair,) = compare_pairs({"a": torch.tensor([torch.nan]), "b": torch.tensor([0.9])})
    assert (pair.examples, pair.tied) == (0, True)


def test_wrong_values_refused() -> None:
    with pytest.raises(ArgumentError, match=r"values is a \(2,\) .*, b \(3,\)"):
        compare_pairs({"a": torch.ones(2), "b": torch.ones(3)})
