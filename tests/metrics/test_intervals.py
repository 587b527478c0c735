"""Means with intervals and paired comparisons: known cases, scipy on single pairs, and loops."""

from itertools import product
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from captum_vz.errors import ArgumentError
from captum_vz.metrics import compare_pairs, summarize, summarize_many
from captum_vz.metrics.intervals import _wilcoxon


def test_means_and_many_summaries() -> None:
    values = torch.tensor([1.0, torch.nan, 2.0, 6.0, torch.nan])
    summary = summarize(values)
    assert (summary.mean, summary.examples, summary.undefined) == (3.0, 3, 2)
    assert summary.std == pytest.approx(sqrt((4 + 1 + 9) / 2))
    assert 1 <= summary.low < 3 < summary.high <= 6
    assert str(summary) == f"3.000 [{summary.low:.3f}, {summary.high:.3f}] (3 examples, 2 more undefined)"
    values = [torch.randn(count) for count in (1, 7, 30, 30, 7, 0)]
    values[3][:23] = torch.nan  # as many known values as others have
    for many, one in zip(summarize_many(values, resamples=99), values, strict=True):
        assert many == pytest.approx(summarize(one, resamples=99), rel=1e-12, nan_ok=True)


def test_interval_equals_scipys_bootstrap() -> None:
    settings: list[dict[str, Any]] = [
        {"confidence": 0.95, "resamples": 500, "seed": 0},
        {"confidence": 0.6, "resamples": 77, "seed": 4},
    ]
    for count in (2, 3, 50, 1200):
        for options in settings:
            values = torch.randn(count, dtype=torch.float64)
            named = {"confidence_level": options["confidence"], "n_resamples": options["resamples"]}
            rng = np.random.default_rng(options["seed"])
            drawn = stats.bootstrap((values.numpy(),), np.mean, method="percentile", rng=rng, **named)
            low, high = drawn.confidence_interval
            found = summarize(values, **options)
            assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("values", "examples", "undefined"), [([], 0, 0), ([torch.nan], 0, 1), ([2.0], 1, 0)])
def test_too_few_examples_have_no_interval(values: list[float], examples: int, undefined: int) -> None:
    summary = summarize(torch.tensor(values))
    assert (summary.examples, summary.undefined) == (examples, undefined)
    assert torch.tensor([summary.std, summary.low, summary.high]).isnan().all()
    assert summary.mean == 2.0 if examples else summary.mean != summary.mean


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (torch.zeros(2, 2), {}, r"values is \(2, 2\) of torch.float32: pass a tensor \(examples,\)"),
        ([1.0], {}, "values is of type list"),
        (torch.tensor([torch.inf]), {}, "values holds infinities"),
        (torch.zeros(2), {"confidence": 95}, "confidence is 95: pass a number between 0 and 1"),
        (torch.zeros(2), {"resamples": 0}, "resamples is 0"),
    ],
)
def test_bad_arguments_refused(values: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        summarize(values, **options)


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


def test_equal_gaps_and_methods_are_tied() -> None:
    exact = np.array([1.0, 1.0, -1.0, 2.0, 3.0] * 3)
    noise = np.random.default_rng(0).normal(0, 1e-15, 15)
    assert _wilcoxon(exact / 10 + noise) == _wilcoxon(exact)
    one = torch.linspace(0, 1, 20, dtype=torch.float64)
    for gap in (0.0, 1e-15):
        (pair,) = compare_pairs({"a": one, "b": one + gap})
        assert (pair.p, pair.tied) == (1.0, True)
    (pair,) = compare_pairs({"a": torch.tensor([0.1]), "b": torch.tensor([0.9])})
    assert pair.tied
    (pair,) = compare_pairs({"a": torch.tensor([torch.nan]), "b": torch.tensor([0.9])})
    assert (pair.examples, pair.tied) == (0, True)
    with pytest.raises(ArgumentError, match=r"values is a \(2,\) .*, b \(3,\)"):
        compare_pairs({"a": torch.ones(2), "b": torch.ones(3)})
