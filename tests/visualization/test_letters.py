"""Labels in any script, in emoji, and where there is little room for them."""

from __future__ import annotations

import io
import warnings
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from captum_vz.visualization import draw_maps, draw_row
from captum_vz.visualization.pictures.parts import fonts
from captum_vz.visualization.pictures.parts.fonts import set_label
from captum_vz.visualization.pictures.parts.labels import text_width

RED = np.full((128, 136, 4), (255, 0, 0, 255), dtype=np.uint8)


def a_map(count: int) -> Tensor:
    return torch.eye(count)


def labels_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]


def pixels_of(figure: Figure, **options: Any) -> np.ndarray[Any, Any]:
    file = io.BytesIO()
    figure.savefig(file, format="png", **options)
    return np.asarray(Image.open(file).convert("RGB")).astype(int)


def is_red(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (pixels[..., 0] > 200) & (pixels[..., 1] < 60) & (pixels[..., 2] < 60)


@pytest.fixture
def red_emoji(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each emoji is a red square, whatever fonts the machine has."""
    monkeypatch.setattr(fonts, "picture_of", lambda letters: RED)


@pytest.fixture
def no_emoji_font(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "picture_of", lambda letters: None)


def test_labels_in_any_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """No box and no warning of matplotlib: each character has a font, or is written as a name."""
    monkeypatch.setattr(fonts, "_warn_of", str)
    tokens = ["東京", "한국", "مرحبا", "שלום", "हिन्दी", "😀", "🚀", "👩\u200d🚀", "\ue000", "x\u202e"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw_maps([a_map(len(tokens))] * 2, tokens, label="共有 🚀", title="東京 $x$")
        figure.draw_without_rendering()
    labels = labels_of(figure)
    assert all(label for label in labels)
    assert labels[-1] == r"x\u202e"
    assert labels[-2] in ("\ue000", r"\ue000", "U+E000")
    assert labels[6] in (fonts.SPACE, ":rocket:")
    # Its vowels are marks. Without a font for it, its letters have numbers.
    assert labels[4] in ("हिन्दी", "U+0939U+093FU+0928U+0926U+0940")


@pytest.mark.parametrize(
    ("letter", "font"),
    [
        ("東", "Noto Sans CJK"),
        ("カ", "Noto Sans CJK"),
        ("한", "Noto Sans CJK"),
        ("ह", "Noto Sans Devanagari"),
        ("\u0e01", "Noto Sans Thai"),
        ("🚀", "Noto Color Emoji"),
    ],
)
def test_missing_font_is_named(letter: str, font: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_family_of", lambda letter: None)
    monkeypatch.setattr(fonts, "picture_of", lambda letters: None)
    fonts._warn_of.cache_clear()
    with pytest.warns(UserWarning, match=f"install {font}"):
        draw_maps([a_map(2)], [letter, "b"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        draw_maps([a_map(2)], [letter, "b"])


def test_empty_token_has_a_sign() -> None:
    assert labels_of(draw_maps([a_map(2)], ["", "b"])) == ["∅", "b"]


# Emoji


@pytest.mark.parametrize(
    ("text", "count", "written"),
    [
        ("🚀", 1, "\u2003"),
        ("a🚀b😀", 2, "a\u2003b\u2003"),
        ("👩\u200d🚀", 1, "\u2003"),  # a woman, a joiner and a rocket: one sign
        ("👍🏽", 1, "\u2003"),
        ("🇩🇪🇫🇷", 2, "\u2003\u2003"),
        ("1\ufe0f\u20e3", 1, "\u2003"),
        ("❤\ufe0f", 1, "\u2003"),
        ("❤", 0, "❤"),  # black without a selector
        ("😀\ufe0e", 0, "😀\ufe0e"),  # the selector of black signs
        ("東京 1 #", 0, "東京 1 #"),
    ],
)
def test_emoji_are_found(text: str, count: int, written: str, red_emoji: None) -> None:
    spaced, found = fonts.spaced(text)
    assert (spaced, len(found)) == (written, count)


@pytest.mark.parametrize("dpi", [100, 200])
def test_emoji_stand_at_their_labels(dpi: int, red_emoji: None) -> None:
    """Red pixels are where the labels of rows and columns are, and nowhere else."""
    figure = draw_maps([a_map(4)], ["ab 🚀", "b", "c", "d"])
    red = is_red(pixels_of(figure, dpi=dpi))
    panel = figure.axes[0]
    figure.set_dpi(dpi)
    figure.draw_without_rendering()
    expected = np.zeros_like(red)
    for text, is_upright in ((panel.get_yticklabels()[0], False), (panel.get_xticklabels()[0], True)):
        box, side = text.get_window_extent(), text.get_fontsize() / 72 * dpi
        x, y = (box.x0, box.y1 - side) if is_upright else (box.x1 - side, (box.y0 + box.y1 - side) / 2)
        left, top = round(x), round(red.shape[0] - y - side)
        place = (slice(max(top - 2, 0), round(top + side) + 3), slice(max(left - 2, 0), round(left + side) + 3))
        assert red[place].sum() > 0.8 * side**2
        expected[place] = True
    assert not (red & ~expected).any()


def test_emoji_in_titles_and_names(red_emoji: None) -> None:
    plain, drawn = ({name: torch.tensor([0.2, 0.8])} for name in ("m x", "m 🚀"))
    assert not is_red(pixels_of(draw_row(plain, ["a", "b"], token=0))).any()
    assert is_red(pixels_of(draw_row(drawn, ["a", "b"], token=0))).any()
    assert is_red(pixels_of(draw_maps({"🚀": a_map(2)}, ["a", "b"], title="b"))).any()
    assert is_red(pixels_of(draw_maps({"a": a_map(2)}, ["a", "b"], title="🚀"))).any()
    assert is_red(pixels_of(draw_maps({"a": a_map(2)}, ["a", "b"], label="🚀"))).any()


@pytest.mark.parametrize(("ending", "mark"), [("svg", b"<image"), ("pdf", b"/Subtype /Image")])
def test_emoji_in_vector_files(ending: str, mark: bytes, red_emoji: None, tmp_path: Path) -> None:
    counts = []
    for token in ("a", "🚀"):
        draw_maps([a_map(2)], [token, "b"]).savefig(tmp_path / f"map.{ending}")
        counts.append((tmp_path / f"map.{ending}").read_bytes().count(mark))
    assert counts[1] > counts[0]


def test_emoji_without_a_font(no_emoji_font: None) -> None:
    tokens = ["🚀", "🇩🇪", "👍🏽", "\U0001f9d1\u200d\U0001f680", "🏴\u200d☠\ufe0f"]
    labels = labels_of(draw_maps([a_map(5)], tokens))
    assert labels[0] in ("🚀", ":rocket:")
    assert labels[1] in ("🇩🇪", "DE")
    assert not any("fitzpatrick" in label for label in labels)
    assert max(map(len, labels)) <= 44


@pytest.mark.skipif(fonts.picture_of("🚀") is None, reason="the machine has no font of coloured emoji")
def test_emoji_of_the_system() -> None:
    """Signs of several characters are one picture, and what the font lacks is no picture."""
    assert len({fonts.picture_of(one).shape for one in ("🚀", "👩\u200d🚀", "🇩🇪", "👍🏽", "1\ufe0f\u20e3")}) == 1
    assert fonts.picture_of("\U0001faff") is None
    assert not np.array_equal(fonts.picture_of("👍🏽"), fonts.picture_of("👍"))


# From right to left


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("שלום", "םולש"),
        ("שלום 12", "12 םולש"),
        ("abc שלום 12", "abc םולש 12"),
        ("What לא שם draws", "What םש אל draws"),
        ("(א)", "(א)"),
        ("א(ב)", "(ב)א"),
        ("שָׁ", "שָׁ"),  # marks stay behind their letter
        (
            "مرحبا",
            "\ufe8e\ufe92\ufea3\ufeae\ufee3",
        ),  # the letter reh joins only the letter before it
        ("لا", "\ufefb"),  # lam and alef are one sign
        ("abc", "abc"),
        ("東京", "東京"),
    ],
)
def test_letters_from_left(text: str, expected: str) -> None:
    assert fonts.from_left(text) == expected


@pytest.mark.parametrize("draws", [True, False])
def test_order_is_left_to_matplotlib(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib 3.11 and later gets the text as it is read."""
    monkeypatch.setattr(fonts, "_DRAWS_LEFTWARDS", draws)
    assert labels_of(draw_maps([a_map(2)], ["שלום", "b"]))[0] == ("שלום" if draws else "םולש")


# Room


@pytest.mark.parametrize("place", [0, 1, 2])
def test_bold_and_wide_labels_have_room(place: int) -> None:
    """The label of the mark is bold. Labels of three levels do not overlap, and none is cut."""
    tokens = ["a", "bb", "ccc"] * 20
    tokens[place] = "A" * 20
    tokens[30 + place] = "WWWWWWWWWWWWWWWWW"
    figure = draw_maps([a_map(60)] * 2, tokens, token=30 + place, columns=2, size=(6, 8))
    figure.draw_without_rendering()
    for axis in (figure.axes[0].yaxis, figure.axes[0].xaxis):
        boxes = [text.get_window_extent() for text in axis.get_ticklabels()]
        assert len(boxes) == 60
        assert min(min(box.x0, box.y0) for box in boxes) >= 0
        assert not any(one.overlaps(other) for one, other in combinations([box.shrunk(1, 0.9) for box in boxes], 2))
    row = draw_row([torch.eye(60)[30]], tokens, token=30 + place)
    row.draw_without_rendering()
    assert min(text.get_window_extent().y0 for text in row.axes[0].get_xticklabels()) >= 0


@pytest.mark.parametrize("font", [5, 6, 7, 8])
@pytest.mark.parametrize("weight", ["normal", "bold"])
def test_widths_are_those_drawn(font: int, weight: str) -> None:
    """No text is wider than it was measured, with the pixels that figures of this font have, and with many."""
    for words in ("A" * 20, "W" * 20, "i" * 20, "the pictures", "東京"):
        for dpi in (150, 200, 1200):
            text = Figure(figsize=(4, 1), dpi=dpi).text(0, 0, words, fontsize=font, fontweight=weight)
            set_label(text)
            assert text.get_window_extent().width <= text_width(words, font, weight) * dpi * 1.01 + 1


def test_leaders_are_below_labels() -> None:
    """Lines to outer labels do not cover inner labels."""
    panel = draw_maps([a_map(60)] * 2, ["pgjq"] * 60, columns=2, size=(6, 8)).axes[0]
    panel.figure.draw_without_rendering()
    levels = len({round(text.get_window_extent().x1) for text in panel.get_yticklabels()})
    assert levels > 1
    for leaders in panel.collections:
        assert leaders.get_zorder() < panel.yaxis.get_zorder()
        assert len(leaders.get_segments()) == 60 - 60 // levels


@pytest.mark.parametrize(("layers", "heads", "count"), [(2, 12, 8), (33, 1, 5), (2, 4, 20)])
def test_titles_do_not_overlap(layers: int, heads: int, count: int) -> None:
    """The titles of twelve heads in a row fit their panels, and keep the numbers of layer and head."""
    figure = draw_maps([a_map(count).expand(heads, count, count)] * layers, ["a"] * count, heads=True, columns=12)
    figure.draw_without_rendering()
    titles = [panel.title for panel in figure.axes[: layers * heads]]
    assert [title.get_text().replace("\n", " ") for title in titles[:2]] == [
        "layer 0, head 0",
        "layer 0, head 1" if heads > 1 else "layer 1, head 0",
    ]
    boxes = [title.get_window_extent() for title in titles]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    assert boxes[0].y1 <= figure.bbox.height


def test_titles_are_cut_at_last() -> None:
    figure = draw_maps({"a" * 80: a_map(2), "b": a_map(2)}, ["a", "b"])
    title = figure.axes[0].get_title()
    assert title.startswith("aaa") and title.endswith("…")
    assert figure.axes[0].title.get_window_extent().width <= figure.axes[0].get_window_extent().width + 1


@pytest.mark.parametrize("label", ["share of the row", "share of the row of one token, which sums to 1"])
@pytest.mark.parametrize("own", [False, True])
def test_label_of_the_scale_has_room(label: str, own: bool) -> None:
    maps, rows = [a_map(2) / 2], [torch.tensor([0.2, 0.8])]
    for figure in (
        draw_maps(maps, ["a", "b"], label=label, scale="panel" if own else "shared"),
        draw_row(rows, ["a", "b"], label=label, scale="row" if own else "shared"),
        draw_row(rows, ["a", "b"], label=label, fig=Figure(figsize=(4, 2.5), dpi=150)),
    ):
        figure.draw_without_rendering()
        bar = figure.axes[-1]
        text = bar.xaxis.label if bar.get_xlabel() else bar.yaxis.label
        assert label in text.get_text().replace("\n", " ")
        box = text.get_window_extent()
        assert box.y0 >= 0 and box.y1 <= figure.bbox.height + 1 and box.x1 <= figure.bbox.width + 1


def test_faint_panels_name_their_largest_score() -> None:
    maps = {"one": a_map(2), "two": a_map(2) * 0.15}
    faint = draw_maps(maps, ["a", "b"], scale="shared")
    assert [panel.get_title() for panel in faint.axes[:2]] == ["one", "two (up to 0.15)"]
    assert draw_maps(maps, ["a", "b"], scale="root").axes[1].get_title() == "two"
    assert draw_maps({"zero": a_map(2) * 0}, ["a", "b"], vmax=1).axes[0].get_title() == "zero"


def test_labels_once_in_a_grid_of_axes() -> None:
    """Axes of a grid have labels at the left and lower edges, and axes without a grid have both."""
    own = Figure(figsize=(8, 6))
    panels = own.subplots(2, 2)
    draw_maps([a_map(2)] * 4, ["a", "b"], ax=panels)
    assert [bool(panel.get_xticklabels()) for panel in panels.flat] == [False, False, True, True]
    assert [bool(panel.get_yticklabels()) for panel in panels.flat] == [True, False, True, False]
    assert [panel.get_ylabel() for panel in panels.flat] == ["output token", "", "output token", ""]
    apart = [own.add_axes((0, 0, 0.2, 0.2)), own.add_axes((0.5, 0, 0.2, 0.2))]
    draw_maps([a_map(2)] * 2, ["a", "b"], ax=apart)
    assert all(panel.get_yticklabels() and panel.get_xticklabels() for panel in apart)


def test_names_of_axes_stand_at_their_labels() -> None:
    own = Figure(figsize=(6, 12))
    draw_maps([a_map(3)], ["a", "b", "c"], fig=own)
    own.draw_without_rendering()
    name = next(text for text in own.texts if text.get_text() == "source token")
    lowest = min(text.get_window_extent().y0 for text in own.axes[0].get_xticklabels())
    assert 0 < lowest - name.get_window_extent().y1 < 0.3 * own.dpi
