"""Rank correlations against scipy's on the kept tokens of each row, and against loops over pairs."""

from itertools import combinations
from math import sqrt
from typing import Any

import pytest
import torch
from scipy import stats

from captum_vz.errors import ArgumentError
from captum_vz.metrics import kendall, spearman, top_k_overlap


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with many ties, of different lengths, none of them constant."""
    one, other = torch.randint(0, 6, (40, 10)).double(), torch.randint(-3, 3, (40, 10)).double()
    keep = torch.rand(40, 10) < 0.7
    keep[:, :3] = True
    one[:, :2], other[:, :2] = torch.tensor([9.0, 10.0]), torch.tensor([9.0, 10.0])
    return one, other, keep


def test_spearman_equals_scipy(rows: Any) -> None:
    found = spearman(*rows)
    for a, b, keep, rho in zip(*rows, found, strict=True):
        assert rho.item() == pytest.approx(stats.spearmanr(a[keep], b[keep]).statistic, abs=1e-12)


def test_kendall_counts_pairs(rows: Any) -> None:
    found = kendall(*rows)
    for a, b, keep, tau in zip(*rows, found, strict=True):
        same = opposite = only_a = only_b = 0
        for i, j in combinations(keep.nonzero()[:, 0].tolist(), 2):
            up, over = (a[i] - a[j]).sign().item(), (b[i] - b[j]).sign().item()
            same += up * over > 0
            opposite += up * over < 0
            only_a += up == 0 and over != 0
            only_b += over == 0 and up != 0
        total = same + opposite
        assert tau.item() == pytest.approx((same - opposite) / sqrt((total + only_a) * (total + only_b)), abs=1e-12)


@pytest.mark.parametrize("measure", [spearman, kendall])
def test_only_scores_without_order_nan(measure: Any) -> None:
    one = torch.tensor([[1.0, 2, 3], [1, 1, 1], [1, torch.nan, 3], [1, 2, 3], [1, 1, 3]])
    other = torch.tensor([[1.0, 3, 2], [1, 2, 3], [1, 2, 3], [2, 2, 2], [1, 2, 3]])
    assert measure(one, other).isnan().tolist() == [False, True, True, True, False]
    keep = torch.tensor([[1, 1, 0]])  # the kept scores of the last row are constant
    assert measure(one, other, keep).isnan().tolist() == [False, True, True, True, True]
    assert measure(one[:1], other[:1], torch.zeros(1, 3)).isnan().all()
    assert measure(one[:1], other[:1], torch.tensor([[0, 1, 0]])).isnan().all()


def test_overlap_without_ties_equals_sets() -> None:
    one, other = torch.rand(20, 7), torch.rand(20, 7)
    for k in range(1, 9):
        for a, b, share in zip(one, other, top_k_overlap(one, other, k), strict=True):
            first, second = (set(row.argsort(descending=True)[:k].tolist()) for row in (a, b))
            assert share.item() == pytest.approx(len(first & second) / min(k, 7))


def test_overlap_with_ties_is_expectation() -> None:
    one = torch.tensor([[3.0, 1, 1, 1, 0]])
    other = torch.tensor([[0.0, 2, 2, 3, 0]])

    def ways(row: list[float], k: int) -> list[set[int]]:
        """All sets of k tokens in which each token scores at least as high as any token outside."""
        sets = map(set, combinations(range(5), k))
        return [s for s in sets if min(row[i] for i in s) >= max(row[i] for i in range(5) if i not in s)]

    for k in (1, 2, 3, 4):
        shares = [len(a & b) / k for a in ways(one[0].tolist(), k) for b in ways(other[0].tolist(), k)]
        assert top_k_overlap(one, other, k).item() == pytest.approx(sum(shares) / len(shares))
    constant = torch.ones(1, 5)
    assert top_k_overlap(constant, other, 2).item() == pytest.approx(2 / 5)  # chance level


def test_overlap_ignores_dropped_tokens() -> None:
    one, other = torch.tensor([[9.0, 3, 2, 1]]), torch.tensor([[torch.nan, 1, 2, 3]])
    keep = torch.tensor([[0, 1, 1, 1]])
    assert top_k_overlap(one, other, 1, keep).item() == 0
    assert top_k_overlap(one, other, 2, keep).item() == pytest.approx(0.5)
    assert top_k_overlap(one, other, 2).isnan().all()
    assert top_k_overlap(one, other, 2, torch.zeros(1, 4)).isnan().all()


def test_bad_arguments_refused() -> None:
    with pytest.raises(ArgumentError, match=r"one is \(1, 3\) and other \(1, 4\): pass scores of the same tokens"):
        spearman(torch.rand(1, 3), torch.rand(1, 4))
    with pytest.raises(ArgumentError, match=r"other is \(3,\) of torch.float32"):
        kendall(torch.rand(1, 3), torch.rand(3))
    with pytest.raises(ArgumentError, match=r"k is 0: pass .* an integer of at least 1"):
        top_k_overlap(torch.rand(1, 3), torch.rand(1, 3), 0)
