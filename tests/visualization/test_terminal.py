"""Text for a terminal is tested by its characters."""

import re

import pytest
import torch

from captum_vz.errors import ArgumentError
from captum_vz.visualization import terminal_text

ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def light(index: str) -> float:
    steps = (0, 95, 135, 175, 215, 255)  # the cube of 6 x 6 x 6 colours that begins at 16
    red, green, blue = (steps[(int(index) - 16) // power % 6] / 255 for power in (36, 6, 1))
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2


def test_terminal_colour_keeps_text() -> None:
    scores = torch.tensor([0.1, 0.6, 0.3])
    plain, coloured = (terminal_text(["a", "b", "c"], scores, 1, color) for color in (False, True))
    assert "\x1b" not in plain
    assert ESCAPE.sub("", coloured).split() == plain.split()
    assert coloured.count("\x1b[0m") == 3  # each colour ends after its token


@pytest.mark.parametrize("sign", [1, -1])
def test_terminal_colours_darken_and_contrast(sign: int) -> None:
    text = terminal_text(["x"] * 7, sign * torch.arange(7.0))
    shades = [(light(back), light(ink)) for back, ink in re.findall(r"48;5;(\d+);38;5;(\d+)m", text)]
    backs = [back for back, _ in shades]
    assert len(shades) == 7
    assert backs == sorted(backs, reverse=True)
    assert len(set(backs)) == 7
    for back, ink in shades:  # the contrast that WCAG 2 asks of text
        assert (max(back, ink) + 0.05) / (min(back, ink) + 0.05) >= 4.5


def test_terminal_escapes_control_characters() -> None:
    text = terminal_text(["\x1b[2J", "a\nb"], torch.ones(2), color=False)
    assert text.count("\n") == 1
    assert r"\x1b[2J" in text
    assert r"a\nb" in text


def test_signed_bars_go_to_both_sides() -> None:
    scores = torch.tensor([-0.5, 0.25, 0.0, -0.01])
    lines = terminal_text(["one", "two", "three", "four"], scores, color=False).split("\n")
    assert [line.split()[2] for line in lines] == ["-0.5000", "+0.2500", "+0.0000", "-0.0100"]
    left, right = zip(*(line.split("│") for line in lines), strict=True)
    assert len(set(map(len, left))) == 1  # the middle line is straight
    assert [one.count("█") for one in left] == [12, 0, 0, 0]
    assert [one.count("█") for one in right] == [0, 6, 0, 0]
    shared = terminal_text(["a", "b"], torch.tensor([0.25, 0.5]), color=False, signed=True, full=1)
    assert [line.split("│")[1] for line in shared.split("\n")] == ["███", "██████"]
    with pytest.raises(ArgumentError, match="lowest score is -1, but bars begin at 0: pass signed=True"):
        terminal_text(["a"], torch.tensor([-1.0]), signed=False)


@pytest.mark.parametrize("scores", [torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.6, -0.3, 0.1])])
@pytest.mark.parametrize("color", [True, False])
def test_bars_fit_the_columns(scores: torch.Tensor, color: bool) -> None:
    tokens = ["the", "pictures", "[MASK]"]
    for columns in range(20, 60):
        lines = ESCAPE.sub("", terminal_text(tokens, scores, 2, color, columns=columns)).split("\n")
        assert max(map(len, lines)) <= columns or "█" not in lines[0]
        assert "█" in lines[0] or columns < 32
    assert terminal_text(tokens, scores, columns=200) == terminal_text(tokens, scores)
