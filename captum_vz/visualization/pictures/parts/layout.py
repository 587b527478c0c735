"""Where the panels of a grid are: as large as a page allows, with labels that can be read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from captum_vz.visualization.pictures.parts.labels import MOST_LEVELS, level_offsets, levels_for, text_width
from captum_vz.visualization.pictures.parts.scales import BAR, bar_room
from captum_vz.visualization.pictures.parts.style import CELL, FONT_SIZE, SMALLEST_FONT

#: Width and height in inches of the space on a sheet of A4 or Letter.
PAGE: Final = (7.6, 10.2)
SMALLEST_SIDE: Final = 1.15  # of the longer side of a panel with few tokens
_TITLE, _GAP, _EDGE = 0.24, 0.12, 0.06
_NAME: Final = 0.2  # "source token" and "output token"
_BAR_GAP, _BAR_TEXT, _BAR_SIDE = 0.14, 0.62, 0.14
NARROW_PAGE: Final = 5.0  # inches: on narrower pages, the colour bar is below the panels
_SHORTEST_BAR, _LONGEST_BAR = 0.9, 2.4
_SPARSE_FONT: Final = 7.0
_SMALLEST_CELL: Final = 1 / 72  # of panels in which every k-th token has a label
_LONGEST_SCALE: Final = 3.0
_GROWTH: Final = (1.0, 1.08, 1.2, 1.35, 1.5, 1.7)  # of pages that are tried if labels do not fit


@dataclass(frozen=True)
class Grid:
    """Panels in inches, from the upper left corner of the figure.

    Attributes:
        size: The figure.
        boxes: For each panel left, top, width and height.
        bar: The colour bar, in the same form.
        flat: Whether the colour bar is horizontal.
        bottom: The lower end of all labels, from the upper edge of the figure.
        columns: The number of panels in a row.
        cell: The side of a cell.
        font: The size of labels in points.
    """

    size: tuple[float, float]
    boxes: list[tuple[float, float, float, float]]
    bar: tuple[float, float, float, float]
    flat: bool
    bottom: float
    columns: int
    cell: float
    font: float


@dataclass(frozen=True)
class Wanted:
    """What a grid has to hold: panels of rows by columns of cells, with labels, a title and a colour bar."""

    count: int
    rows: Sequence[str]
    columns: Sequence[str]
    heading: bool
    scale: str  # the label of the colour bar
    marked: int | None = None  # the row whose label is bold


def make_grid(wanted: Wanted, columns: int | None, page: tuple[float, float] = PAGE, fixed: bool = False) -> Grid:
    """The grid with the largest font and the fewest levels of labels that fits the page, or the next larger page.

    If no page has room for a label of each token, every k-th token has one.

    Args:
        wanted: What the grid has to hold.
        columns: The number of panels in a row. None: the number that uses the page best.
        page: The largest width and height in inches.
        fixed: Whether the figure has the size of the page, and cannot grow.
    """
    pages = [(page[0] * growth, page[1] * growth) for growth in ((1.0,) if fixed else _GROWTH)]
    every = [(font, levels) for font in (FONT_SIZE, 7, 6, SMALLEST_FONT) for levels in range(1, MOST_LEVELS + 1)]
    for limits in pages:
        found = [one for one in _candidates(wanted, columns, limits, fixed, every) if one.fits]
        if found:
            return _placed(wanted, max(found, key=lambda one: one.rank), page if fixed else None)
    for limits in pages:
        best = max(_candidates(wanted, columns, limits, fixed, [(_SPARSE_FONT, 1)]), key=lambda one: one.cell)
        if best.cell >= _SMALLEST_CELL:
            break
    return _placed(wanted, best, page if fixed else None)


@dataclass(frozen=True)
class _Candidate:
    columns: int
    rows: int
    font: float
    cell: float
    label_width: float
    label_height: float
    place: str  # of the colour bar: "cell", an empty cell of the grid; "side" or "below"
    fits: bool
    rank: tuple[float, ...]


def _candidates(
    wanted: Wanted,
    columns: int | None,
    limits: tuple[float, float],
    fixed: bool,
    forms: Sequence[tuple[float, int]],
) -> Iterator[_Candidate]:
    """Grids with each of the forms of labels: their font and their levels."""
    count, high, wide = wanted.count, len(wanted.rows), len(wanted.columns)
    largest = math.inf if fixed else max(CELL, SMALLEST_SIDE / max(high, wide))
    best = square(count)
    for across in [min(columns, count)] if columns else range(1, count + 1):
        down = math.ceil(count / across)
        empty = -count % across
        for font, levels in forms:
            label_width = level_offsets(wanted.rows, levels, font, wanted.marked)[-1] / 72
            label_height = level_offsets(wanted.columns, levels, font)[-1] / 72
            for place in (*(("cell",) if empty else ()), "below" if limits[0] < NARROW_PAGE else "side"):
                margins = _margins(wanted, place, limits[0])
                free_width = limits[0] - margins[0] - label_width - (across - 1) * _GAP
                free_height = limits[1] - margins[1] - label_height - down * (_TITLE + _GAP)
                cell = min(free_width / (across * wide), free_height / (down * high), largest)
                bar = empty * (cell * wide + _GAP) - _GAP - 2 * _BAR_SIDE
                room = cell * high + _TITLE - bar_room(wanted.scale, min(bar, _LONGEST_BAR))
                if place != "cell" or (bar >= _SHORTEST_BAR and room > _GAP):
                    break
            if cell <= 0:
                continue
            legible = font - 2.5 * levels
            nearly_square = (round(min(cell, 0.1), 2), -abs(across - best), -empty)
            rank = (legible, cell) if fixed else (legible, *nearly_square, cell)
            fits = levels_for(cell, font) <= levels
            yield _Candidate(across, down, font, cell, label_width, label_height, place, fits, rank)


def square(count: int) -> int:
    """The number of columns with which `count` panels are nearly square, with few empty places."""
    side = math.ceil(math.sqrt(count))
    return count if count <= 3 else min((side, side + 1), key=lambda across: (-count % across, across))


def _margins(wanted: Wanted, place: str, width: float) -> tuple[float, float]:
    """Width and height of the space outside panels and labels."""
    right = _BAR_GAP + BAR + _BAR_TEXT if place == "side" else 0.1
    below = 0.15 + bar_room(wanted.scale, min(width * 0.6, _LONGEST_BAR)) if place == "below" else 0.0
    return _EDGE + _NAME + right, 2 * _EDGE + _NAME + (0.3 if wanted.heading else 0.0) + below


def _placed(wanted: Wanted, chosen: _Candidate, size: tuple[float, float] | None) -> Grid:
    high, wide = len(wanted.rows) * chosen.cell, len(wanted.columns) * chosen.cell
    left = _EDGE + _NAME + chosen.label_width
    top = _EDGE + (0.3 if wanted.heading else 0.0)
    across = min(chosen.columns, wanted.count)
    panels = across * wide + (across - 1) * _GAP
    boxes = [
        (
            left + (index % chosen.columns) * (wide + _GAP),
            top + _TITLE + (index // chosen.columns) * (high + _TITLE + _GAP),
            wide,
            high,
        )
        for index in range(wanted.count)
    ]
    lower = boxes[-1][1] + high + chosen.label_height + _NAME + _EDGE + 0.04  # of all labels
    width, height = left + panels, lower
    if chosen.place == "side":
        bar_height = min(boxes[-1][1] + high - boxes[0][1], _LONGEST_BAR)
        bar = (width + _BAR_GAP, boxes[0][1], BAR, bar_height)
        height = max(height, boxes[0][1] + min(text_width(wanted.scale, FONT_SIZE), _LONGEST_SCALE) + _EDGE)
        width += _BAR_GAP + BAR + _BAR_TEXT
    elif chosen.place == "below":
        length = min(max(panels - 2 * _BAR_SIDE, 1.0), _LONGEST_BAR)
        bar = (max(left + (panels - length) / 2, 2 * _EDGE), lower + 0.08, length, BAR)
        width += 0.1
        height = bar[1] + bar_room(wanted.scale, length) + _EDGE
    else:
        first = boxes[-1][0] + wide + _GAP
        room = left + panels - first
        length = min(room - 2 * _BAR_SIDE, _LONGEST_BAR)
        lowest = boxes[-1][1] - _TITLE + chosen.label_height  # of the labels of the panel above
        middle = boxes[-1][1] + (high - bar_room(wanted.scale, length)) / 2
        bar = (first + (room - length) / 2, max(lowest, middle), length, BAR)
        width += 0.1
    flat = chosen.place != "side"
    return Grid(size or (width, height), boxes, bar, flat, lower, chosen.columns, chosen.cell, chosen.font)
