"""Figures of maps, tested by their artists: what is drawn is computed a second time here, by loops or by hand."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps, pyplot
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization import describe, draw_maps
from tests.visualization import labels_of

TOKENS = ["[CLS]", "the", "cats", "[MASK]", "$x$", "[SEP]"]
PIECES = ["[CLS]", "the", "scar", "##ing", "hat", "[SEP]"]
WORDS = ["[CLS]", "the", "scaring", "hat", "[SEP]"]


def a_map(high: int, wide: int | None = None) -> Tensor:
    return torch.randn(high, wide or high).mul(2).softmax(-1)


def drawn(figure: Figure, panel: int = 0) -> Tensor:
    return torch.as_tensor(np.asarray(figure.axes[panel].images[0].get_array()))


def end_of(figure: Figure, panel: int = 0) -> tuple[float, float]:
    norm = figure.axes[panel].images[0].norm
    return float(norm.vmin), float(norm.vmax)


def test_panel_holds_map_and_labels() -> None:
    maps = {"layer 0": a_map(6), "layer 1": a_map(6)[None], "layer 2": a_map(6), "rollout": a_map(6)}
    figure = draw_maps(maps, TOKENS)
    assert [panel.get_title().split(" (to")[0] for panel in figure.axes[:4]] == list(maps)
    labelled = [[one for one in (panel.xaxis, panel.yaxis) if one.get_ticklabels()] for panel in figure.axes[:4]]
    assert [len(one) for one in labelled] == [1, 0, 2, 1]  # the left and the lower edge
    for panel, axes, scores in zip(figure.axes, labelled, maps.values(), strict=False):
        (image,) = panel.get_images()
        np.testing.assert_array_equal(image.get_array(), scores.reshape(len(TOKENS), -1).double().numpy())
        for axis in axes:
            assert [text.get_text() for text in axis.get_ticklabels()] == TOKENS
            assert list(axis.get_ticklocs()) == list(range(len(TOKENS)))
            assert not any(text.get_parse_math() for text in axis.get_ticklabels())  # $x$ is a token, not a formula


@pytest.mark.parametrize("token", [3, -3])
def test_token_row_is_marked(token: int) -> None:
    figure = draw_maps([a_map(6), a_map(6)], TOKENS, token)
    for panel in figure.axes[:2]:
        (mark,) = panel.patches
        assert (mark.get_xy(), mark.get_width(), mark.get_height()) == ((-0.5, 2.5), len(TOKENS), 1)
    names = figure.axes[0].get_yticklabels()
    assert [text.get_text() for text in names if text.get_fontweight() == "bold"] == ["[MASK]"]


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


def test_shares_have_the_root_scale() -> None:
    """Rows of shares sum to at most 1. Distances, amounts and differences have even steps, unless it is asked for."""
    shares = a_map(3)
    asked = draw_maps([shares - 0.5], list("abc"), scale="root", vmax=1).axes[0].images[0].norm
    assert [float(asked(value)) for value in (-1, -0.25, 0, 0.25, 1)] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    for scores, half in [(shares, 0.25), (shares * 0.5, 0.25), (shares + 1, 0.5), (torch.eye(3) * 2, 0.5)]:
        norm = draw_maps([scores], list("abc")).axes[0].images[0].norm
        assert float(norm(half * norm.vmax)) == pytest.approx(0.5)
    signed = draw_maps([shares - 0.1], list("abc")).axes[0].images[0].norm
    assert float(signed(signed.vmax / 2)) == pytest.approx(0.75)


def test_rollout_has_its_own_end() -> None:
    maps = {"layer 0": torch.eye(2) * 0.8, "layer 1": torch.eye(2), "Rollout": torch.full((2, 2), 0.02)}
    figure = draw_maps(maps, ["x", "y"])
    assert [end_of(figure, panel)[1] for panel in range(3)] == pytest.approx([1, 1, 0.02])
    assert [panel.get_title() for panel in figure.axes[:3]] == ["layer 0", "layer 1", "Rollout (to 0.02)"]
    bar = figure.axes[-1]
    assert max(*bar.get_xlim(), *bar.get_ylim()) == pytest.approx(1)  # the scale of the layers
    figure = draw_maps(maps, ["x", "y"], scale="panel")
    assert [panel.get_title() for panel in figure.axes[:2]] == ["layer 0 (to 0.8)", "layer 1 (to 1)"]
    assert "largest of the panel" in figure.axes[-1].get_ylabel()
    for options in ({"vmax": 1}, {"scale": "shared"}, {"scale": "root"}):
        figure = draw_maps(maps, ["x", "y"], **options)
        assert end_of(figure, 2)[1] == 1
    assert draw_maps({"rollout": maps["Rollout"]}, ["x", "y"]).axes[0].get_title() == "rollout"


@pytest.mark.parametrize("scores", [torch.eye(2) * 0.3, torch.tensor([[0.5, -0.25], [0.0, 0.1]])])
def test_zero_is_white(scores: Tensor) -> None:
    image = draw_maps([scores], ["a", "b"]).axes[0].images[0]
    assert image.cmap(image.norm(0.0)) == (1, 1, 1, 1)
    assert image.cmap(image.norm(0.02))[:3] != (1, 1, 1)
    if bool((scores < 0).any()):  # the middle of the scale is zero, blue above it and red below
        assert (image.norm.vmin, image.norm.vmax) == (-0.5, 0.5)
        (red, _, blue), (more_red, _, less_blue) = (image.cmap(image.norm(end))[:3] for end in (0.5, -0.5))
        assert blue > red and more_red > less_blue


@pytest.mark.parametrize("end", [1.0, 0.0187])
def test_root_has_round_numbers(end: float) -> None:
    scores = torch.linspace(0, end, 64).view(8, 8)
    figure = draw_maps([scores] * 4, list("abcdefgh"), scale="root", vmax=end)
    bar = figure.axes[-1]
    ticks, names = bar.get_yticks().tolist(), [float(one.get_text()) for one in bar.get_yticklabels()]
    assert len(ticks) == 6 and ticks[0] == 0 and ticks[-1] == pytest.approx(end)
    assert names == pytest.approx(ticks, rel=0.02)
    written = [f"{tick:.3e}" for tick in ticks[1:-1]]
    assert all(one[1:5] == ".000" or one.startswith("1.500") for one in written)


# Tokens


def by_loops(scores: Tensor, groups: list[list[int]]) -> Tensor:
    found = torch.zeros(len(groups), len(groups), dtype=torch.float64)
    for i, rows in enumerate(groups):
        for j, columns in enumerate(groups):
            found[i, j] = sum(scores[a, b].double() for a in rows for b in columns) / len(rows)
    return found


@pytest.mark.parametrize("words", [True, [None, 0, 1, 1, 2, None]])
def test_pieces_become_words(words: Any) -> None:
    scores = a_map(6)
    figure = draw_maps([scores], PIECES, token=3, words=words)
    expected = by_loops(scores, [[0], [1], [2, 3], [4], [5]])
    torch.testing.assert_close(drawn(figure), expected)
    torch.testing.assert_close(drawn(figure).sum(1), torch.ones(5, dtype=torch.float64))
    assert labels_of(figure) == WORDS
    (mark,) = figure.axes[0].patches
    assert mark.get_xy() == (-0.5, 1.5)  # the word of piece 3


def test_special_and_dimmed_tokens() -> None:
    scores = a_map(6)
    figure = draw_maps([scores], PIECES, token=-2, drop="special")
    torch.testing.assert_close(drawn(figure), scores[1:5, 1:5].double())
    assert labels_of(figure) == [text.get_text() for text in figure.axes[0].get_xticklabels()] == PIECES[1:5]
    torch.testing.assert_close(drawn(draw_maps([scores], PIECES, drop=[0, -1])), drawn(figure))
    scores = torch.full((6, 6), 0.1)
    scores[:, 0] = 0.9
    figure = draw_maps([scores], PIECES, dim="special")
    assert end_of(figure) == pytest.approx((0, 0.1))
    assert [patch.get_alpha() for patch in figure.axes[0].patches] == [0.7] * 4  # two rows and two columns are pale
    grey = [text.get_text() for text in figure.axes[0].get_yticklabels() if text.get_color() == "0.55"]
    assert grey == ["[CLS]", "[SEP]"]


def test_cross_maps_are_rectangular() -> None:
    scores, sources, outputs = a_map(3, 5), ["a", "b", "c", "d", "</s>"], ["x", "y", "</s>"]
    figure = draw_maps([scores], sources, token=1, out_tokens=outputs)
    torch.testing.assert_close(drawn(figure), scores.double())
    assert labels_of(figure) == outputs
    assert figure.axes[0].patches[0].get_xy() == (-0.5, 0.5)
    fewer = draw_maps([scores], sources, out_tokens=outputs, drop="special")
    torch.testing.assert_close(drawn(fewer), scores[:2, :4].double())
    pair = draw_maps([scores], sources, out_tokens=outputs, words=([0, 0, 1, 2, 3], [0, 0, 1]))
    torch.testing.assert_close(drawn(pair)[0, 0], scores[:2, :2].sum().double() / 2)
    with pytest.raises(ArgumentError, match="pass a pair"):
        draw_maps([scores], sources, out_tokens=outputs, words=[0, 0, 1])
    with pytest.raises(ArgumentError, match="and 3 source tokens"):
        draw_maps([scores], outputs, out_tokens=sources)


def test_heads_are_panels() -> None:
    scores = torch.rand(2, 3, 3)
    figure = draw_maps([scores, scores[None] + 1], list("abc"), heads=True)
    titles = [panel.get_title() for panel in figure.axes[:4]]
    assert titles == ["layer 0, head 0", "layer 0, head 1", "layer 1, head 0", "layer 1, head 1"]
    torch.testing.assert_close(drawn(figure, 3), scores[1].double() + 1)


def test_differences_of_two_texts() -> None:
    one, other = a_map(3), a_map(3)
    figure = draw_maps([one], ["the", "cat", "is"], 2, minus=([other], ["the", "cats", "is"]))
    torch.testing.assert_close(drawn(figure), one.double() - other.double())
    assert labels_of(figure) == ["the", "cat / cats", "is"]
    assert figure.axes[0].patches[0].get_xy() == (-0.5, 1.5)
    low, high = end_of(figure)
    assert low == -high
    one, other = a_map(3), a_map(4)
    figure = draw_maps([one], ["it", "is", "."], minus=([other], ["it", "was", "not", "."]))
    expected = by_loops(one, [[0], [1], [2]]) - by_loops(other, [[0], [1, 2], [3]])
    torch.testing.assert_close(drawn(figure), expected)
    assert labels_of(figure) == ["it", "is / was not", "."]
    # Long tokens of both texts can be read.
    figure = draw_maps([a_map(1)], ["unbelievable"], label="share", minus=([a_map(1)], ["indescribable"]))
    assert labels_of(figure) == ["unbelievable / indescribable"]
    assert figure.axes[-1].get_ylabel() == "share, first text minus second"
    assert "difference of two maps" in describe(figure).text
    figure = draw_maps([a_map(1)], ["a" * 30], minus=([a_map(1)], ["b" * 30]))
    assert labels_of(figure) == [f"{'a' * 13}… / {'b' * 13}…"]
