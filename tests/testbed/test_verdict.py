"""What a verdict hands on and shows: the package's answer, a second hint, colors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz.metrics import cue_average_precision, kendall
from captum_vz.testbed import check
from captum_vz.testbed.check.verdict import GOES_ON, HINTS, MIME_TYPE

GRADERS = sorted(set(check.__all__) - {"SENTENCE", "Verdict", "value"})


@pytest.mark.parametrize("name", GRADERS)
def test_each_exercise_has_a_second_hint(name: str) -> None:
    assert HINTS[name].endswith((".", "?"))
    parameter = inspect.signature(getattr(check, name)).parameters["hint"]
    assert parameter.default is False
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_hints_have_exercises() -> None:
    assert set(HINTS) == set(GRADERS)


def test_open_answer_hands_on_the_right_one() -> None:
    maps = list(torch.rand(2, 1, 4, 4).softmax(-1))
    right = maps[1][0] @ maps[0][0]
    verdict = check.rollout(..., maps)
    torch.testing.assert_close(verdict.answer, right, check_dtype=False)
    assert str(verdict).splitlines()[1:] == [GOES_ON]
    assert check.rollout(verdict.answer, maps)
    with_hint = check.rollout(right.mT, maps, hint=True)
    assert str(with_hint).splitlines()[1:] == [f"Hint: {HINTS['rollout']}", GOES_ON]
    passed = check.rollout(right, maps, hint=True)
    assert passed.answer is right
    assert len(str(passed).splitlines()) == 1


def test_open_function_hands_on_the_right_one() -> None:
    def unwritten(*arguments: Any) -> Any:
        raise NotImplementedError

    one, other = torch.tensor([0.1, 0.1, 0.5, 0.3]), torch.tensor([0.0, 0.4, 0.4, 0.2])
    tau = check.kendall(unwritten).answer
    torch.testing.assert_close(tau(one, other), kendall(one[None], other[None])[0], check_dtype=False)
    cues = torch.tensor([False, True, True, False])
    precision = check.average_precision(unwritten).answer
    assert precision(one, cues) == pytest.approx(cue_average_precision(one[None], cues[None])[0].item())
    q, k, v = torch.rand(3, 5, 4)
    attention = check.attention(lambda q, k, v: v, causal=True).answer
    weights = (q @ k.T / 2).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(attention(q, k, v), weights @ v)
    maps = list(torch.rand(3, 1, 4, 4))
    between = check.pair_share(unwritten, maps, 1, 2).answer
    torch.testing.assert_close(
        between(torch.cat(maps), 0, 3), (torch.cat(maps)[:, 0, 3] + torch.cat(maps)[:, 3, 0]) / 2
    )
    mine = check.kendall(lambda a, b: kendall(a[None], b[None])[0])
    assert mine
    assert mine.answer is not tau


def test_open_curve_and_model() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])

    def predict(deleted: Tensor) -> Tensor:
        return 1 - (deleted * torch.tensor([0.5, 0.1, 0.3])).sum(1)

    curve = check.deletion(lambda values: ..., predict, scores, counts=[0, 1, 2]).answer
    assert check.deletion(curve, predict, scores, counts=[0, 1, 2])
    assert curve(-scores).tolist() == pytest.approx([1.0, 0.7, 0.5])
    states = torch.rand(1, 3, 6)
    assert check.verified(check.verified(..., states).answer, states)
    assert check.verified(..., torch.zeros(1, 3, dtype=torch.long)).answer is None  # no model takes just any ids


def test_two_mistakes_at_once() -> None:
    falls = torch.tensor([0.5, 0.2])
    mistakes = {"this is the last layer.": falls, "this is the mean.": falls / 2}
    verdict = check.value(-falls, torch.tensor([0.1, 0.7]), mistakes)
    assert verdict.mistake == "this is the last layer. The sign is wrong."
    assert check.value(falls, torch.tensor([0.1, 0.7]), mistakes).mistake == "this is the last layer."


def test_mean_score_is_no_average_precision() -> None:
    mistake = check.average_precision(lambda scores, cues: scores[cues].mean()).mistake or ""
    assert "mean score" in mistake


def test_notebook_shows_color_and_keeps_the_verdict() -> None:
    verdict = check.value(1.0, 2.0, {"<b> is no tag.": 1.0}, name="one")
    shown = verdict._repr_mimebundle_()
    assert "&lt;b&gt; is no tag." in shown["text/html"]
    assert shown["text/plain"] == str(verdict)
    assert shown[MIME_TYPE] == {"exercise": "one", "passed": False, "mistake": "<b> is no tag."}
    right = check.value(2.0, 2.0)._repr_mimebundle_()
    assert right[MIME_TYPE]["passed"] is True
    assert "✓" in right["text/html"] and "✗" in shown["text/html"]


def test_no_grader_forgets_its_hint() -> None:
    maps = list(torch.rand(2, 1, 4, 4).softmax(-1))
    opened = [
        check.value_zeroing_row(..., hint=True),
        check.value_zeroing_map(..., hint=True),
        check.attention(..., hint=True),
        check.average_precision(..., hint=True),
        check.kendall(..., hint=True),
        check.generation_slice(..., maps, 2, hint=True),
        check.neighbor_share(..., maps, [1], hint=True),
        check.pair_share(..., maps, 1, 2, hint=True),
        check.path_share(..., maps, [0, 0, 0], hint=True),
        check.patch_token(..., 1, 1, patch=2, side=4, hint=True),
        check.frame_centers(..., [3], [2], 4, hint=True),
        check.copied_from(..., torch.tensor([[4, 5], [5, 4]]), torch.tensor([[5, 4], [4, 5]]), hint=True),
        check.found_rate(..., torch.rand(2, 3), torch.tensor([1, 2]), hint=True),
        check.place_shares(..., torch.rand(2, 3), torch.tensor([[1], [2]]), hint=True),
        check.hidden_share(..., torch.rand(2, 3, 2), [True, False, True], hint=True),
        check.verified(..., None, hint=True),
        check.blank_out(..., lambda ids: ids.sum(1), torch.tensor([[1, 2]]), 0, hint=True),
        check.deletion(..., lambda deleted: deleted.sum(1), torch.rand(1, 3), [0, 1], hint=True),
    ]
    assert [verdict.hint for verdict in opened] == [HINTS[verdict.exercise] for verdict in opened]
