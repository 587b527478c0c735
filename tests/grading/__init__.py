"""Tests of the lessons' grader."""

from collections.abc import Callable, Mapping
from typing import Any

from captum_vz_lessons.check import Verdict


def assert_named(grade: Callable[[Any], Verdict], wrong: Mapping[str, Any]) -> None:
    """Each wrong answer is not accepted, and its mistake is named with these words."""
    for words, answer in wrong.items():
        verdict = grade(answer)
        assert not verdict, words
        assert words in (verdict.mistake or ""), (words, verdict)
