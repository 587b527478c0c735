"""Figures by their artists, records through Captum's own drawing, terminal text by its characters."""

import io
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from captum.attr import visualization
from matplotlib import colormaps, pyplot
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from captum_vz.visualization import draw_maps, terminal_text, text_record

TOKENS = ["[CLS]", "the", "cats", "[MASK]", "$x$", "[SEP]"]


def a_map(tokens: int = len(TOKENS)) -> Tensor:
    return torch.rand(tokens, tokens).softmax(-1)


def panels_of(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def named_axes(panel: Axes) -> list[Axis]:
    """Every panel names its columns, the first panel of a row its rows too."""
    return [panel.xaxis, panel.yaxis] if panel.get_subplotspec().is_first_col() else [panel.xaxis]


def test_a_panel_holds_its_map_and_names_its_tokens() -> None:
    maps = {"layer 0": a_map(), "layer 1": a_map()[None], "layer 2": a_map(), "rollout": a_map()}
    figure = draw_maps(maps, TOKENS)
    assert panels_of(figure) == list(maps)
    assert [len(named_axes(panel)) for panel in figure.axes[:4]] == [2, 1, 2, 1]
    for panel, one in zip(figure.axes, maps.values(), strict=False):
        (image,) = panel.get_images()
        np.testing.assert_array_equal(image.get_array(), one.reshape(len(TOKENS), -1).double().numpy())
        for axis in named_axes(panel):
            assert [text.get_text() for text in axis.get_ticklabels()] == TOKENS
            assert list(axis.get_ticklocs()) == list(range(len(TOKENS)))
            assert not any(text.get_parse_math() for text in axis.get_ticklabels())  # $x$ is a token, not a formula


def test_a_list_of_maps_is_titled_by_layers() -> None:
    assert panels_of(draw_maps([a_map(), a_map()], TOKENS)) == ["layer 0", "layer 1"]


def test_one_colour_scale_from_zero_to_the_largest_score_and_its_label() -> None:
    first, second = a_map(), a_map()
    second[3, 1] = 0.9
    figure = draw_maps([first, second], TOKENS, label="share of the row")
    for panel in figure.axes[:2]:
        assert panel.get_images()[0].get_clim() == pytest.approx((0, 0.9))
    assert figure.axes[-1].get_ylabel() == "share of the row"


def test_the_colours_darken_evenly_so_that_they_read_without_hue() -> None:
    image = draw_maps([a_map()], TOKENS).axes[0].get_images()[0]
    shades = colormaps[image.get_cmap().name](np.linspace(0, 1, 64))[:, :3] @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(shades) < 0).all()


@pytest.mark.parametrize("target", [3, -3])
def test_the_targets_row_is_marked_in_every_panel(target: int) -> None:
    figure = draw_maps([a_map(), a_map()], TOKENS, target)
    for panel in figure.axes[:2]:
        (mark,) = panel.patches
        assert (mark.get_xy(), mark.get_width(), mark.get_height()) == ((-0.5, 2.5), len(TOKENS), 1)
    names = figure.axes[0].get_yticklabels()
    assert [text.get_text() for text in names if text.get_fontweight() == "bold"] == ["[MASK]"]


def test_without_a_target_no_row_is_marked() -> None:
    assert not draw_maps([a_map()], TOKENS).axes[0].patches


@pytest.mark.parametrize("count", [*range(1, 14), 25, 33])
def test_every_map_has_a_place_whatever_their_number(count: int) -> None:
    figure = draw_maps([a_map(2)] * count, ["a", "b"])
    assert panels_of(figure) == [f"layer {index}" for index in range(count)]
    assert len(figure.axes) == count + 1  # the colour scale, and no empty panel


@pytest.mark.parametrize("count", [8, 30])
def test_names_are_neither_cut_off_nor_on_top_of_each_other(count: int) -> None:
    tokens = [f"word-{index}-of-some-length" for index in range(count)]
    figure = draw_maps([a_map(count)] * 5, tokens, target=4)
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * figure.dpi
    for panel in figure.axes[:5]:
        for axis in named_axes(panel):
            boxes = [text.get_window_extent() for text in axis.get_ticklabels()]
            assert len(boxes) == count
            assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes)
            assert not any(one.overlaps(other) for one, other in pairwise(boxes))


def test_of_very_many_tokens_some_are_named_and_the_target_always() -> None:
    tokens = [f"t{index}" for index in range(200)]
    figure = draw_maps([a_map(200)], tokens, target=101)
    figure.draw_without_rendering()
    labels = figure.axes[0].get_yticklabels()
    names = [text.get_text() for text in labels]
    assert "t101" in names
    assert 20 < len(names) < 200
    assert [tokens[int(tick)] for tick in figure.axes[0].get_yticks()] == names
    boxes = [text.get_window_extent() for text in labels]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))


def test_a_long_name_is_shortened() -> None:
    labels = draw_maps([a_map(2)], ["a" * 50, "b"]).axes[0].get_yticklabels()
    assert labels[0].get_text() == "a" * 19 + "…"


def test_names_are_of_one_line_and_titles_no_formulas() -> None:
    panel = draw_maps({"$x": a_map(2)}, ["a\nb", "$b$"]).axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a\\nb", "$b$"]
    assert not panel.title.get_parse_math()


def test_the_picture_is_drawn_and_pyplot_knows_nothing_of_it() -> None:
    before = pyplot.get_fignums()
    one = torch.zeros(2, 2)
    one[0, 0] = 1
    file = io.BytesIO()
    figure = draw_maps([one], ["a", "b"])
    figure.savefig(file, format="png")
    assert pyplot.get_fignums() == before
    pixels = np.asarray(Image.open(file).convert("RGB"))
    for x, y, share in [(0, 0, 1.0), (1, 1, 0.0)]:
        across, down = figure.axes[0].transData.transform((x, y)).round().astype(int)
        expected = np.array(to_rgb(colormaps["Blues"](share))) * 255
        np.testing.assert_allclose(pixels[len(pixels) - down, across], expected, atol=1.5)


def test_maps_that_are_all_zero_are_drawn_white() -> None:
    assert draw_maps([torch.zeros(2, 2)], ["a", "b"]).axes[0].get_images()[0].get_clim() == (0, 1)


@pytest.mark.parametrize(
    ("maps", "tokens", "target", "message"),
    [
        ([], ["a"], None, "at least one map, got none"),
        ([a_map(3)], ["a", "b"], None, r"for the 2 tokens, got \(3, 3\)"),
        ([a_map(2).expand(4, 2, 2)], ["a", "b"], None, r"a batch \(4, 2, 2\): pass one example"),
        ([a_map(2).numpy()], ["a", "b"], None, "got ndarray"),
        ([-a_map(2)], ["a", "b"], None, "begins at 0"),
        ([a_map(2) / 0], ["a", "b"], None, "not finite"),
        ([a_map(2)], ["a", "b"], 2, "target 2 is out of range: there are 2 tokens, positions -2 to 1"),
    ],
)
def test_what_cannot_be_drawn_says_why(maps: list[Tensor], tokens: list[str], target: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        draw_maps(maps, tokens, target)


def drawn_by_captum(record: visualization.VisualizationDataRecord) -> str:
    return str(visualization.visualize_text([record], legend=False).data)


def test_captum_draws_a_record_with_the_largest_score_darkest() -> None:
    html = drawn_by_captum(text_record(["a", "b", "c"], torch.tensor([[0.02, -0.04, 0.01]]), attr_class="by us"))
    colours = re.findall(r"hsl\((\d+), 75%, (\d+)%\)", html)
    assert colours == [("120", "75"), ("0", "60"), ("120", "88")]  # Captum's: 100 - 50 s above zero, 100 + 40 s below
    assert re.findall(r"<b>(.*?)</b>", html) == ["", " (0.00)", "by us", "-0.01"]


def test_captum_draws_what_the_model_says_beside_it() -> None:
    record = text_record(["a"], torch.ones(1), true_class="are", pred_class="is", pred_prob=0.75)
    assert re.findall(r"<b>(.*?)</b>", drawn_by_captum(record))[:2] == ["are", "is (0.75)"]


def test_tokens_that_html_would_take_for_its_own_are_drawn_as_they_are() -> None:
    html = drawn_by_captum(text_record(["<mask>", "<", "&"], torch.ones(3)))
    words = re.findall(r'<font color="black"> (.*?)\s*</font>', html)
    assert words == ["&lt;mask&gt;", "&lt;", "&amp;"]


def test_a_row_of_zeros_stays_without_colour() -> None:
    assert text_record(["a", "b"], torch.zeros(2)).word_attributions.tolist() == [0, 0]


def test_a_record_of_the_wrong_scores_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"scores \(tokens,\) or \(1, tokens\) for the 2 tokens, got \(3,\)"):
        text_record(["a", "b"], torch.ones(3))
    with pytest.raises(AssertionError, match=r"a batch \(2, 2\)"):
        text_record(["a", "b"], torch.ones(2, 2))


ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def test_each_line_holds_position_token_score_and_a_bar_of_its_length() -> None:
    scores = torch.tensor([0.5, 0.25, 0.125, 0.125])
    lines = terminal_text(["one", "two", "three", "four"], scores, color=False).split("\n")
    words = [line.split() for line in lines]
    assert [line[:3] for line in words] == [
        ["0", "one", "0.5000"],
        ["1", "two", "0.2500"],
        ["2", "three", "0.1250"],
        ["3", "four", "0.1250"],
    ]
    assert [len(line[3]) for line in words] == [24, 12, 6, 6]
    assert len({line.index("0.") for line in lines}) == 1  # the scores stand below each other


@pytest.mark.parametrize("target", [1, -2])
def test_the_target_is_marked(target: int) -> None:
    lines = terminal_text(["a", "b", "c"], torch.ones(3), target, color=False).split("\n")
    assert [line[0] for line in lines] == [" ", ">", " "]


def test_colour_adds_nothing_but_colour() -> None:
    scores = torch.tensor([0.1, 0.6, 0.3])
    plain, coloured = (terminal_text(["a", "b", "c"], scores, 1, color) for color in (False, True))
    assert "\x1b" not in plain
    assert ESCAPE.sub("", coloured).split() == plain.split()
    assert coloured.count("\x1b[0m") == 3  # every colour ends where its token does


def test_the_larger_the_score_the_darker_the_colour_and_the_ink_stands_out() -> None:
    def light(index: str) -> float:
        steps = (0, 95, 135, 175, 215, 255)  # the cube of 6 x 6 x 6 colours that begins at 16
        red, green, blue = (steps[(int(index) - 16) // power % 6] / 255 for power in (36, 6, 1))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    text = terminal_text(["x"] * 7, torch.arange(7.0))
    shades = [(light(back), light(ink)) for back, ink in re.findall(r"48;5;(\d+);38;5;(\d+)m", text)]
    backs = [back for back, _ in shades]
    assert len(shades) == 7
    assert backs == sorted(backs, reverse=True)
    assert len(set(backs)) == 7
    for back, ink in shades:  # the contrast that WCAG 2 asks of text
        assert (max(back, ink) + 0.05) / (min(back, ink) + 0.05) >= 4.5


def test_a_token_cannot_command_the_terminal() -> None:
    text = terminal_text(["\x1b[2J", "a\nb"], torch.ones(2), color=False)
    assert text.count("\n") == 1
    assert r"\x1b[2J" in text
    assert r"a\nb" in text


def test_terminal_text_refuses_negative_scores() -> None:
    with pytest.raises(AssertionError, match=r"lowest score is -1: expected none below 0"):
        terminal_text(["a"], torch.tensor([-1.0]))
