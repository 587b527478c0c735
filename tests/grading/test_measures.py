"""The grader of measures, functions and places: right answers are accepted, usual mistakes named."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d

from captum_vz.metrics import cue_average_precision
from captum_vz.metrics import kendall as package_kendall
from captum_vz_lessons import MIME_TYPE, check
from captum_vz_lessons.check.verdict import GOES_ON, Verdict, judge
from tests.grading import assert_graded


def random_maps(layers: int, tokens: int) -> list[Tensor]:
    return list(torch.rand(layers, 1, tokens, tokens, generator=torch.Generator().manual_seed(0)).double())


pair_share = partial(check.pair_share, maps=random_maps(3, 5), one=1, other=3)


def test_rollout_and_its_mistakes() -> None:
    maps = [one.softmax(-1) for one in random_maps(3, 5)]
    one, two, three = (each[0] for each in maps)
    right, eye = three @ two @ one, torch.eye(5).double()
    halves = [(each[0] + eye) / 2 for each in maps]
    with_residual = halves[2] @ halves[1] @ halves[0]
    graded, with_half = partial(check.rollout, maps=maps), partial(check.rollout, maps=maps, residual=0.5)
    assert graded(right[2], token=2)
    wrong = {
        "wrong order": one @ two @ three,
        "swapped": right.mT,
        "one by one": one * two * three,
        "mean": (one + two + three) / 3,
        "last layer alone": three,
        "last layer is missing": two @ one,
        "first layer is missing": three @ two,
        "swapped in each map": three.mT @ two.mT @ one.mT,
        "does not ask for": with_residual,
    }
    assert_graded(graded, wrong, right)
    wrong = {"is forgotten": right, "halved": right / 8, "to each map": (right + eye) / 2}
    assert_graded(with_half, wrong, with_residual)


def test_layer_products_and_their_mistakes() -> None:
    rows = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    relevance = torch.tensor([3.0, -1, 2, 1, 5])
    right = (rows[:, 2] * 2 + rows[:, 3]) / 3
    graded = partial(check.layer_products, rows=rows, relevance=relevance)
    wrong = {
        "the first token counts": rows @ torch.tensor([3.0, 0, 2, 1, 0]).double() / 6,
        "the explained token counts": rows @ torch.tensor([0.0, 0, 2, 1, 5]).double() / 8,
        "the first and the explained token count": rows @ torch.tensor([3.0, 0, 2, 1, 5]).double() / 11,
        "negative relevances count. ": rows @ torch.tensor([0.0, -1, 2, 1, 0]).double() / 2,
        "with their size": rows @ torch.tensor([0.0, 1, 2, 1, 0]).double() / 4,
        "divide the relevances": right * 3,
        "one token": rows[:, 2],
    }
    assert_graded(graded, wrong, right)


def test_generation_slice_and_its_mistakes() -> None:
    maps = [one.tril() for one in random_maps(3, 7)]
    whole, m = torch.stack([one[0] for one in maps], -1), 4
    graded = partial(check.generation_slice, maps=maps, prompt_length=m)
    wrong = {
        "one too late": whole[m:, :m],
        "one too early": whole[m - 2 :, :m],
        "last row": whole[m - 1 : -1, :m],
        "all columns": whole[m - 1 :],
        "column is missing": whole[m - 1 :, : m - 1],
        "layers are the first axis": whole[m - 1 :, :m].movedim(-1, 0),
        "swapped": whole[:m, m - 1 :],
    }
    assert_graded(graded, wrong, whole[3:, :4])


def test_neighbors_and_their_mistakes() -> None:
    maps, words = random_maps(3, 5), [1, 2, 3]

    def mean(*steps: tuple[int, int]) -> Tensor:
        """The mean over the words of the sum of entries at (row, column), as steps from (i, i)."""
        sums = [[sum(one[0, i + row, i + column] for row, column in steps) for i in words] for one in maps]
        return torch.tensor(sums).mean(1)

    near, graded = mean((0, -1), (0, 1)), partial(check.neighbor_share, maps=maps, words=words)
    wrong = {
        "word itself": near + mean((0, 0)),
        "before the word": mean((0, -1)),
        "swapped": mean((-1, 0), (1, 0)),
        "number of words": near * 3 / 5,
        "sum over the words": near * 3,
        "mean of the two": near / 2,
    }
    assert_graded(graded, wrong, near)


def test_pairs_and_their_mistakes() -> None:
    wrong = {
        "one direction": lambda maps, one, other: maps[:, other, one],
        "sum": lambda maps, one, other: maps[:, one, other] + maps[:, other, one],
    }
    assert_graded(pair_share, wrong, lambda maps, one, other: [(a[one, other] + a[other, one]) / 2 for a in maps])


def test_share_of_a_path_and_its_mistakes() -> None:
    one, two = (each[0] for each in random_maps(2, 5))
    graded = partial(check.path_share, maps=[one, two], path=[1, 2, 4])
    assert graded(
        one[2, 1] * two[4, 2]
    )  # token 2 reads token 1 in the first layer, token 4 reads token 2 in the second
    wrong = {
        "sum": one[2, 1] + two[4, 2],
        "first step is missing": two[4, 2],
        "last step is missing": one[2, 1],
        "whole rollout": (two @ one)[4, 1],
        "does not ask for": one[2, 1] / 2 * two[4, 2] / 2,
        "swapped": one[1, 2] * two[2, 4],
        "first step": two[2, 1] * one[4, 2],
    }
    assert_graded(graded, wrong)


def by_order(scores: Tensor, cues: Tensor) -> float:
    """Average precision as it is often written: ties go to the token that comes first."""
    hits = cues[scores.argsort(descending=True, stable=True)]
    precisions = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return precisions[hits].mean().item()


def test_average_precision_and_its_mistakes() -> None:
    def right(scores: Tensor, cues: Tensor) -> Tensor:
        return cue_average_precision(scores[None], cues[None])[0]

    wrong: dict[str, Any] = {
        "ties": by_order,
        "ties.": lambda scores, cues: right(scores + 1e-6 * cues, cues),
        "number of cues": lambda scores, cues: right(scores, cues) * cues.sum(),
        "descending": lambda scores, cues: right(-scores, cues),
        "reciprocal rank": lambda s, c: 1 / (1 + c[s.argsort(descending=True, stable=True)].int().argmax()),
        "mean score": lambda scores, cues: scores[cues].mean(),
    }
    assert_graded(check.average_precision, wrong, right)


def test_kendall_and_its_mistakes() -> None:
    def pairs(a: Tensor, b: Tensor) -> Tensor:
        upper = torch.ones(len(a), len(a)).triu(1).bool()
        return ((a[:, None] - a).sign() * (b[:, None] - b).sign())[upper].double()

    wrong = {"ties": lambda a, b: pairs(a, b).mean(), "not subtracted": lambda a, b: (pairs(a, b) > 0).double().mean()}
    assert_graded(check.kendall, wrong, lambda a, b: package_kendall(a[None], b[None])[0])


@pytest.mark.parametrize("grade", [check.average_precision, check.kendall, check.attention, pair_share])
def test_function_that_does_not_run(grade: Any) -> None:
    """The lesson goes on with a right one."""

    def not_written(*arguments: Any) -> Any:
        raise NotImplementedError

    verdict = grade(not_written)
    assert verdict.mistake == "no answer"
    assert grade(verdict.answer)
    assert "returned nothing" in grade(lambda *arguments: None).message
    assert "raised ZeroDivisionError" in grade(lambda *arguments: 1 / 0).message
    assert "pass your function" in grade(3).message
    assert not grade(lambda *arguments: 7.0)


def test_attention_and_its_mistakes() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.5, axis: int = -1) -> Tensor:
        return (q @ k.T * scale).softmax(axis) @ v

    wrong: dict[str, Any] = {
        "square root of d": partial(attention, scale=1),
        "divided by d": partial(attention, scale=0.25),
        "wrong axis": partial(attention, axis=0),
        "exponentials": lambda q, k, v: (q @ k.T / 2).exp() @ v,
        "keys and values": lambda q, k, v: attention(q, v, k),
        "multiplied by": partial(attention, scale=2),
        "after the softmax": lambda q, k, v: attention(q, k, v, 1) / 2,
    }
    assert_graded(check.attention, wrong, attention)


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

    def predict(deleted: Tensor) -> Tensor:
        return 1 - (deleted * worth).sum(1)

    def curve(values: Tensor, alone: bool = False, shift: int = 0) -> list[float]:
        found = []
        for k in range(4):
            deleted = torch.zeros(2, 4, dtype=torch.bool)
            for example, row in enumerate(values.argsort(descending=True).tolist()):
                deleted[example, row[k - 1 : k] if alone and k else row[: 0 if alone else k + shift]] = True
            found.append(predict(deleted).mean().item())
        return found

    graded = partial(check.deletion, predict=predict, scores=scores, counts=range(4))
    wrong = {
        "lowest scores": lambda values: curve(-values),
        "one token is deleted at a time": partial(curve, alone=True),
        "one token too many": partial(curve, shift=1),
        "differences": lambda values: [1 - one for one in curve(values)],
    }
    assert_graded(graded, wrong, curve, graded(lambda values: ...).answer)


def test_patches_and_copies_and_their_mistakes() -> None:
    graded = partial(check.patch_token, row=6, column=2, patch=2, side=4)
    patches = torch.arange(16).reshape(4, 4).repeat_interleave(2, 0).repeat_interleave(2, 1)
    wrong: dict[str, Any] = {
        "[CLS] is token 0": patches[6, 2],
        "swapped": patches[2, 6] + 1,
        "these are pixels": 1 + 6 * 8 + 2,
    }
    assert_graded(graded, wrong, patches[6, 2] + 1)
    source = torch.randint(3, 20, (40, 6), generator=torch.Generator().manual_seed(0))
    graded = partial(check.copied_from, source=source, written=source.flip(1))
    wrong = {"that of the source": range(6), "from 0": [6, 5, 4, 3, 2, 1], "written next": [0, 5, 4, 3, 2, 1]}
    assert_graded(graded, wrong, [5, 4, 3, 2, 1, 0])
    ids, weights = torch.tensor([[3, 5, 7, 9]]), torch.tensor([1.0, 0.5, 0.25, -1.0])
    graded = partial(check.blank_out, predict=lambda batch: (batch * weights).sum(1), ids=ids, replacement=0)
    right = (ids * weights)[0]  # what a token adds to a sum is what its replacement by 0 takes away
    wrong = {"sign": -right, "these are predictions": right.sum() - right, "stay replaced": right.cumsum(0)}
    assert_graded(graded, wrong, right)


def test_centers_of_frames_and_their_mistakes() -> None:
    kernels, strides, frames = (10, 8, 4), (5, 4, 4), 3
    covers = torch.eye(400)[:, None]  # one input sample is 1, the others are 0
    for kernel, stride in zip(kernels, strides, strict=True):
        covers = conv1d(covers, torch.ones(1, 1, kernel), stride=stride)
    seen = covers[:, 0].T > 0  # (frames, samples): which samples reach a frame
    ends = torch.stack([row.nonzero().flatten()[[0, -1]].double() for row in seen[:frames]])
    centers, steps = ends.mean(1), torch.arange(frames)
    graded = partial(check.frame_centers, kernels=kernels, strides=strides, frames=frames)
    wrong = {
        "does not begin at sample 0": centers - centers[0],
        "last samples": ends[:, 1],
        "further apart": centers[0] + 4 * steps,
        "added": centers[0] + 13 * steps,
        "multiply them by the strides": 4.5 + 3.5 + 1.5 + 80 * steps,
        "(k - 1) / 2": 5 + 4 * 5 + 2 * 20 + 80 * steps,
    }
    assert_graded(graded, wrong, centers, centers.tolist())


def test_rates_and_shares_and_their_mistakes() -> None:
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])
    places, chosen = torch.tensor([0, 1, 0, 1, 0]), torch.tensor([True, True, True, False, False])
    graded = partial(check.found_rate, scores=scores, places=places, chosen=chosen)
    assert graded(2 / 3) and graded(torch.tensor([2 / 3]))
    wrong: dict[str, Any] = {
        "other examples": 1 / 2,
        "all examples": 3 / 5,
        "the number of all": 2 / 5,
        "number of examples": 2,
    }
    assert_graded(graded, wrong | {"missed": 1 / 3})
    scores = torch.tensor([[4.0, 2.0, 2.0], [1.0, 1.0, 2.0], [0.0, 3.0, 1.0]])
    places = torch.tensor([[0, 1], [1, 2], [2, 1]])
    right = (0.5 + 0.5 + 0.75) / 3, (0.75 + 0.75 + 1) / 3
    graded = partial(check.place_shares, scores=scores, places=places)
    means = (0.5 + 0.25 + 0.25) / 3, (0.25 + 0.5 + 0.75) / 3
    wrong = {"other order": right[::-1], "Add up the shares": (right[0], right[1] / 2)}
    wrong |= {"divide each row": ((4 + 2 + 3) / 3, (6 + 3 + 4) / 3), "largest of each": (max(means), right[1])}
    assert_graded(graded, wrong, right, [torch.tensor(one) for one in right])
    scores = torch.rand(4, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 6
    hidden, row = [True, True, False, True, True, False], scores[0, :, 2]
    graded = partial(check.hidden_share, scores=scores, hidden=hidden, step=0, layer=-1)
    wrong = {"that the mask shows": row[2] + row[5], "numbers of tokens": 4 / 6, "this is the mean": row[hidden].mean()}
    wrong |= {"this is layer 1": scores[0, hidden, 1].sum(), "generated token 2": scores[2, hidden, 2].sum()}
    assert_graded(graded, wrong, row[hidden].sum())


# Verdicts


MAPS = list(torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0)).softmax(-1))


def test_open_answer_hands_on_the_right_one() -> None:
    right = MAPS[1][0] @ MAPS[0][0]
    verdict = check.rollout(..., MAPS)
    torch.testing.assert_close(verdict.answer, right, check_dtype=False)
    assert str(verdict).splitlines()[1:] == [GOES_ON]
    assert check.rollout(verdict.answer, MAPS)
    with_hint = check.rollout(right.mT, MAPS, hint=True)
    assert str(with_hint).splitlines()[1:] == [f"Hint: {with_hint.hint}", GOES_ON]
    passed = check.rollout(right, MAPS, hint=True)
    assert passed.answer is right
    assert len(str(passed).splitlines()) == 1


def test_mistakes_that_are_nearly_alike() -> None:
    """The nearest mistake is named, and two at once only if no single one explains the numbers."""
    falls = torch.tensor([0.5, 0.2])
    mistakes = {"this is the last layer.": falls, "this is the mean.": falls / 2}
    both = judge(-falls, torch.tensor([0.1, 0.7]), mistakes)
    assert both.mistake == "this is the last layer. The sign is wrong."
    assert judge(falls, torch.tensor([0.1, 0.7]), mistakes).mistake == "this is the last layer."
    assert judge([0.5, 0.5], [0.4, 0.6], {"one": [0.5, 0.5003], "two": [0.5, 0.5]}).mistake == "two"
    assert judge([0.4, 0.6001], [0.4, 0.6], {"one": [0.4, 0.6005]}).mistake is None
    assert judge(0.75000001, 0.75, {}) and judge(torch.tensor(3), 3, {})
    assert "differs from the right number by 1.0e-01" in judge(0.65, 0.75, {}).message


def test_notebook_shows_color_and_keeps_the_verdict() -> None:
    verdict = Verdict(False, "<b> is no tag.", "<b> is no tag.", "one")
    shown = verdict._repr_mimebundle_()
    assert "&lt;b&gt; is no tag." in shown["text/html"]
    assert shown["text/plain"] == str(verdict)
    assert shown[MIME_TYPE] == {"exercise": "one", "passed": False, "mistake": "<b> is no tag."}
    right = Verdict(True, "it is.")._repr_mimebundle_()
    assert right[MIME_TYPE]["passed"] is True
    assert "✓" in right["text/html"] and "✗" in shown["text/html"]
