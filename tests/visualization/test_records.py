"""Records are tested by what Captum draws, pages by what a parser of HTML reads, terminals by characters."""

import re
from pathlib import Path

import pytest
import torch
from captum.attr import visualization

from captum_vz.errors import ArgumentError
from captum_vz.visualization import save_html, terminal_text, text_record
from tests.view.pages import Page

NOTHING = '<span hidden style="display:none"> ()'  # what hides the brackets that Captum writes around a probability


def drawn_by_captum(record: visualization.VisualizationDataRecord) -> str:
    return str(visualization.visualize_text([record], legend=False).data)


def test_records_are_drawn_by_captum() -> None:
    html = drawn_by_captum(text_record(["a", "b", "c"], torch.tensor([[0.02, -0.04, 0.01]]), attr_class="by us"))
    colours = re.findall(r"hsl\((\d+), 75%, (\d+)%\)", html)
    assert colours == [("120", "75"), ("0", "60"), ("120", "88")]  # in Captum: 100 - 50 s above zero, 100 + 40 s below
    assert re.findall(r"<b>(.*?)</b>", html) == ["", NOTHING, "by us", "-0.01"]
    record = text_record(["a\nb\u202e"], torch.ones(1), attr_class="<b>x", true_class="<script>", pred_class="a & <i>")
    assert record.raw_input_ids == [r"a\nb\u202e"]
    html = drawn_by_captum(record)
    assert re.findall(r"<b>(.*?)</b>", html)[:3] == ["&lt;script&gt;", "a &amp; &lt;i&gt;" + NOTHING, "&lt;b&gt;x"]
    number = text_record(["a"], torch.ones(1), true_class=3)  # type: ignore[arg-type]  # Captum takes numbers too
    assert re.findall(r"<b>(.*?)</b>", drawn_by_captum(number))[0] == "3"
    unknown, known = text_record(["a"], torch.ones(1), pred_class="are"), text_record(["a"], torch.ones(1), pred_prob=0)
    rows = Page(str(visualization.visualize_text([unknown, known], legend=False).data)).rows
    cells = [row[1].strip() for row in rows if len(row) == 5][-2:]
    assert cells == ["are", "(0.00)"]


def test_page_holds_all_methods(tmp_path: Path) -> None:
    rows = {"一": torch.ones(3), "two": torch.zeros(3)}
    records = [text_record(["the", "<script>alert(1)</script>", "日本"], rows[name], attr_class=name) for name in rows]
    page = save_html(records, tmp_path / "page.html", title="A & B")
    assert (tmp_path / "page.html").read_bytes().isascii()
    read = Page((tmp_path / "page.html").read_text("ascii"))
    assert read.rows[0] == ["Attribution Label", "Attribution Score", "Word Importance"]  # the others have nothing
    assert [row[:2] for row in read.rows[1:]] == [["一", "3.00"], ["two", "0.00"]]
    assert read.rows[1][2].split() == ["the", "<script>alert(1)</script>", "日本"]
    assert "script" not in read.tags and "link" not in read.tags and "img" not in read.tags
    assert page.count("A &amp; B") == 2


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
    text = terminal_text(["\x1b[2J", "a\nb"], torch.ones(2), color=False)
    assert text.count("\n") == 1
    assert r"\x1b[2J" in text
    assert r"a\nb" in text


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
    with pytest.raises(ArgumentError, match="pass signed=True"):
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
