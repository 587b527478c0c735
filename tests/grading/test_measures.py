"""The grader of rollouts, measures, functions and models: right answers are accepted, usual mistakes named."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz.errors import ArgumentError
from captum_vz.metrics import cue_average_precision
from captum_vz.metrics import kendall as package_kendall
from captum_vz_lessons import check
from tests.grading import assert_named


def random_maps(layers: int, tokens: int) -> list[Tensor]:
    return list(torch.rand(layers, 1, tokens, tokens, generator=torch.Generator().manual_seed(0)).double())


def test_rollout_and_its_mistakes() -> None:
    maps = [one.softmax(-1) for one in random_maps(3, 5)]
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
    eye = torch.eye(5).double()
    halves = [(each[0] + eye) / 2 for each in maps]
    with_residual = halves[2] @ halves[1] @ halves[0]
    assert_named(lambda answer: check.rollout(answer, maps), wrong | {"does not ask for": with_residual})
    assert check.rollout(with_residual, maps, residual=0.5)
    residual = {"is forgotten": right, "halved": right / 8, "to each map": (right + eye) / 2}
    assert_named(lambda answer: check.rollout(answer, maps, residual=0.5), residual)
    with pytest.raises(ArgumentError, match="one example"):
        check.rollout(right, [torch.rand(2, 5, 5)])


def test_generation_slice_and_its_mistakes() -> None:
    maps = [one.tril() for one in random_maps(3, 7)]
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


def test_shares_of_maps_and_their_mistakes() -> None:
    maps, words = random_maps(3, 5), [1, 2, 3]

    def mean(*steps: tuple[int, int]) -> Tensor:
        """The mean over the words of the sum of entries at (row, column), as steps from (i, i)."""
        sums = [[sum(one[0, i + row, i + column] for row, column in steps) for i in words] for one in maps]
        return torch.tensor(sums).mean(1)

    near = mean((0, -1), (0, 1))
    assert check.neighbor_share(near, maps, words)
    wrong = {
        "word itself": near + mean((0, 0)),
        "before the word": mean((0, -1)),
        "swapped": mean((-1, 0), (1, 0)),
        "number of words": near * 3 / 5,
        "sum over the words": near * 3,
        "mean of the two": near / 2,
    }
    assert_named(lambda answer: check.neighbor_share(answer, maps, words), wrong)
    pair = [(one[0, 1, 3] + one[0, 3, 1]) / 2 for one in maps]
    assert check.pair_share(pair, maps, 1, 3)
    others = {"one direction": [one[0, 3, 1] for one in maps], "sum": [2 * one for one in pair]}
    assert_named(lambda answer: check.pair_share(answer, maps, 1, 3), others)
    with pytest.raises(ArgumentError, match="one example"):
        check.pair_share(pair, [torch.rand(2, 5, 5)], 1, 3)


def test_share_of_a_path_and_its_mistakes() -> None:
    one, two = (each[0] for each in random_maps(2, 5))
    path = [1, 2, 4]  # token 2 reads token 1 in the first layer, token 4 reads token 2 in the second
    assert check.path_share(one[2, 1] * two[4, 2], [one, two], path)
    wrong = {
        "sum": one[2, 1] + two[4, 2],
        "first step is missing": two[4, 2],
        "last step is missing": one[2, 1],
        "whole rollout": (two @ one)[4, 1],
        "does not ask for": one[2, 1] / 2 * two[4, 2] / 2,
        "swapped": one[1, 2] * two[2, 4],
        "first step": two[2, 1] * one[4, 2],
    }
    assert_named(lambda answer: check.path_share(answer, [one, two], path), wrong)
    staying = partial(check.path_share, maps=[one, two], path=[1, 1, 4], residual=0.5)
    assert staying((one[1, 1] / 2 + 0.5) * two[4, 1] / 2)
    assert_named(staying, {"connection is forgotten": one[1, 1] * two[4, 1]})
    with pytest.raises(ArgumentError, match="one more than"):
        check.path_share(0, [one, two], [1, 2])


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
    wrong: dict[str, Any] = {
        "ties": by_order,
        "ties.": lambda scores, cues: right(scores + 1e-6 * cues, cues),
        "number of cues": lambda scores, cues: right(scores, cues) * cues.sum(),
        "descending": lambda scores, cues: right(-scores, cues),
        "reciprocal rank": lambda s, c: 1 / (1 + c[s.argsort(descending=True, stable=True)].int().argmax()),
        "mean score": lambda scores, cues: scores[cues].mean(),
    }
    assert_named(check.average_precision, wrong)


def test_kendall_and_its_mistakes() -> None:
    def pairs(a: Tensor, b: Tensor) -> Tensor:
        upper = torch.ones(len(a), len(a)).triu(1).bool()
        return ((a[:, None] - a).sign() * (b[:, None] - b).sign())[upper].double()

    assert check.kendall(lambda a, b: package_kendall(a[None], b[None])[0])
    wrong = {"ties": lambda a, b: pairs(a, b).mean(), "not subtracted": lambda a, b: (pairs(a, b) > 0).double().mean()}
    assert_named(check.kendall, wrong)


@pytest.mark.parametrize("grade", [check.average_precision, check.kendall, check.attention])
def test_function_that_does_not_run(grade: Any) -> None:
    def not_written(*arguments: Any) -> Any:
        raise NotImplementedError

    assert grade(not_written).mistake == "no answer"
    assert "returned nothing" in grade(lambda *arguments: None).message
    assert "raised ZeroDivisionError" in grade(lambda *arguments: 1 / 0).message
    assert "pass your function" in grade(3).message
    assert not grade(lambda *arguments: 7.0)


def test_attention_and_its_mistakes() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.5, axis: int = -1) -> Tensor:
        return (q @ k.T * scale).softmax(axis) @ v

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        return (q @ k.T / 2).masked_fill(future, -torch.inf).softmax(-1) @ v

    assert check.attention(attention)
    assert check.attention(causal, causal=True)
    wrong: dict[str, Any] = {
        "square root of d": partial(attention, scale=1),
        "divided by d": partial(attention, scale=0.25),
        "wrong axis": partial(attention, axis=0),
        "exponentials": lambda q, k, v: (q @ k.T / 2).exp() @ v,
        "keys and values": lambda q, k, v: attention(q, v, k),
        "multiplied by": partial(attention, scale=2),
        "after the softmax": lambda q, k, v: attention(q, k, v, 1) / 2,
    }
    assert_named(check.attention, wrong)
    assert_named(partial(check.attention, causal=True), {"causal mask is missing": attention})


def test_verified_model_and_refused_model() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    hidden = torch.randn(1, 5, 16)
    assert check.verified(model, hidden)
    assert check.verified(None, hidden).mistake == "no answer"
    refused = check.verified(nn.Sequential(nn.Linear(16, 16)), hidden)
    assert refused.mistake == "refused"
    assert refused.message


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


def test_blank_out_and_its_mistakes() -> None:
    ids, weights = torch.tensor([[3, 5, 7, 9]]), torch.tensor([1.0, 0.5, 0.25, -1.0])

    def predict(batch: Tensor) -> Tensor:
        return (batch * weights).sum(1)

    right = (ids * weights)[0]  # what a token adds to a sum is what its replacement by 0 takes away
    assert check.blank_out(right, predict, ids, 0)
    wrong = {"sign": -right, "these are predictions": right.sum() - right, "stay replaced": right.cumsum(0)}
    assert_named(lambda answer: check.blank_out(answer, predict, ids, 0), wrong)
    with pytest.raises(ArgumentError, match="one text"):
        check.blank_out(right, predict, ids.repeat(2, 1), 0)
