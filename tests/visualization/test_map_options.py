"""The options of `draw_maps`: what is drawn is computed a second time here, by loops or by hand."""

import io
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization import describe, draw_maps
from tests.engine.parameters import sampled

PIECES = ["[CLS]", "the", "scar", "##ing", "hat", "[SEP]"]
WORDS = ["[CLS]", "the", "scaring", "hat", "[SEP]"]


def a_map(high: int, wide: int | None = None) -> Tensor:
    return torch.randn(high, wide or high).mul(2).softmax(-1)


def drawn(figure: Figure, panel: int = 0) -> Tensor:
    return torch.as_tensor(np.asarray(figure.axes[panel].images[0].get_array()))


def row_labels(figure: Figure, panel: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[panel].get_yticklabels()]


def column_labels(figure: Figure, panel: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[panel].get_xticklabels()]


def end_of(figure: Figure, panel: int = 0) -> tuple[float, float]:
    norm = figure.axes[panel].images[0].norm
    return float(norm.vmin), float(norm.vmax)


def sentence(count: int) -> list[str]:
    words = ["[CLS]", "the", "pictures", "of", "some", "hat", "[MASK]", "scaring", "marcus", "."]
    return [*(words * (count // len(words) + 1))[: count - 1], "[SEP]"]


# Sizes


@pytest.mark.slow
@pytest.mark.parametrize("ending", sampled(["png", "svg", "pdf"], "pdf"))
def test_twelve_layers_are_fast(ending: str) -> None:
    """Twice the layers take at most twice the calls of functions, and two million of these take about a second."""
    calls = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[-1] += event == "call"

    draw_maps([a_map(60)], sentence(60)).savefig(io.BytesIO(), format=ending)  # fonts are found once
    for layers in (6, 12):
        calls.append(0)
        sys.setprofile(count)
        try:
            draw_maps([a_map(60)] * layers, sentence(60), token=6).savefig(io.BytesIO(), format=ending)
        finally:
            sys.setprofile(None)
    assert calls[1] < 2 * calls[0] < 8_000_000


def test_columns_are_taken() -> None:
    figure = draw_maps([a_map(4)] * 5, list("abcd"), columns=2)
    lefts = {round(panel.get_position().x0, 4) for panel in figure.axes[:5]}
    assert len(lefts) == 2
    with pytest.raises(ArgumentError, match="columns is 0"):
        draw_maps([a_map(2)], ["a", "b"], columns=0)


# Where


def test_axes_are_drawn_into() -> None:
    own = Figure(figsize=(8, 4))
    panels = own.subplots(1, 2)
    maps = [a_map(3), a_map(3)]
    assert draw_maps(maps, list("abc"), ax=panels) is own
    for panel, scores in zip(panels, maps, strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), scores.double())
        assert [text.get_text() for text in panel.get_xticklabels()] == list("abc")
    assert draw_maps(maps, list("abc"), ax=panels.flat) is own
    single = own.add_axes((0, 0, 0.1, 0.1))
    assert draw_maps(maps[:1], list("abc"), ax=single) is own


def test_figures_are_drawn_into() -> None:
    own = Figure(figsize=(10, 5))
    left, right = own.subfigures(1, 2)
    assert draw_maps([a_map(3)] * 2, list("abc"), fig=right) is right
    assert not left.axes
    box = [panel.get_window_extent() for panel in right.axes]
    assert all(one.x0 >= own.bbox.width / 2 for one in box)
    # Two panels of 3 by 3 cells are stacked in the place of 5 by 5 inches, and fill its height.
    assert box[0].x0 == box[1].x0 and box[0].height + box[1].height > own.bbox.height * 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ax": Figure().subplots(), "fig": Figure()}, "ax and fig are both given"),
        ({"ax": Figure().subplots()}, "ax holds 1 axes, but there are 2 panels"),
        ({"ax": 3}, "ax is of type int"),
        ({"ax": "ab"}, "ax is of type str"),
        ({"fig": "here"}, "fig is of type str"),
    ],
)
def test_wrong_places(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        draw_maps([a_map(2)] * 2, ["a", "b"], **options)


# Scales


def test_given_end_makes_figures_comparable() -> None:
    one, two = a_map(3) * 0.5, a_map(3)
    ends = {end_of(draw_maps([scores], list("abc"), vmax=1)) for scores in (one, two)}
    assert ends == {(0, 1)}
    norm = draw_maps([one], list("abc"), scale="shared", vmax=1).axes[0].images[0].norm
    assert float(norm(0.25)) == pytest.approx(0.25)


def test_each_panel_has_its_end() -> None:
    small = torch.full((2, 2), 0.01)
    figure = draw_maps({"a": torch.eye(2), "b": small}, ["x", "y"], scale="panel")
    assert [end_of(figure, panel)[1] for panel in (0, 1)] == pytest.approx([1, 0.01])
    assert [panel.get_title() for panel in figure.axes[:2]] == ["a (to 1)", "b (to 0.01)"]
    assert "largest of the panel" in figure.axes[-1].get_ylabel()


def test_root_shows_small_scores() -> None:
    """A rollout of 60 tokens has shares of about 1/60, which are nearly white on a scale to 1."""
    norm = draw_maps([torch.eye(2)], ["x", "y"], scale="root").axes[0].images[0].norm
    assert float(norm(0.01)) == pytest.approx(0.1)
    assert float(norm(0.25)) == pytest.approx(0.5)
    signed = draw_maps([torch.tensor([[1.0, -0.25]]).expand(2, 2)], ["x", "y"], scale="root").axes[0].images[0].norm
    assert [float(signed(value)) for value in (-1, -0.25, 0, 0.25, 1)] == pytest.approx([0, 0.25, 0.5, 0.75, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "log"}, "scale is 'log': pass one of 'shared', 'panel', 'root'"),
        ({"vmax": 0}, "vmax is 0"),
        ({"vmax": float("nan")}, "vmax is nan"),
        ({"vmax": 1, "scale": "panel"}, "pass a positive number with 'shared' or 'root'"),
    ],
)
def test_wrong_scales(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        draw_maps([a_map(2)], ["a", "b"], **options)


def test_shares_have_the_root_scale() -> None:
    """Rows of shares sum to at most 1. Distances, amounts and differences have even steps."""
    shares = a_map(3)
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


@pytest.mark.parametrize("token", [0, 2])
def test_frame_is_above_that_of_the_panel(token: int) -> None:
    """The frame of the first and of the last row is neither cut nor covered by the frame of the panel."""
    panel = draw_maps([a_map(3)], list("abc"), token).axes[0]
    (mark,) = panel.patches
    assert not mark.get_clip_on()
    assert mark.get_zorder() > max(spine.get_zorder() for spine in panel.spines.values())


@pytest.mark.parametrize("end", [1.0, 0.93, 0.0187])
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
    assert row_labels(figure) == WORDS
    (mark,) = figure.axes[0].patches
    assert mark.get_xy() == (-0.5, 1.5)  # the word of piece 3


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<s>", "Ġthe", "Ġscar", "ing", "</s>"], ["<s>", "the", "scaring", "</s>"]),
        (["▁Ich", "▁geh", "e"], ["Ich", "gehe"]),
        (["Either", "Ġyou", "Ġwin"], ["Either", "you", "win"]),
        (["a", "b"], ["a", "b"]),
    ],
)
def test_marks_of_words(tokens: list[str], expected: list[str]) -> None:
    assert row_labels(draw_maps([a_map(len(tokens))], tokens, words=True)) == expected


def test_marks_for_spaces_are_not_written() -> None:
    """Labels are those of the view: bytes are read as the characters that they form, and a space alone has a sign."""
    tokens = ["The", "\u0120caf\u00c3\u00a9", "\u0120", "\u010a", "##s"]
    figure = draw_maps([a_map(5)], tokens, token=1)
    assert row_labels(figure) == ["The", "café", "␣", r"\n", "##s"]
    assert "the row of café has" in describe(figure).text


def test_wrong_words() -> None:
    with pytest.raises(ArgumentError, match="words has 2 entries for 6 tokens"):
        draw_maps([a_map(6)], PIECES, words=[0, 1])


def test_special_tokens_are_dropped() -> None:
    scores = a_map(6)
    figure = draw_maps([scores], PIECES, token=-2, drop="special")
    torch.testing.assert_close(drawn(figure), scores[1:5, 1:5].double())
    assert row_labels(figure) == column_labels(figure) == PIECES[1:5]
    torch.testing.assert_close(drawn(draw_maps([scores], PIECES, drop=[0, -1])), drawn(figure))
    with pytest.raises(ArgumentError, match=r"token 0 \(\[CLS\]\) is marked and left out"):
        draw_maps([scores], PIECES, token=0, drop="special")
    with pytest.raises(ArgumentError, match="drop leaves out all tokens"):
        draw_maps([a_map(1)], ["[CLS]"], drop="special")
    with pytest.raises(ArgumentError, match="dim is 'stop': pass 'special', or positions"):
        draw_maps([scores], PIECES, dim="stop")


def test_dimmed_tokens_do_not_count() -> None:
    scores = torch.full((6, 6), 0.1)
    scores[:, 0] = 0.9
    figure = draw_maps([scores], PIECES, dim="special")
    assert end_of(figure) == pytest.approx((0, 0.1))
    assert [patch.get_alpha() for patch in figure.axes[0].patches] == [0.7] * 4  # two rows and two columns are pale
    grey = [text.get_text() for text in figure.axes[0].get_yticklabels() if text.get_color() == "0.55"]
    assert grey == ["[CLS]", "[SEP]"]


def test_mask_is_no_special_token() -> None:
    tokens = ["[CLS]", "[MASK]", "<mask>", "[UNK]", "<unk>", "</s>", "<|endoftext|>", "[PAD]"]
    assert row_labels(draw_maps([a_map(8)], tokens, drop="special")) == ["[MASK]", "<mask>", "[UNK]", "<unk>"]


def test_cross_maps_are_rectangular() -> None:
    scores, sources, outputs = a_map(3, 5), ["a", "b", "c", "d", "</s>"], ["x", "y", "</s>"]
    figure = draw_maps([scores], sources, token=1, out_tokens=outputs)
    torch.testing.assert_close(drawn(figure), scores.double())
    assert (row_labels(figure), column_labels(figure)) == (outputs, sources)
    assert figure.axes[0].patches[0].get_xy() == (-0.5, 0.5)
    torch.testing.assert_close(
        drawn(draw_maps([scores], sources, out_tokens=outputs, drop="special")), scores[:2, :4].double()
    )
    with pytest.raises(ArgumentError, match=r"for 5 output tokens and 3 source tokens, got \(3, 5\)"):
        draw_maps([scores], outputs, out_tokens=sources)


def test_words_of_cross_maps() -> None:
    scores = a_map(2, 3)
    figure = draw_maps([scores], ["a", "##b", "c"], out_tokens=["x", "##y"], words=True)
    torch.testing.assert_close(drawn(figure)[0, 0], scores[:, :2].sum().double() / 2)
    pair = draw_maps([scores], ["a", "b", "c"], out_tokens=["x", "y"], words=([0, 0, 1], [0, 0]))
    torch.testing.assert_close(drawn(pair), drawn(figure))
    with pytest.raises(ArgumentError, match="pass a pair"):
        draw_maps([scores], ["a", "b", "c"], out_tokens=["x", "y"], words=[0, 0, 1])


def test_heads_are_panels() -> None:
    scores = torch.rand(2, 3, 3)
    figure = draw_maps([scores, scores[None] + 1], list("abc"), heads=True)
    titles = [panel.get_title() for panel in figure.axes[:4]]
    assert titles == ["layer 0, head 0", "layer 0, head 1", "layer 1, head 0", "layer 1, head 1"]
    torch.testing.assert_close(drawn(figure, 3), scores[1].double() + 1)


# Differences


def test_difference_of_a_minimal_pair() -> None:
    one, other = a_map(3), a_map(3)
    figure = draw_maps([one], ["the", "cat", "is"], 2, minus=([other], ["the", "cats", "is"]))
    torch.testing.assert_close(drawn(figure), one.double() - other.double())
    assert row_labels(figure) == ["the", "cat / cats", "is"]
    assert figure.axes[0].patches[0].get_xy() == (-0.5, 1.5)
    low, high = end_of(figure)
    assert low == -high


def test_difference_of_different_lengths() -> None:
    one, other = a_map(3), a_map(4)
    figure = draw_maps([one], ["it", "is", "."], minus=([other], ["it", "was", "not", "."]))
    expected = by_loops(one, [[0], [1], [2]]) - by_loops(other, [[0], [1, 2], [3]])
    torch.testing.assert_close(drawn(figure), expected)
    assert row_labels(figure) == ["it", "is / was not", "."]


def test_differences_say_what_is_subtracted() -> None:
    """Long tokens of both texts can be read."""
    figure = draw_maps([a_map(1)], ["unbelievable"], label="share", minus=([a_map(1)], ["indescribable"]))
    assert row_labels(figure) == ["unbelievable / indescribable"]
    assert figure.axes[-1].get_ylabel() == "share, first text minus second"
    assert "difference of two maps" in describe(figure).text
    figure = draw_maps([a_map(1)], ["a" * 30], minus=([a_map(1)], ["b" * 30]))
    assert row_labels(figure) == [f"{'a' * 13}… / {'b' * 13}…"]


def test_difference_of_words() -> None:
    one, other = a_map(2), a_map(3)
    figure = draw_maps([one], ["it", "##s"], minus=([other], ["i", "##t", "##s"]), words=True)
    assert row_labels(figure) == ["its"]
    torch.testing.assert_close(drawn(figure), torch.zeros(1, 1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("minus", "message"),
    [
        (([torch.eye(1)], ["it"]), "'is' has no partner"),
        (([torch.eye(2)] * 2, ["it", "is"]), "minus has the maps"),
        ((torch.eye(2),), "pass \\(maps, tokens\\)"),
    ],
)
def test_wrong_differences(minus: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        draw_maps([torch.eye(2)], ["it", "is"], minus=minus)
