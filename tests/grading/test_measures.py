"""The grader of rollouts, measures, functions and models: right answers are accepted, usual mistakes named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz.errors import ArgumentError
from captum_vz.metrics import cue_average_precision
from captum_vz.metrics import kendall as package_kendall
from captum_vz_lessons import check
from tests.grading import assert_named


def test_rollout_and_its_mistakes() -> None:
    maps = list(torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1).double())
    one, two, three = (each[0] for each in maps)
    right = three @ two @ one
    assert check.rollout(right, maps)
    assert check.rollout(right[2], maps, token=2)
    wrong = {
        "wrong order": one @ two @ three,
        "swapped": right.mT,
        "one by one": one * two * three,
        "mean": (one + two + three) / 3,
        "last layer alone": three,
        "last layer is missing": two @ one,
        "first layer is missing": three @ two,
        "swapped in each map": three.mT @ two.mT @ one.mT,
    }
    assert_named(lambda answer: check.rollout(answer, maps), wrong)
    eye = torch.eye(5).double()
    halves = [(each[0] + eye) / 2 for each in maps]
    with_residual = halves[2] @ halves[1] @ halves[0]
    assert check.rollout(with_residual, maps, residual=0.5)
    assert "residual connection is forgotten" in (check.rollout(right, maps, residual=0.5).mistake or "")
    assert "does not ask for" in (check.rollout(with_residual, maps).mistake or "")
    assert "halved" in (check.rollout(right / 8, maps, residual=0.5).mistake or "")
    assert "to each map" in (check.rollout((right + eye) / 2, maps, residual=0.5).mistake or "")
    with pytest.raises(ArgumentError, match="one example"):
        check.rollout(right, [torch.rand(2, 5, 5)])


def test_generation_slice_and_its_mistakes() -> None:
    maps = list(torch.rand(3, 1, 7, 7, generator=torch.Generator().manual_seed(0)).tril())
    whole, m = torch.stack([one[0] for one in maps], -1), 4
    assert check.generation_slice(whole[3:, :4], maps, m)
    wrong = {
        "one too late": whole[m:, :m],
        "one too early": whole[m - 2 :, :m],
        "last row": whole[m - 1 : -1, :m],
        "all columns": whole[m - 1 :],
        "column is missing": whole[m - 1 :, : m - 1],
        "layers stand first": whole[m - 1 :, :m].movedim(-1, 0),
        "swapped": whole[:m, m - 1 :],
    }
    assert_named(lambda answer: check.generation_slice(answer, maps, m), wrong)
    with pytest.raises(ArgumentError, match="from 1 to 7"):
        check.generation_slice(whole, maps, 8)


def by_order(scores: Tensor, cues: Tensor) -> float:
    """Average precision as it is often written: ties go to the token that comes first."""
    hits, total = 0, 0.0
    for place, j in enumerate(sorted(range(len(scores)), key=lambda j: -scores[j].item()), start=1):
        if cues[j]:
            hits += 1
            total += hits / place
    return total / hits


def test_average_precision_and_its_mistakes() -> None:
    def right(scores: Tensor, cues: Tensor) -> Tensor:
        return cue_average_precision(scores[None], cues[None])[0]

    assert check.average_precision(right)
    assert (check.average_precision(by_order).mistake or "").startswith("ties")
    best_case = check.average_precision(lambda scores, cues: right(scores + 1e-6 * cues, cues))
    assert (best_case.mistake or "").startswith("ties")
    assert "number of cues" in (check.average_precision(lambda s, c: right(s, c) * c.sum()).mistake or "")
    assert "descending" in (check.average_precision(lambda s, c: right(-s, c)).mistake or "")
    assert "reciprocal rank" in (
        check.average_precision(
            lambda s, c: 1 / (1 + c[s.argsort(descending=True, stable=True)].int().argmax())
        ).mistake
        or ""
    )


@pytest.mark.parametrize("grade", [check.average_precision, check.kendall, check.attention])
def test_function_that_does_not_run(grade: Any) -> None:
    def not_written(*arguments: Any) -> Any:
        raise NotImplementedError

    assert grade(not_written).mistake == "no answer"
    assert "returned nothing" in grade(lambda *arguments: None).message
    assert "raised ZeroDivisionError" in grade(lambda *arguments: 1 / 0).message
    assert "pass your function" in grade(3).message
    assert not grade(lambda *arguments: 7.0)


def test_kendall_and_its_mistakes() -> None:
    assert check.kendall(lambda a, b: package_kendall(a[None], b[None])[0])

    def pairs(a: Tensor, b: Tensor, count_ties: bool, subtract: bool) -> float:
        upper = torch.ones(len(a), len(a)).triu(1).bool()
        signs = ((a[:, None] - a).sign() * (b[:, None] - b).sign())[upper]
        same = (signs > 0).double().mean() if not subtract else signs.double().mean()
        return same.item()

    assert "ties" in (check.kendall(lambda a, b: pairs(a, b, True, True)).mistake or "")
    assert "not subtracted" in (check.kendall(lambda a, b: pairs(a, b, True, False)).mistake or "")


def test_deletion_and_its_mistakes() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 4.0, 1.0]])
    worth = torch.tensor([[0.4, 0.1, 0.3, 0.05], [0.02, 0.5, 0.2, 0.11]])
    counts = [0, 1, 2, 3]

    def predict(deleted: Tensor) -> Tensor:
        return 1 - (deleted * worth).sum(1)

    def curve(order: Tensor, alone: bool = False, shift: int = 0) -> list[float]:
        found = []
        for k in counts:
            deleted = torch.zeros(2, 4, dtype=torch.bool)
            for example, row in enumerate(order.tolist()):
                deleted[example, row[k - 1 : k] if alone and k else row[: 0 if alone else k + shift]] = True
            found.append(predict(deleted).mean().item())
        return found

    order = scores.argsort(descending=True)
    assert check.deletion(curve(order), predict, scores, counts)
    wrong = {
        "lowest scores": curve(order.flip(1)),
        "one token is deleted at a time": curve(order, alone=True),
        "one token too many": curve(order, shift=1),
        "differences": [1 - one for one in curve(order)],
    }
    assert_named(lambda answer: check.deletion(answer, predict, scores, counts), wrong)


def test_attention_and_its_mistakes() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.5, axis: int = -1) -> Tensor:
        return (q @ k.T * scale).softmax(axis) @ v

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        return (q @ k.T / 2).masked_fill(future, -torch.inf).softmax(-1) @ v

    assert check.attention(attention)
    assert check.attention(causal, causal=True)
    assert "square root of d" in (check.attention(lambda q, k, v: attention(q, k, v, 1)).mistake or "")
    assert "divided by d" in (check.attention(lambda q, k, v: attention(q, k, v, 0.25)).mistake or "")
    assert "wrong axis" in (check.attention(lambda q, k, v: attention(q, k, v, axis=0)).mistake or "")
    assert "exponentials" in (check.attention(lambda q, k, v: (q @ k.T / 2).exp() @ v).mistake or "")
    assert "keys and values" in (check.attention(lambda q, k, v: attention(q, v, k)).mistake or "")
    assert "multiplied by" in (check.attention(lambda q, k, v: attention(q, k, v, 2)).mistake or "")
    assert "after the softmax" in (check.attention(lambda q, k, v: attention(q, k, v, 1) / 2).mistake or "")
    assert "causal mask is missing" in (check.attention(attention, causal=True).mistake or "")


def test_verified_model_and_refused_model() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    hidden = torch.randn(1, 5, 16)
    assert check.verified(model, hidden), check.verified(model, hidden)
    assert check.verified(None, hidden).mistake == "no answer"
    refused = check.verified(nn.Sequential(nn.Linear(16, 16)), hidden)
    assert refused.mistake == "refused"
    assert refused.message


def test_blank_out_and_its_mistakes() -> None:
    ids = torch.tensor([[3, 5, 7, 9]])

    def predict(batch: Tensor) -> Tensor:
        return (batch * torch.tensor([1.0, 0.5, 0.25, -1.0])).sum(1)

    clean = predict(ids).item()
    without = [predict(torch.tensor([[0 if i == j else one for i, one in enumerate([3, 5, 7, 9])]])) for j in range(4)]
    right = [clean - one.item() for one in without]
    assert check.blank_out(right, predict, ids, 0)
    assert "sign" in (check.blank_out([-one for one in right], predict, ids, 0).mistake or "")
    assert "these are predictions" in (check.blank_out([one.item() for one in without], predict, ids, 0).mistake or "")
    staying = torch.tensor(right).cumsum(0)
    assert "stay replaced" in (check.blank_out(staying, predict, ids, 0).mistake or "")
    with pytest.raises(ArgumentError, match="one text"):
        check.blank_out(right, predict, ids.repeat(2, 1), 0)


def test_shares_of_maps_and_their_mistakes() -> None:
    maps = list(torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(0)).double())
    words = [1, 2, 3]
    near = [sum(one[0, i, i - 1] + one[0, i, i + 1] for i in words) / 3 for one in maps]
    own = [sum(one[0, i, i] for i in words) / 3 for one in maps]
    assert check.neighbor_share(near, maps, words)
    both = [a + b for a, b in zip(near, own, strict=True)]
    assert "word itself" in (check.neighbor_share(both, maps, words).mistake or "")
    before = [sum(one[0, i, i - 1] for i in words) / 3 for one in maps]
    assert "before the word" in (check.neighbor_share(before, maps, words).mistake or "")
    columns = [sum(one[0, i - 1, i] + one[0, i + 1, i] for i in words) / 3 for one in maps]
    assert "swapped" in (check.neighbor_share(columns, maps, words).mistake or "")
    assert "number of words" in (check.neighbor_share([one * 3 / 5 for one in near], maps, words).mistake or "")
    assert "sum over the words" in (check.neighbor_share([one * 3 for one in near], maps, words).mistake or "")
    assert "mean of the two" in (check.neighbor_share([one / 2 for one in near], maps, words).mistake or "")

    pair = [(one[0, 1, 3] + one[0, 3, 1]) / 2 for one in maps]
    assert check.pair_share(pair, maps, 1, 3)
    assert "one direction" in (check.pair_share([one[0, 3, 1] for one in maps], maps, 1, 3).mistake or "")
    assert "sum" in (check.pair_share([2 * one for one in pair], maps, 1, 3).mistake or "")
    with pytest.raises(ArgumentError, match="one example"):
        check.pair_share(pair, [torch.rand(2, 5, 5)], 1, 3)


def test_share_of_a_path_and_its_mistakes() -> None:
    one, two = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)).double()
    path = [1, 2, 4]  # token 2 reads token 1 in the first layer, token 4 reads token 2 in the second
    assert check.path_share(one[2, 1] * two[4, 2], [one, two], path)
    assert "sum" in (check.path_share(one[2, 1] + two[4, 2], [one, two], path).mistake or "")
    assert "first step is missing" in (check.path_share(two[4, 2], [one, two], path).mistake or "")
    assert "last step is missing" in (check.path_share(one[2, 1], [one, two], path).mistake or "")
    assert "whole rollout" in (check.path_share((two @ one)[4, 1], [one, two], path).mistake or "")
    mixed = one[2, 1] / 2 * two[4, 2] / 2
    assert "does not ask for" in (check.path_share(mixed, [one, two], path).mistake or "")
    assert "swapped" in (check.path_share(one[1, 2] * two[2, 4], [one, two], path).mistake or "")
    assert "first step" in (check.path_share(two[2, 1] * one[4, 2], [one, two], path).mistake or "")
    staying = [1, 1, 4]
    right = (one[1, 1] / 2 + 0.5) * two[4, 1] / 2
    assert check.path_share(right, [one, two], staying, residual=0.5)
    forgotten = check.path_share(one[1, 1] * two[4, 1], [one, two], staying, residual=0.5)
    assert "connection is forgotten" in (forgotten.mistake or "")
    with pytest.raises(ArgumentError, match="one more than"):
        check.path_share(right, [one, two], [1, 2])
