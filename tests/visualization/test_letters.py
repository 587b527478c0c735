"""Labels in any script, and where there is little room for them."""

import warnings
from itertools import combinations, pairwise

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz.visualization import draw_maps, draw_row
from captum_vz.visualization.pictures import axes


def a_map(count: int) -> Tensor:
    return torch.eye(count)


def labels_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]


def test_labels_in_any_script() -> None:
    """No box and no warning of matplotlib: each character has a font, or is written as a name or a code."""
    tokens = ["東京", "한국", "مرحبا", "שלום", "😀", "🚀", "👩\u200d🚀", "👍🏽", "\ue000", "x\u202e", ""]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "No font of this system has")
        figure = draw_maps([a_map(len(tokens))] * 2, tokens, label="共有 🚀", title="東京 $x$")
        figure.draw_without_rendering()
    labels = labels_of(figure)
    assert labels[0] in ("東京", "U+6771U+4EAC")
    assert labels[2:4] == ["مرحبا", "שלום"]  # matplotlib's own font has them, and joins and turns the letters
    assert labels[5] in ("🚀", ":rocket:")
    assert labels[-3:] == [r"\ue000", r"x\u202e", "∅"]


def test_missing_letter_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "_family_of", lambda letter: None)
    for token, written in (("東", "U+6771"), ("🚀", ":rocket:"), ("x\u0301", "x")):
        axes._written.cache_clear()
        if written == "x":  # a mark of another letter is left out
            assert labels_of(draw_maps([a_map(2)], [token, "b"])) == ["x", "b"]
            continue
        with pytest.warns(UserWarning, match="install a font of its script"):
            assert labels_of(draw_maps([a_map(2)], [token, "b"])) == [written, "b"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            draw_maps([a_map(2)], [token, "b"])
    axes._written.cache_clear()
    axes.text_width.cache_clear()


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
