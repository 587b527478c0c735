"""What the demo's page shows: limits, files, and text that stays text."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from captum_vz.demo.answers import Answers, Limits
from captum_vz.demo.server import is_loopback

HOSTILE = "<script>alert(1)</script> [MASK]"


@pytest.fixture
def answers() -> Iterator[Answers]:
    found = Answers(Limits(("agreement", "causal"), False, 40))
    yield found
    found.close()


def test_hostile_text_stays_text(answers: Answers) -> None:
    told, _, grid, shares, _, files = answers.explain(HOSTILE, "agreement", ["value-zeroing"], "", -1)
    assert "[MASK], position" in told
    assert "<script" not in told + shares
    assert Path(grid).is_file()
    assert {Path(file).name for file in files} >= {"page.html", "layers.png", "methods.csv", "maps.json"}


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("", "agreement", "The text is empty"),
        ("hat " * 60, "agreement", "this page takes at most 40"),
        ("h" * 5000, "agreement", "this page takes at most 640"),
        ("a hat", "/etc", "is not offered here"),
    ],
)
def test_limits_are_told(text: str, model: str, message: str, answers: Answers) -> None:
    told, *_ = answers.explain(text, model, ["value-zeroing"], "", -1)
    assert 'role="alert"' in told
    assert message in told


def test_text_is_continued(answers: Answers) -> None:
    told, _, steps, _ = answers.generate("the pictures of some hat", "causal", "value-zeroing", 2, ["special"])
    assert "the pictures of some hat" in told
    assert Path(steps).is_file()


def test_other_addresses_offer_fewer_models() -> None:
    assert is_loopback("127.0.0.1")
    assert not is_loopback("0.0.0.0")
