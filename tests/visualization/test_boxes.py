"""Texts of figures in any script. None is outside, for any number of tokens and layers."""

import warnings
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from captum_vz.visualization import draw_audio, draw_comparison, draw_image, draw_maps, draw_route, draw_row
from captum_vz.visualization.pictures import axes
from captum_vz.visualization.pictures.axes import PAGE
from captum_vz.visualization.tokens import LONGEST_LABEL
from tests.visualization import labels_of

COLUMN = (3.3, 4.0)  # of a paper, in inches


def sentence(count: int) -> list[str]:
    words = ["[CLS]", "the", "pictures", "of", "some", "hat", "[MASK]", "scaring", "marcus", "."]
    return [*(words * (count // len(words) + 1))[: count - 1], "[SEP]"]


def maps(tokens: int, layers: int) -> dict[str, torch.Tensor]:
    found = {f"layer {i}": torch.randn(tokens, tokens).mul(2).softmax(-1) for i in range(layers)}
    return found if layers < 2 else found | {"rollout": torch.rand(tokens, tokens).softmax(-1)}


def texts_of(figure: Figure) -> list[Text]:
    """The texts that are seen. Text outside of the view of its axes, such as a tick beyond its end, is not."""
    figure.draw_without_rendering()
    return [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip()]


def assert_inside(figure: Figure) -> None:
    found = texts_of(figure)
    ticks = {id(one) for panel in figure.axes for axis in (panel.xaxis, panel.yaxis) for one in _hidden_ticks(axis)}
    width, height = figure.bbox.width + 1, figure.bbox.height + 1
    outside = {}
    for one in found:
        box = one.get_window_extent()
        if id(one) not in ticks and not (box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width and box.y1 <= height):
            outside[one.get_text()] = [round(side) for side in box.extents]
    assert not outside, (outside, width, height)


def _hidden_ticks(axis: Any) -> list[Text]:
    """The labels of ticks that matplotlib keeps and does not draw."""
    drawn = {id(tick) for tick in axis._update_ticks()} if axis.axes.axison else set()
    ticks = [*axis.majorTicks, *axis.minorTicks]
    return [text for tick in ticks if id(tick) not in drawn for text in (tick.label1, tick.label2)]


def assert_apart(texts: list[Text]) -> None:
    """Neighbours of one font do not overlap."""
    boxes = [one.get_window_extent().shrunk(1, 0.9) for one in texts]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))


SIZES = [(5, 1), (11, 5), (150, 6), (8, 33)]


@pytest.mark.parametrize(("tokens", "layers"), SIZES)
def test_texts_of_maps_are_inside(tokens: int, layers: int) -> None:
    given, names = maps(tokens, layers), sentence(tokens)
    assert_inside(draw_maps(given, names, 3, size=COLUMN))
    figure = draw_maps(given, names, 3, "share of the row (rows sum to 1)", title="A title")
    assert_inside(figure)
    width, height = figure.get_size_inches()
    assert width <= PAGE[0] * 1.71 and height <= PAGE[1] * 1.71
    lowest = figure.axes[min(layers, len(figure.axes) - 2)]
    assert_apart(lowest.get_yticklabels())
    assert_apart(lowest.get_xticklabels())
    assert min(float(one.get_fontsize()) for one in texts_of(figure)) >= 5


@pytest.mark.parametrize("size", [PAGE, COLUMN])
@pytest.mark.parametrize("tokens", [1, 11, 250])
def test_texts_of_rows_are_inside(tokens: int, size: tuple[float, float]) -> None:
    names = sentence(tokens) if tokens > 1 else ["a"]
    rows = {name: one[0] for name, one in maps(tokens, 4).items()}
    for figure in (
        draw_row(rows, names, 0, size=size),
        draw_row({"layer 0": rows["layer 0"]}, names, 0, size=size),
        draw_comparison(rows, names, 0, truth=rows["rollout"], size=size),
    ):
        assert_inside(figure)
        assert figure.get_size_inches()[0] <= size[0] + 0.01 and figure.get_size_inches()[1] <= size[1] + 0.01


@pytest.mark.parametrize("size", [PAGE, COLUMN])
@pytest.mark.parametrize(("tokens", "layers"), [(3, 1), (11, 4), (60, 12), (11, 33)])
def test_texts_of_routes_are_inside(tokens: int, layers: int, size: tuple[float, float]) -> None:
    steps = [torch.randn(tokens, tokens).mul(4).softmax(-1) for _ in range(layers)]
    assert_inside(draw_route(steps, sentence(tokens), 1, paths=3, size=size))


def test_texts_of_sounds_and_images_are_inside() -> None:
    sound, scores = torch.sin(torch.arange(999.0)), torch.tensor([0.1, 0.7, -0.2])
    names: Any = {"names": ["two", "cats", "sleep"], "title": "A title"}
    assert_inside(draw_audio(sound, scores, 16000, "share", **names, size=(3.3, 1.8)))
    for layers in (1, 12):
        assert_inside(draw_image(torch.rand(layers, 17).softmax(-1), torch.rand(3, 32, 32), title="A title"))


@pytest.mark.parametrize("count", [1, 5])
def test_names_stand_at_the_middle(count: int) -> None:
    """The names of the axes are centred at panels, and the colour bar covers no panel and no label."""
    figure = draw_maps([torch.eye(11)] * count, sentence(11))
    found = {one.get_text(): one.get_window_extent() for one in texts_of(figure)}
    boxes = [panel.get_window_extent() for panel in figure.axes]
    lowest = [box for box in boxes[:-1] if box.y0 < boxes[-2].y0 + 1]
    across, down = found["source token"], found["output token"]
    assert (across.x0 + across.x1) / 2 == pytest.approx((lowest[0].x0 + lowest[-1].x1) / 2, abs=2)
    assert (down.y0 + down.y1) / 2 == pytest.approx((boxes[0].y1 + boxes[-2].y0) / 2, abs=2)
    bar = figure.axes[-1].get_tightbbox()
    assert bar is not None
    labels = [one.get_window_extent() for panel in figure.axes[:-1] for one in panel.get_xticklabels()]
    assert not any(bar.overlaps(box) for box in [*boxes[:-1], *labels])


# Labels in any script, and where there is little room for them


def test_labels_in_any_script() -> None:
    """No box and no warning of matplotlib: each character has a font, or is written by its code."""
    tokens = ["東京", "한국", "مرحبا", "שלום", "😀", "👩\u200d🚀", "👍🏽", "\ue000", "x\u202e", ""]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "No font of this system has")
        figure = draw_maps([torch.eye(len(tokens))] * 2, tokens, label="共有 🚀", title="東京 $x$")
        figure.draw_without_rendering()
    labels = labels_of(figure)
    assert labels[0] in ("東京", "U+6771U+4EAC")
    assert labels[2:4] == ["مرحبا", "שלום"]  # matplotlib's own font has them, and joins and turns the letters
    assert labels[-3:] == [r"\ue000", r"x\u202e", "∅"]


@pytest.mark.parametrize(("token", "written"), [("東" * 9, "U+6771" * 3 + "U…"), ("🚀", "U+1F680"), ("x\u0301", "x")])
def test_letters_that_no_font_has(token: str, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written by their codes, with one warning. A mark of another letter is left out."""
    family_of = axes._family_of
    monkeypatch.setattr(axes, "_family_of", lambda letter: family_of(letter) if letter == "…" else None)
    axes._written.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shown = [labels_of(draw_maps([torch.eye(2)], [token, "b"])) for _ in range(2)]
    assert shown == [[written, "b"]] * 2 and len(shown[0][0]) <= LONGEST_LABEL
    assert ["install a font of its script" in str(one.message) for one in told] == [True] * (written != "x")
    axes._written.cache_clear()
    axes.text_width.cache_clear()


def test_bold_and_wide_labels_have_room() -> None:
    """The label of the mark is bold and the widest. No label is cut, and none overlaps another."""
    tokens = ["a", "bb", "ccc"] * 20
    tokens[30] = "W" * 17
    figure = draw_maps([torch.eye(60)] * 2, tokens, token=30, columns=2, size=(6, 8))
    row = draw_row([torch.eye(60)[30]], tokens, token=30)
    for drawn in (figure, row):
        assert_inside(drawn)
        for axis in (drawn.axes[0].yaxis, drawn.axes[0].xaxis):
            boxes = [text.get_window_extent().shrunk(1, 0.9) for text in axis.get_ticklabels()]
            assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize(("layers", "heads", "count"), [(2, 12, 8), (33, 1, 5), (2, 4, 20)])
def test_titles_do_not_overlap(layers: int, heads: int, count: int) -> None:
    """The titles of twelve heads in a row fit their panels, and keep the numbers of layer and head."""
    figure = draw_maps([torch.eye(count).expand(heads, count, count)] * layers, ["a"] * count, heads=True, columns=12)
    figure.draw_without_rendering()
    titles = [panel.title for panel in figure.axes[: layers * heads]]
    assert [title.get_text().replace("\n", " ") for title in titles[:2]] == [
        "layer 0, head 0",
        "layer 0, head 1" if heads > 1 else "layer 1, head 0",
    ]
    boxes = [title.get_window_extent() for title in titles]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    assert boxes[0].y1 <= figure.bbox.height


def test_labels_once_in_a_grid_of_axes() -> None:
    """Axes of a grid have labels at the left and lower edges, and axes without a grid have both."""
    own = Figure(figsize=(8, 6))
    panels = own.subplots(2, 2)
    assert draw_maps([torch.eye(2)] * 4, ["a", "b"], ax=panels) is own
    assert all(panel.images[0].get_array()[0].tolist() == [1, 0] for panel in panels.flat)
    assert [bool(panel.get_xticklabels()) for panel in panels.flat] == [False, False, True, True]
    assert [bool(panel.get_yticklabels()) for panel in panels.flat] == [True, False, True, False]
    assert [panel.get_ylabel() for panel in panels.flat] == ["output token", "", "output token", ""]
    apart = [own.add_axes((0, 0, 0.2, 0.2)), own.add_axes((0.5, 0, 0.2, 0.2))]
    draw_maps([torch.eye(2)] * 2, ["a", "b"], ax=apart)
    assert all(panel.get_yticklabels() and panel.get_xticklabels() for panel in apart)
    assert draw_maps([torch.eye(2)], ["a", "b"], ax=apart[0]) is own
