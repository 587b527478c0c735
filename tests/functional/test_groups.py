"""Pooled groups equal loops over the tokens of each group."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from captum_vz import ValueZeroing
from captum_vz.errors import ArgumentError
from captum_vz.functional import normalize_rows, pool_groups
from tests.engine.compare import assert_same
from tests.reference import FAMILIES
from tests.reference.naive import naive_value_zeroing

GROUPS = torch.tensor([[3, 3, 0, 7, 7, 7], [0, 0, 0, 3, 7, 7]])


def naive_pool(scores: Tensor, groups: Tensor, reduce: str, shared: bool) -> Tensor:
    names = sorted(set(groups.flatten().tolist()))
    pooled = torch.zeros(len(scores), len(names), len(names), dtype=scores.dtype)
    for b, example in enumerate(scores.tolist()):
        members = [[i for i, name in enumerate(groups[b].tolist()) if name == wanted] for wanted in names]
        for g, h in ((g, h) for g in range(len(names)) for h in range(len(names)) if members[g] and members[h]):
            columns = members[h][:1] if shared else members[h]
            values = [sum(example[i][j] for j in columns) for i in members[g]]
            pooled[b, g, h] = max(values) if reduce == "max" else sum(values) / len(values)
    return pooled


def shared_scores(groups: Tensor = GROUPS) -> Tensor:
    """A map in which all tokens of a group carry one score. Rows sum to 1 over groups."""
    batch, tokens = groups.shape
    per_group = normalize_rows(torch.rand(batch, tokens, 3, dtype=torch.float64))
    member = groups.unique(return_inverse=True)[1]
    return per_group.gather(-1, member[:, None].expand(batch, tokens, tokens))


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("shared", [True, False])
def test_pool_equals_naive_twin(reduce: Literal["mean", "max"], shared: bool) -> None:
    scores = shared_scores() if shared else torch.rand(2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(pool_groups(scores, GROUPS, reduce, shared), naive_pool(scores, GROUPS, reduce, shared))


@pytest.mark.parametrize("shared", [True, False])
def test_pool_groups_of_one_token(shared: bool) -> None:
    """One grouping serves all examples."""
    scores = torch.rand(2, 5, 5)
    assert torch.equal(pool_groups(scores, torch.arange(5)[None], shared=shared), scores)


@pytest.mark.parametrize("shared", [True, False])
def test_pool_single_rows(shared: bool) -> None:
    scores = shared_scores() if shared else torch.rand(2, 6, 6, dtype=torch.float64)
    # Token 3 of the second example is a group of one, so its row needs no reduction.
    torch.testing.assert_close(
        pool_groups(scores[:, 3], GROUPS, shared=shared)[1], pool_groups(scores, GROUPS, shared=shared)[1, 1]
    )


def test_pool_group_missing_in_example() -> None:
    groups = torch.tensor([[0, 0, 1], [0, 2, 2]])
    pooled = pool_groups(torch.rand(2, 3, 3) + 1, groups, shared=False)
    assert (pooled[0] > 0).tolist() == [[True, True, False], [True, True, False], [False, False, False]]
    assert (pooled[1] > 0).tolist() == [[True, False, True], [False, False, False], [True, False, True]]


def test_pool_sorts_groups_by_number() -> None:
    pooled = pool_groups(torch.tensor([[0.1, 0.2, 0.7]]), torch.tensor([[9, -1, 4]]))
    torch.testing.assert_close(pooled, torch.tensor([[0.2, 0.7, 0.1]]))


def test_pool_half_precision() -> None:
    scores = torch.rand(1, 300, 300).bfloat16()
    one_group = torch.zeros(1, 300, dtype=torch.long)
    pooled = pool_groups(scores, one_group, shared=False)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, scores.double().sum(-1).mean().float().reshape(1, 1, 1))


def test_pool_scores_that_differ_within_group() -> None:
    with pytest.raises(ArgumentError, match="different scores"):
        pool_groups(torch.tensor([[0.1, 0.2, 0.7]]), torch.tensor([[0, 0, 1]]))


@pytest.mark.parametrize(
    ("scores", "groups", "message"),
    [
        (torch.rand(2, 3, 3), torch.zeros(2, 4, dtype=torch.long), r"groups is \(2, 4\)"),
        (torch.rand(2, 3, 3), torch.zeros(3, 3, dtype=torch.long), r"groups is \(3, 3\)"),
        (torch.rand(2, 3, 3), torch.zeros(3, dtype=torch.long), r"groups is \(3,\)"),
        (torch.rand(2, 3, 4), torch.zeros(2, 4, dtype=torch.long), r"got \(2, 3, 4\)"),
        (torch.rand(3), torch.zeros(1, 3, dtype=torch.long), r"got \(3,\)"),
        (torch.rand(2, 3, 3), torch.zeros(2, 3), "must be integers"),
    ],
)
def test_pool_wrong_arguments(scores: Tensor, groups: Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        pool_groups(scores, groups)
    with pytest.raises(ArgumentError, match="reduce is 'median'"):
        pool_groups(scores, groups, reduce="median")


def test_pool_group_with_padding() -> None:
    """Padding with the number of a word changes nothing, because its rows and columns are zero."""
    scores = torch.tensor([[[0.7, 0.3, 0.0], [0.4, 0.6, 0.0], [0.0, 0.0, 0.0]]])
    pooled = pool_groups(scores, torch.tensor([[0, 1, 1]]))
    torch.testing.assert_close(pooled, scores[:, :2, :2])


def test_word_map_that_is_pooled_first() -> None:
    """The recipe of the questions and answers: distances are pooled, and then divided by the sums of the rows."""
    case = FAMILIES["bert"].case
    words = torch.tensor([[0, 0, 1, 2, 2, 2, 3]])
    raw = ValueZeroing(case.model, case.layers[-1], normalize=False).attribute(case.inputs, feature_mask=words)
    distances = naive_value_zeroing(case, -1, groups=words, normalize=False)
    expected = naive_pool(distances, words.expand(len(raw), -1), "mean", shared=True)
    assert_same(normalize_rows(pool_groups(raw, words)), expected / expected.sum(-1, keepdim=True).clamp_min(1e-300))
