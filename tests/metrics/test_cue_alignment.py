"""Rank correlations and cue alignment, against loops over plain numbers, scipy and known cases."""

from itertools import combinations, pairwise, permutations
from math import sqrt
from typing import Any

import pytest
import torch
from scipy import stats

from captum_vz import metrics
from captum_vz.errors import ArgumentError

CUES = torch.tensor([[False, True, False, True, False]])


def naive_average_precision(scores: list[float], cues: list[bool]) -> float:
    """Threshold by threshold: tokens that score at least as high are retrieved."""
    total, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        retrieved = [cue for score, cue in zip(scores, cues, strict=True) if score >= threshold]
        recall, precision = sum(retrieved) / sum(cues), sum(retrieved) / len(retrieved)
        total += (recall - recall_before) * precision
        recall_before = recall
    return total


@pytest.mark.parametrize("signed", [False, True])
def test_both_equal_their_naive_twins(signed: bool) -> None:
    scores = torch.randint(-4 if signed else 0, 5, (50, 9)).double()  # many ties
    cues = torch.rand(50, 9) < 0.3
    cues[:, 0] = True
    dots, precisions = metrics.cue_dot_product(scores, cues), metrics.cue_average_precision(scores, cues)
    for row, cue, dot, precision in zip(
        scores.tolist(), cues.tolist(), dots.tolist(), precisions.tolist(), strict=True
    ):
        assert dot == pytest.approx(sum(score for score, is_cue in zip(row, cue, strict=True) if is_cue))
        assert precision == pytest.approx(naive_average_precision(row, cue), abs=1e-12)


def test_dropped_tokens_do_not_count() -> None:
    scores = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1]])
    keep = torch.tensor([[0, 1, 1, 1, 1]])
    assert metrics.cue_dot_product(scores, CUES, keep).item() == pytest.approx(0.3 / 0.5)
    assert metrics.cue_average_precision(scores, CUES, keep).item() == pytest.approx(
        naive_average_precision([0.2, 0.1, 0.1, 0.1], [True, False, True, False])
    )
    # The values of dropped tokens do not matter, even NaN.
    scores[0, 0] = torch.nan
    assert metrics.cue_dot_product(scores, CUES, keep).item() == pytest.approx(0.3 / 0.5)
    assert not metrics.cue_average_precision(scores, CUES, keep).isnan()


def test_rows_without_an_answer() -> None:
    scores = torch.tensor([[0.5, 0.5], [torch.nan, 1.0], [0.5, 0.5], [0.0, 0.0]])
    cues = torch.tensor([[False, False], [True, False], [True, False], [True, False]])
    assert metrics.cue_dot_product(scores, cues).isnan().tolist() == [True, True, False, False]
    assert metrics.cue_average_precision(scores, cues).isnan().tolist() == [True, True, False, False]
    assert metrics.cue_dot_product(scores, cues, torch.ones(1, 2)).isnan().tolist() == [True, True, False, True]
    with pytest.raises(ArgumentError, match="negative values"):
        metrics.cue_dot_product(torch.tensor([[0.5, -0.5, 1, 0, 0]]), CUES, torch.ones(1, 5))
    scores, cues = torch.tensor([[0.2, torch.nan, 0.1]]), torch.tensor([[True, False, False]])
    assert metrics.cue_reciprocal_rank(scores, cues).isnan().all()
    assert metrics.cue_precision(scores, cues, 1).isnan().all()
    kept = torch.tensor([[True, False, True]])
    assert metrics.cue_reciprocal_rank(scores, cues, kept).tolist() == [1.0]
    assert metrics.cue_precision(scores, cues, 3, kept).tolist() == [0.5]  # two tokens are ranked
    scores = torch.tensor([[3.0, torch.inf, 2.0, -torch.inf, 1.0]])
    ranks, cues = torch.tensor([[4.0, 5.0, 3.0, 1.0, 2.0]]), torch.tensor([[True, False, False, True, False]])
    for keep in (None, torch.ones(1, 5), torch.tensor([[1, 1, 0, 1, 1]])):
        one, other = (metrics.cue_average_precision(each, cues, keep).item() for each in (scores, ranks))
        assert one == other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(5), CUES), r"scores is \(5,\)"),
        ((torch.zeros(1, 4), CUES), r"cues is \(1, 5\) of"),
        ((torch.zeros(1, 5), torch.tensor([[1, 3]])), r"cues is \(1, 2\)"),
        ((torch.zeros(1, 5), torch.full((1, 5), 2)), "torch.int64: pass"),
        ((torch.zeros(1, 5), CUES, ~CUES), "token that is a cue"),
        ((torch.zeros(1, 5), CUES, [1]), "keep is of type"),
    ],
)
@pytest.mark.parametrize("measure", [metrics.cue_dot_product, metrics.cue_average_precision])
def test_bad_arguments_refused(measure: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        measure(*arguments)


def test_ranks_of_cues_equal_all_orders_of_ties() -> None:
    """Expected over all orders of tokens with equal scores, in ten rows with many ties."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(0, 3, (10, 6), generator=generator).double()
    cues = torch.rand(10, 6, generator=generator) < 0.4
    keep = (torch.rand(10, 6, generator=generator) < 0.8) | cues
    ranks, precisions = metrics.cue_reciprocal_rank(scores, cues, keep), metrics.cue_precision(scores, cues, 2, keep)
    for b in range(10):
        tokens = [j for j in range(6) if keep[b, j]]
        orders = [
            order
            for order in permutations(tokens)
            if all(scores[b, one] >= scores[b, other] for one, other in pairwise(order))
        ]
        if not cues[b].any():
            assert ranks[b].isnan()
            assert precisions[b].isnan()
            continue
        firsts = [1 / (1 + min(place for place, j in enumerate(order) if cues[b, j])) for order in orders]
        tops = [sum(bool(cues[b, j]) for j in order[:2]) / min(2, len(tokens)) for order in orders]
        assert ranks[b].item() == pytest.approx(sum(firsts) / len(orders))
        assert precisions[b].item() == pytest.approx(sum(tops) / len(orders))


# Agreement of two rows


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with many ties, of different lengths, none of them constant."""
    one, other = torch.randint(0, 6, (40, 10)).double(), torch.randint(-3, 3, (40, 10)).double()
    keep = torch.rand(40, 10) < 0.7
    keep[:, :3] = True
    one[:, :2], other[:, :2] = torch.tensor([9.0, 10.0]), torch.tensor([9.0, 10.0])
    return one, other, keep


def test_spearman_equals_scipy(rows: Any) -> None:
    found = metrics.spearman(*rows)
    for a, b, keep, rho in zip(*rows, found, strict=True):
        assert rho.item() == pytest.approx(stats.spearmanr(a[keep], b[keep]).statistic, abs=1e-12)


def test_kendall_counts_pairs(rows: Any) -> None:
    found = metrics.kendall(*rows)
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


@pytest.mark.parametrize("measure", [metrics.spearman, metrics.kendall])
def test_only_scores_without_order_nan(measure: Any) -> None:
    one = torch.tensor([[1.0, 2, 3], [1, 1, 1], [1, torch.nan, 3], [1, 2, 3], [1, 1, 3]])
    other = torch.tensor([[1.0, 3, 2], [1, 2, 3], [1, 2, 3], [2, 2, 2], [1, 2, 3]])
    assert measure(one, other).isnan().tolist() == [False, True, True, True, False]
    keep = torch.tensor([[1, 1, 0]])  # the kept scores of the last row are constant
    assert measure(one, other, keep).isnan().tolist() == [False, True, True, True, True]
    assert measure(one[:1], other[:1], torch.zeros(1, 3)).isnan().all()
    assert measure(one[:1], other[:1], torch.tensor([[0, 1, 0]])).isnan().all()


def test_overlap() -> None:
    one, other = torch.rand(20, 7), torch.rand(20, 7)
    for k in range(1, 9):
        for a, b, share in zip(one, other, metrics.top_k_overlap(one, other, k), strict=True):
            first, second = (set(row.argsort(descending=True)[:k].tolist()) for row in (a, b))
            assert share.item() == pytest.approx(len(first & second) / min(k, 7))
    one, other = torch.tensor([[9.0, 3, 2, 1]]), torch.tensor([[torch.nan, 1, 2, 3]])
    keep = torch.tensor([[0, 1, 1, 1]])
    assert metrics.top_k_overlap(one, other, 1, keep).item() == 0
    assert metrics.top_k_overlap(one, other, 2, keep).item() == pytest.approx(0.5)
    assert metrics.top_k_overlap(one, other, 2).isnan().all()
    assert metrics.top_k_overlap(one, other, 2, torch.zeros(1, 4)).isnan().all()


def test_overlap_with_ties_is_expectation() -> None:
    one = torch.tensor([[3.0, 1, 1, 1, 0]])
    other = torch.tensor([[0.0, 2, 2, 3, 0]])

    def ways(row: list[float], k: int) -> list[set[int]]:
        """All sets of k tokens in which each token scores at least as high as any token outside."""
        sets = map(set, combinations(range(5), k))
        return [s for s in sets if min(row[i] for i in s) >= max(row[i] for i in range(5) if i not in s)]

    for k in (1, 2, 3, 4):
        shares = [len(a & b) / k for a in ways(one[0].tolist(), k) for b in ways(other[0].tolist(), k)]
        assert metrics.top_k_overlap(one, other, k).item() == pytest.approx(sum(shares) / len(shares))
    constant = torch.ones(1, 5)
    assert metrics.top_k_overlap(constant, other, 2).item() == pytest.approx(2 / 5)  # chance level


def test_bad_rows_refused() -> None:
    with pytest.raises(ArgumentError, match="of the same tokens"):
        metrics.spearman(torch.rand(1, 3), torch.rand(1, 4))
    with pytest.raises(ArgumentError, match=r"other is \(3,\)"):
        metrics.kendall(torch.rand(1, 3), torch.rand(3))
    with pytest.raises(ArgumentError, match="k is 0"):
        metrics.top_k_overlap(torch.rand(1, 3), torch.rand(1, 3), 0)
