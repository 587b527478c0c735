"""What a verdict hands on and shows: the package's answer, a second hint, colors."""

from __future__ import annotations

import torch

from captum_vz_lessons import MIME_TYPE, check
from captum_vz_lessons.check.verdict import GOES_ON, Verdict, judge

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
