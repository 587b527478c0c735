"""Means with intervals, paired comparisons and probes: known cases, scipy, and sums by hand."""

from collections.abc import Callable
from itertools import permutations
from math import isnan, log2, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from captum_vz.errors import ArgumentError
from captum_vz.metrics import (
    compare_pairs,
    description_length,
    linear_probe,
    probing,
    probing_correlation,
    summarize,
    summarize_many,
)
from captum_vz.metrics.intervals import _wilcoxon


def test_means_and_many_summaries() -> None:
    values = torch.tensor([1.0, torch.nan, 2.0, 6.0, torch.nan])
    summary = summarize(values)
    assert (summary.mean, summary.examples, summary.undefined) == (3.0, 3, 2)
    assert summary.std == pytest.approx(sqrt((4 + 1 + 9) / 2))
    assert 1 <= summary.low < 3 < summary.high <= 6
    assert str(summary) == f"3.000 [{summary.low:.3f}, {summary.high:.3f}] (3 examples, 2 more undefined)"
    for few, examples, undefined in (([], 0, 0), ([torch.nan], 0, 1), ([2.0], 1, 0)):
        summary = summarize(torch.tensor(few))
        assert (summary.examples, summary.undefined) == (examples, undefined)
        assert torch.tensor([summary.std, summary.low, summary.high]).isnan().all()
        assert summary.mean == 2.0 if examples else isnan(summary.mean)
    several = [torch.randn(count) for count in (1, 7, 30, 30, 7, 0)]
    several[3][:23] = torch.nan  # as many known values as others have
    for many, one in zip(summarize_many(several, resamples=99), several, strict=True):
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
def test_exact_p_equals_scipys(count: int, digits: int) -> None:
    gaps = np.random.default_rng(count).normal(0.3, 1, count).round(digits)
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
    with pytest.raises(ArgumentError, match=r"values is a \(2,\)"):
        compare_pairs({"a": torch.ones(2), "b": torch.ones(3)})


# Probes


LABELS = torch.arange(1000) % 2


@pytest.fixture
def noise() -> torch.Tensor:
    return torch.randn(1000, 6)


def test_only_readable_labels_are_compressed(noise: torch.Tensor) -> None:
    assert description_length(noise + 4 * LABELS[:, None], LABELS).compression > 2.5
    assert 0.9 < description_length(noise, LABELS).compression < 1.05
    state = torch.get_rng_state()
    noise, labels = noise[:300], LABELS[:300]
    first = description_length(noise, labels)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    with torch.no_grad():
        again = description_length(noise, labels)
    assert torch.equal(first.bits, again.bits)
    assert not torch.equal(first.bits, description_length(noise, labels, seed=1).bits)


def test_ignorant_probe_costs_uniform_code(noise: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    for classes in (2, 3, 5):
        flat = torch.nn.Linear(6, classes)
        torch.nn.init.zeros_(flat.weight)
        torch.nn.init.zeros_(flat.bias)
        monkeypatch.setattr(probing, "_train", lambda h, y, k, flat=flat: flat)
        length = description_length(noise, torch.arange(1000) % classes)
        torch.testing.assert_close(length.bits, torch.full((1000,), log2(classes), dtype=torch.float64))
        assert length.compression == pytest.approx(1)


def test_certain_probe_costs_first_block(noise: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code lengths have no lower bound: a softmax before the loss would keep compression below 3.14."""
    certain = torch.nn.Linear(6, 2)
    with torch.no_grad():
        certain.weight.zero_()
        certain.bias.zero_()
        certain.weight[1, 0], certain.bias[1] = 1000.0, -500.0
    seen: list[int] = []
    monkeypatch.setattr(probing, "_train", lambda h, y, k: seen.append(len(h)) or certain)
    states = noise.clone()
    states[:, 0] = LABELS
    states[7, 0] = 1 - LABELS[7].double()  # a label that the probe gets wrong by 500 nats
    length = description_length(states, LABELS)
    assert length.boundaries == (8, 16, 32, 62, 125, 250, 500, 1000)
    assert seen == list(length.boundaries[:-1])
    assert sorted(length.bits.tolist())[-9:-1] == [1.0] * 8
    assert length.bits.argmax() == 7
    assert length.bits[7].item() == pytest.approx(500 / torch.tensor(2.0).log().item(), rel=1e-6)
    assert length.total == pytest.approx(length.bits.sum().item())


def test_probe_never_sees_coded_block(noise: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other labels in the last block change only the cost of this block."""
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    labels = LABELS.clone()
    labels[order[500:]] = 1 - labels[order[500:]]
    one, other = description_length(noise, LABELS), description_length(noise, labels)
    torch.testing.assert_close(one.bits[order[:500]], other.bits[order[:500]], rtol=0, atol=0)
    assert not torch.equal(one.bits[order[500:]], other.bits[order[500:]])
    assert torch.allclose(2 ** -one.bits[order[500:]] + 2 ** -other.bits[order[500:]], torch.ones(500).double())


def test_training_stops_without_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0])
    heads: list[torch.Tensor] = []

    def loss(probe: torch.nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        heads.append(probe[-1].weight.detach().clone())
        return torch.tensor([next(losses)])

    monkeypatch.setattr(probing, "_nats", loss)
    probe = probing._train(torch.randn(40, 3), torch.arange(40) % 2, 2)
    assert len(heads) == 8
    assert torch.equal(probe[-1].weight, heads[2])


ZEROS = torch.zeros(1000, 2)
NOT_A_LIST: Any = [1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summarize(ZEROS), r"is \(1000, 2\) of"),
        (lambda: summarize(torch.tensor([torch.inf])), "holds infinities"),
        (lambda: summarize(NOT_A_LIST), "values is of type"),
        (lambda: summarize(ZEROS[0], confidence=95), "confidence is 95"),
        (lambda: summarize(ZEROS[0], resamples=0), "resamples is 0"),
        (lambda: description_length(ZEROS.long(), LABELS), r"states is \(1000, 2"),
        (lambda: description_length(ZEROS, LABELS[:5]), r"labels is \(5,\)"),
        (lambda: description_length(ZEROS / 0, LABELS), "not finite"),
        (lambda: description_length(ZEROS, LABELS, classes=1), "1, of 1 classes"),
        (lambda: description_length(ZEROS, LABELS - 1), "run from -1 to 0"),
        (lambda: description_length(ZEROS[:100], LABELS[:100]), "blocks that end at"),
        (lambda: probing_correlation(torch.rand(4, 3), [1.0, 2.0]), "alignment is"),
        (lambda: probing_correlation(torch.rand(4, 1), [1.0]), "two layers or more"),
        (lambda: probing_correlation(torch.rand(3), [1.0, 2.0, 3.0]), r"alignment is \(3,\)"),
        (lambda: probing_correlation(torch.rand(4, 2), [1.0, torch.inf]), "compression is"),
    ],
)
def test_bad_arguments_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_linear_probe_equals_folds_by_hand(noise: torch.Tensor) -> None:
    """Trained on four fifths by scikit-learn's parts, with states that are standardized by the training part only."""
    states = noise + 0.8 * LABELS[:, None]
    found = linear_probe(states, LABELS)
    expected = torch.zeros(1000, dtype=torch.float64)
    for train, test in StratifiedKFold(5, shuffle=True, random_state=0).split(noise, LABELS):
        h = states.double().numpy()
        mean, std = h[train].mean(0), h[train].std(0)
        fitted = LogisticRegression(max_iter=1000).fit((h[train] - mean) / std, LABELS[train].numpy())
        logits = ((h[test] - mean) / std) @ fitted.coef_[0] + fitted.intercept_[0]
        expected[test] = torch.from_numpy((logits > 0) == LABELS[test].numpy()).double()
    assert torch.equal(found, expected)
    assert 0.75 < found.mean() < 0.95
    with pytest.raises(ArgumentError, match="the rarest label"):
        linear_probe(states, LABELS, folds=600)


def test_correlation_equals_scipy() -> None:
    alignment, compression = torch.rand(30, 6) + torch.linspace(0, 0.5, 6), [1.0, 1.2, 1.2, 3.0, 2.0, 5.0]
    found = probing_correlation(alignment, compression)
    assert found.statistic == pytest.approx(stats.spearmanr(alignment.mean(0), compression).statistic)
    assert -1 <= found.low <= found.statistic <= found.high <= 1
    assert found == probing_correlation(alignment, compression)
    holed = torch.cat([alignment, torch.full((2, 6), torch.nan)])
    assert probing_correlation(holed, compression) == found._replace(undefined=2)


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


def test_p_of_perfect_order_and_correlation_without_spread() -> None:
    assert probing_correlation(torch.arange(4.0)[None], [1.0, 2.0, 3.0, 4.0]).p == pytest.approx(1 / 24)
    many = probing_correlation(torch.arange(12.0).repeat(3, 1), list(range(12)), resamples=9)
    assert many.p == pytest.approx(1e-5)  # of 99,999 random orders, none, and the order itself
    single = probing_correlation(torch.tensor([[0.1, 0.2, 0.3]]), [1.0, 2.0, 3.0])
    assert (single.statistic, single.examples) == (pytest.approx(1), 1)
    assert isnan(single.low)
    none = probing_correlation(torch.full((2, 3), torch.nan), [1.0, 2.0, 3.0])
    assert isnan(none.statistic)
    assert (none.examples, none.undefined) == (0, 2)
    flat = probing_correlation(torch.rand(4, 3), [2.0, 2.0, 2.0])
    assert isnan(flat.statistic) and isnan(flat.p)
