"""Means with intervals: known cases, their width in theory, and the number of undefined values."""

from math import isnan, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from captum_vz.errors import ArgumentError
from captum_vz.metrics import macro_summary, summarize
from captum_vz.metrics.intervals import summarize_many


def test_mean_counts_undefined_values() -> None:
    values = torch.tensor([1.0, torch.nan, 2.0, 6.0, torch.nan])
    summary = summarize(values)
    assert (summary.mean, summary.examples, summary.undefined) == (3.0, 3, 2)
    assert summary.std == pytest.approx(sqrt((4 + 1 + 9) / 2))
    assert 1 <= summary.low < 3 < summary.high <= 6
    assert str(summary) == f"3.000 [{summary.low:.3f}, {summary.high:.3f}] (3 examples, 2 more undefined)"


def test_the_seed_decides() -> None:
    values = torch.randn(30)
    assert summarize(values, seed=1) == summarize(values, seed=1)
    assert summarize(values, seed=1) != summarize(values, seed=2)


def test_interval_equals_scipys_bootstrap() -> None:
    for count in (2, 3, 50, 1200):
        for options in (
            {"confidence": 0.95, "resamples": 500, "seed": 0},
            {"confidence": 0.6, "resamples": 77, "seed": 4},
        ):
            values = torch.randn(count, dtype=torch.float64)
            drawn = stats.bootstrap(
                (values.numpy(),),
                np.mean,
                confidence_level=options["confidence"],
                n_resamples=options["resamples"],
                method="percentile",
                rng=np.random.default_rng(int(options["seed"])),
            )
            low, high = drawn.confidence_interval
            found = summarize(values, float(options["confidence"]), int(options["resamples"]), int(options["seed"]))
            assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12, abs=1e-14)


def test_many_summaries_equal_single_ones() -> None:
    values = [torch.randn(count) for count in (1, 7, 30, 30, 7, 0)]
    values[3][:23] = torch.nan  # as many known values as others have
    for many, one in zip(summarize_many(values, resamples=99), values, strict=True):
        assert many == pytest.approx(summarize(one, resamples=99), rel=1e-12, nan_ok=True)


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


def test_macro_mean_equals_loops() -> None:
    groups = [
        torch.rand(30, dtype=torch.float64),
        torch.rand(5, dtype=torch.float64) + 1,
        torch.tensor([0.5, torch.nan]),
    ]
    found = macro_summary(groups, resamples=2000)
    means = [group[~group.isnan()].mean().item() for group in groups]
    assert found.mean == pytest.approx(sum(means) / 3)
    assert (found.examples, found.undefined) == (36, 1)
    generator = torch.Generator().manual_seed(7)
    drawn = []
    for _ in range(2000):
        known = [group[~group.isnan()] for group in groups]
        drawn.append(sum(one[torch.randint(len(one), (len(one),), generator=generator)].mean() for one in known) / 3)
    low, high = torch.stack(drawn).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert found.low == pytest.approx(low, abs=0.01)
    assert found.high == pytest.approx(high, abs=0.01)
    assert isnan(macro_summary([groups[0], torch.tensor([torch.nan])]).mean)
    assert macro_summary([torch.tensor([torch.nan])]).examples == 0
    with pytest.raises(ArgumentError, match="groups is empty"):
        macro_summary([])
