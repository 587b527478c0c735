"""Figures of maps are tested by their artists."""

import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib import colormaps, pyplot
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization import draw_maps

TOKENS = ["[CLS]", "the", "cats", "[MASK]", "$x$", "[SEP]"]


def a_map(tokens: int = len(TOKENS)) -> Tensor:
    return torch.rand(tokens, tokens).softmax(-1)


def panels_of(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def labelled_axes(panel: Axes) -> list[Axis]:
    """The axes with labels."""
    return [axis for axis in (panel.xaxis, panel.yaxis) if axis.get_ticklabels()]


def test_panel_holds_map_and_labels() -> None:
    maps = {"layer 0": a_map(), "layer 1": a_map()[None], "layer 2": a_map(), "rollout": a_map()}
    figure = draw_maps(maps, TOKENS)
    assert [title.split(" (to")[0] for title in panels_of(figure)] == list(maps)
    assert [len(labelled_axes(panel)) for panel in figure.axes[:4]] == [1, 0, 2, 1]  # the left and the lower edge
    for panel, scores in zip(figure.axes, maps.values(), strict=False):
        (image,) = panel.get_images()
        np.testing.assert_array_equal(image.get_array(), scores.reshape(len(TOKENS), -1).double().numpy())
        for axis in labelled_axes(panel):
            assert [text.get_text() for text in axis.get_ticklabels()] == TOKENS
            assert list(axis.get_ticklocs()) == list(range(len(TOKENS)))
            assert not any(text.get_parse_math() for text in axis.get_ticklabels())  # $x$ is a token, not a formula


def test_panels_share_colour_scale() -> None:
    first, second = a_map(), a_map()
    second[3, 1] = 0.9
    figure = draw_maps([first, second], TOKENS, label="share of the row")
    for panel in figure.axes[:2]:
        assert panel.get_images()[0].get_clim() == pytest.approx((0, 0.9))
    assert figure.axes[-1].get_ylabel() == "share of the row"


def test_colours_darken_with_score() -> None:
    image = draw_maps([a_map()], TOKENS).axes[0].get_images()[0]
    shades = image.get_cmap()(np.linspace(0, 1, 64))[:, :3] @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(shades) < 0).all()


@pytest.mark.parametrize("token", [3, -3])
def test_token_row_is_marked(token: int) -> None:
    figure = draw_maps([a_map(), a_map()], TOKENS, token)
    for panel in figure.axes[:2]:
        (mark,) = panel.patches
        assert (mark.get_xy(), mark.get_width(), mark.get_height()) == ((-0.5, 2.5), len(TOKENS), 1)
    names = figure.axes[0].get_yticklabels()
    assert [text.get_text() for text in names if text.get_fontweight() == "bold"] == ["[MASK]"]


@pytest.mark.parametrize("count", [*range(1, 9), 13, 33])
def test_any_number_of_panels(count: int) -> None:
    figure = draw_maps([a_map(2)] * count, ["a", "b"])
    assert not figure.axes[0].patches  # no row is marked
    assert panels_of(figure) == [f"layer {index}" for index in range(count)]
    assert len(figure.axes) == count + 1  # the panels and the colour scale


def test_labels_of_many_tokens() -> None:
    tokens = [f"t{index}" for index in range(500)]
    figure = draw_maps([a_map(500)], tokens, token=101)
    figure.draw_without_rendering()
    labels = figure.axes[0].get_yticklabels()
    names = [text.get_text() for text in labels]
    assert "t101" in names
    assert 40 < len(names) < 500
    assert [tokens[int(tick)] for tick in figure.axes[0].get_yticks()] == names
    boxes = [text.get_window_extent() for text in labels]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))


def test_long_label_is_shortened() -> None:
    labels = draw_maps([a_map(2)], ["a" * 50, "b"]).axes[0].get_yticklabels()
    assert labels[0].get_text() == "a" * 19 + "…"


def test_labels_and_titles_are_escaped() -> None:
    panel = draw_maps({"$x": a_map(2)}, ["a\nb", "$b$"]).axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a\\nb", "$b$"]
    assert not panel.title.get_parse_math()


def test_figure_is_drawn_without_pyplot() -> None:
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
        expected = np.array(to_rgb(colormaps["Blues"](share) if share else "white")) * 255
        np.testing.assert_allclose(pixels[len(pixels) - down, across], expected, atol=1.5)


def test_zero_maps_are_drawn_white() -> None:
    assert draw_maps([torch.zeros(2, 2)], ["a", "b"]).axes[0].get_images()[0].get_clim() == (0, 1)


@pytest.mark.parametrize(
    ("maps", "tokens", "token", "message"),
    [
        ([], ["a"], None, "at least one map, got none"),
        ([a_map(3)], ["a", "b"], None, r"for the 2 tokens, got \(3, 3\)"),
        (
            [a_map(2).expand(4, 2, 2)],
            ["a", "b"],
            None,
            r"a batch \(4, 2, 2\): pass one example of it, such as scores\[0\], or heads=True",
        ),
        ([a_map(2).numpy()], ["a", "b"], None, "got ndarray"),
        ([a_map(2) / 0], ["a", "b"], None, "got NaN or infinity"),
        ([a_map(2)], ["a", "b"], 2, "token 2 is out of range: there are 2 tokens, so pass a position from -2 to 1"),
    ],
)
def test_draw_maps_of_wrong_arguments(maps: list[Tensor], tokens: list[str], token: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        draw_maps(maps, tokens, token)
