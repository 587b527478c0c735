"""What a verdict hands on and shows: the package's answer, a second hint, colors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz.metrics import cue_average_precision, kendall
from captum_vz_lessons import MIME_TYPE, check
from captum_vz_lessons.check.verdict import GOES_ON, Verdict, judge

MAPS = list(torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0)).softmax(-1))
OPEN: dict[str, tuple[Any, ...]] = {
    "value_zeroing": (),
    "attention": (),
    "average_precision": (),
    "kendall": (),
    "rollout": (MAPS,),
    "generation_slice": (MAPS, 2),
    "neighbor_share": (MAPS, [1]),
    "pair_share": (MAPS, 1, 2),
    "path_share": (MAPS, [0, 0, 0]),
    "frame_centers": ([3], [2], 4),
    "copied_from": (torch.tensor([[4, 5], [5, 4]]), torch.tensor([[5, 4], [4, 5]])),
    "found_rate": (torch.rand(2, 3), torch.tensor([1, 2])),
    "place_shares": (torch.rand(2, 3), torch.tensor([[1], [2]])),
    "hidden_share": (torch.rand(2, 3, 2), [True, False, True]),
    "verified": (None,),
    "blank_out": (lambda ids: ids.sum(1), torch.tensor([[1, 2]]), 0),
    "deletion": (lambda deleted: deleted.sum(1), torch.rand(1, 3), [0, 1]),
}


def test_open_exercises_have_a_second_hint() -> None:
    for name, arguments in OPEN.items():
        verdict = getattr(check, name)(..., *arguments, hint=True)
        assert verdict.exercise == name
        assert not verdict
        assert verdict.hint.endswith((".", "?")), name
        assert not getattr(check, name)(..., *arguments).hint
    assert check.patch_token(..., 1, 1, patch=2, side=4, hint=True).hint
    models = {"effect", "source_read"}  # they take a model
    assert set(check.__all__) == {*OPEN, *models, "patch_token", "SENTENCE", "Verdict"}


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
    maps = torch.cat(MAPS)
    between = check.pair_share(unwritten, MAPS, 1, 2).answer
    torch.testing.assert_close(between(maps, 0, 3), (maps[:, 0, 3] + maps[:, 3, 0]) / 2)
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


def test_mistakes_that_are_nearly_alike() -> None:
    """The nearest mistake is named, and two at once only if no single one explains the numbers."""
    falls = torch.tensor([0.5, 0.2])
    mistakes = {"this is the last layer.": falls, "this is the mean.": falls / 2}
    both = judge(-falls, torch.tensor([0.1, 0.7]), mistakes)
    assert both.mistake == "this is the last layer. The sign is wrong."
    assert judge(falls, torch.tensor([0.1, 0.7]), mistakes).mistake == "this is the last layer."
    assert judge([0.5, 0.5], [0.4, 0.6], [("one", [0.5, 0.5003]), ("two", [0.5, 0.5])]).mistake == "two"
    assert judge([0.4, 0.6001], [0.4, 0.6], [("one", [0.4, 0.6005])]).mistake is None
    assert judge(0.75000001, 0.75) and judge(torch.tensor(3), 3)
    assert "differs from the right number by 1.0e-01" in judge(0.65, 0.75).message


def test_notebook_shows_color_and_keeps_the_verdict() -> None:
    verdict = Verdict(False, "<b> is no tag.", "<b> is no tag.", "one")
    shown = verdict._repr_mimebundle_()
    assert "&lt;b&gt; is no tag." in shown["text/html"]
    assert shown["text/plain"] == str(verdict)
    assert shown[MIME_TYPE] == {"exercise": "one", "passed": False, "mistake": "<b> is no tag."}
    right = Verdict(True, "it is.")._repr_mimebundle_()
    assert right[MIME_TYPE]["passed"] is True
    assert "✓" in right["text/html"] and "✗" in shown["text/html"]
