"""Labels of tokens at an axis. Where lines of text are higher than cells, labels stand in several columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as MatplotlibAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure, FigureBase
from matplotlib.font_manager import FontProperties
from matplotlib.transforms import Affine2D, ScaledTranslation, blended_transform_factory

from captum_vz.visualization.pictures.description import set_heading
from captum_vz.visualization.pictures.parts.fonts import font_families, set_label, writable
from captum_vz.visualization.pictures.parts.style import DPI, FONT_SIZE, LINE, MARK, QUIET, SMALLEST_FONT

_VECTOR_DPI: Final = 1200  # so fine that rounding to pixels does not matter
MOST_LEVELS: Final = 2  # columns of labels
TICK, PAD, GAP = 2.0, 2.0, 5.0  # points
_LEADER: Final = "0.75"  # the grey of the lines that lead to outer labels


@cache
def _renderer(dpi: int) -> Any:
    return FigureCanvasAgg(Figure(figsize=(1, 1), dpi=dpi)).get_renderer()  # type: ignore[no-untyped-call]  # untyped


@lru_cache(maxsize=4096)
def text_width(text: str, font: float, weight: str = "normal") -> float:
    """The width of a text in inches, in files of pixels, where letters begin at whole pixels, and in vector files."""
    text = writable(text)
    properties = FontProperties(family=font_families([text]), size=font, weight=weight)
    widths = (
        _renderer(dpi).get_text_width_height_descent(text, properties, ismath=False)[0] / dpi
        for dpi in (*DPI, _VECTOR_DPI)
    )
    return float(max(widths))


def level_offsets(labels: Sequence[str], levels: int, font: float, marked: int | None = None) -> list[float]:
    """How far the labels of each level are from the axis, and the room of all levels, in points.

    Label i is in level `i % levels`. Level 0 is next to the axis. The label `marked` is bold.
    """
    offsets = [TICK + PAD]
    bold = None if marked is None else text_width(labels[marked], font, "bold")
    for level in range(levels):
        longest = max((text_width(label, font) for label in labels[level::levels]), default=0.0)
        if bold is not None and marked is not None and marked % levels == level:
            longest = max(longest, bold)
        offsets.append(offsets[-1] + 72 * longest + GAP)
    offsets[-1] -= GAP
    return offsets


def levels_for(cell: float, font: float) -> int:
    """How many levels labels need at cells of this height in inches."""
    return max(1, math.ceil(font * LINE / cell - 1e-6))


def used_levels(cell: float, font: float) -> int:
    """How many levels `write_labels` uses: if there are too many labels for all levels, one, with every k-th label."""
    levels = levels_for(cell, font)
    return levels if levels <= MOST_LEVELS else 1


def write_labels(
    axis: MatplotlibAxis,
    labels: Sequence[str],
    cell: float,
    font: float = FONT_SIZE,
    marked: int | None = None,
    dimmed: Sequence[int] = (),
) -> None:
    """Label each row or column, in as many levels as needed. If that is not enough: every k-th one, in one level.

    Args:
        axis: The x-axis or the y-axis of a panel.
        labels: One for each row or column.
        cell: The height of a row, or the width of a column, in inches.
        font: The size of the labels in points.
        marked: The row or column whose label has the colour of the mark. It always has a label.
        dimmed: The rows or columns with grey labels.
    """
    levels = used_levels(cell, font)
    every = max(1, math.ceil(font * LINE / (cell * levels) - 1e-6))
    kept = [i for i in range(0, len(labels), every) if marked is None or abs(i - marked) >= every]
    kept = sorted({*kept, *([] if marked is None else [marked])}) if every > 1 else list(range(len(labels)))
    texts = [writable(labels[i]) for i in kept]  # matplotlib writes them again whenever it draws
    axis.set_ticks(kept, texts)
    axis.set_tick_params(length=TICK, width=0.4, color="0.3")
    offsets = level_offsets([labels[i] for i in kept], levels, font, None if marked is None else kept.index(marked))
    is_x = axis.axis_name == "x"  # type: ignore[attr-defined]  # not in the stubs
    _add_leaders(axis, [(place, offsets[index % levels] - PAD) for index, place in enumerate(kept) if index % levels])
    for index, (place, tick) in enumerate(zip(kept, axis.get_major_ticks(len(kept)), strict=True)):
        tick.set_pad(offsets[index % levels] - TICK)
        for text in (tick.label1, tick.label2):
            text.set_fontsize(font)
            if is_x:
                text.set_rotation(90)
            set_label(text, QUIET if place in dimmed else None, labels[place], axis.axes)
            if place == marked:
                text.set(color=MARK, fontweight="bold")


def _add_leaders(axis: MatplotlibAxis, leaders: Sequence[tuple[int, float]]) -> None:
    """Lines from places of an axis to outer labels, each with its length in points, below all labels."""
    panel = axis.axes
    corner: Any = panel.transAxes
    inches: Any = panel.figure.dpi_scale_trans
    points = Affine2D().scale(-1 / 72) + inches + ScaledTranslation(0, 0, corner)
    look: dict[str, Any] = {"colors": _LEADER, "linewidths": 0.4, "clip_on": False, "zorder": 0.5}
    if axis.axis_name == "x":  # type: ignore[attr-defined]  # as above
        look["transform"] = blended_transform_factory(panel.transData, points)
        lines = [np.array([(place, TICK), (place, end)]) for place, end in leaders]
    else:
        look["transform"] = blended_transform_factory(points, panel.transData)
        lines = [np.array([(TICK, place), (end, place)]) for place, end in leaders]
    panel.add_collection(LineCollection(lines, **look), autolim=False)


def write_plain_labels(axis: MatplotlibAxis, places: Sequence[float], labels: Sequence[str], **options: Any) -> None:
    """Label places of an axis in one level, with options of a text."""
    axis.set_ticks(places, [writable(label) for label in labels], **options)
    for tick, label in zip(axis.get_major_ticks(len(places)), labels, strict=True):
        for text in (tick.label1, tick.label2):
            set_label(text, None, label, axis.axes)


def hide_labels(panel: Axes, *, x: bool, y: bool) -> None:
    """Leave out the labels and ticks of one axis or both."""
    if x:
        panel.set_xticks([])
    if y:
        panel.set_yticks([])


def largest_font(texts: Iterable[str], width: float, largest: float) -> float:
    """The largest font in which all texts are at most so wide in inches, or the smallest that can be read."""
    lines = [line for text in texts for line in text.split("\n")]
    widest, font = max(lines, key=lambda line: text_width(line, FONT_SIZE)), largest
    while font > SMALLEST_FONT and text_width(widest, font) > width:
        font -= 0.5
    return font


def fit_titles(titles: Sequence[str], width: float) -> tuple[list[str], float]:
    """Titles that are no wider than a panel, and their font. One that does not fit has two lines, or is cut."""
    font = largest_font(titles, width, FONT_SIZE + 1.5)
    if max(text_width(title, font) for title in titles) <= width:
        return list(titles), font
    broken = [_in_two_lines(title) for title in titles]
    font = largest_font(broken, width, SMALLEST_FONT + 1)
    broken = [one if text_width(one, font) <= width else two for one, two in zip(titles, broken, strict=True)]
    return ["\n".join(_cut(line, width, font) for line in title.split("\n")) for title in broken], font


def _in_two_lines(title: str) -> str:
    """The title with a line break in place of the space that is nearest to its middle."""
    spaces = [place for place, letter in enumerate(title) if letter == " "]
    if not spaces:
        return title
    middle = min(spaces, key=lambda place: abs(place - len(title) / 2))
    return f"{title[:middle]}\n{title[middle + 1 :]}"


def _cut(line: str, width: float, font: float) -> str:
    short = line
    while len(short) > 2 and text_width(short, font) > width:
        short = f"{short.removesuffix('…')[:-1]}…"
    return short


def write_heading(
    figure: FigureBase, title: str, left: float, top: float, size: tuple[float, float], **options: Any
) -> None:
    """Write the title of a figure at left and top in inches, from its upper left corner."""
    set_label(figure.suptitle(title, x=left / size[0], y=1 - top / size[1], ha="left", **options))
    set_heading(figure, title)


def write_title(panel: Axes, title: str, font: float) -> None:
    """Write the title of a panel as plain text."""
    set_label(panel.set_title(title, fontsize=font, pad=3))
