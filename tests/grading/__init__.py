"""Tests of the lessons' grader."""

from collections.abc import Callable, Mapping
from typing import Any

from captum_vz_lessons.check import Verdict


def assert_graded(grade: Callable[[Any], Verdict], wrong: Mapping[str, Any], *right: Any) -> None:
    """Right answers are accepted. Each wrong answer is not, and its mistake is named with these words."""
    assert all(map(grade, right))
    for words, answer in wrong.items():
        verdict = grade(answer)
        assert not verdict, words
        assert words in (verdict.mistake or ""), (words, verdict)
