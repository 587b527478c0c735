"""Where the panels of a grid are: as large as a page allows, with labels that can be read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from captum_vz.visualization.pictures.parts.labels import MOST_LEVELS, level_offsets, levels_for, text_width
from captum_vz.visualization.pictures.parts.style import CELL, FONT_SIZE, SMALLEST_FONT

#: Width and height in inches of the space on a sheet of A4 or Letter.
PAGE: Final = (7.6, 10.2)
SMALLEST_SIDE: Final = 1.15  # of the longer side of a panel with few tokens
_TITLE, _GAP, _EDGE = 0.24, 0.12, 0.06
_NAME: Final = 0.2  # "source token" and "output token"
_BAR, _BAR_GAP, _BAR_TEXT = 0.11, 0.14, 0.62
_LONGEST_SCALE: Final = 3.0
_GROWTH: Final = (1.0, 1.08, 1.2, 1.35, 1.5, 1.7)  # of pages that are tried if labels do not fit


@dataclass(frozen=True)
class Grid:
    """Panels in inches, from the upper left corner of the figure.

    Attributes:
        size: The figure.
        boxes: For each panel left, top, width and height.
        bar: The colour bar, in the same form.
        bottom: The lower end of all labels, from the upper edge of the figure.
        columns: The number of panels in a row.
        cell: The side of a cell.
        font: The size of labels in points.
    """

    size: tuple[float, float]
    boxes: list[tuple[float, float, float, float]]
    bar: tuple[float, float, float, float]
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

    Args:
        wanted: What the grid has to hold.
        columns: The number of panels in a row. None: the number that uses the page best.
        page: The largest width and height in inches.
        fixed: Whether the figure has the size of the page, and cannot grow.
    """
    for growth in (1.0,) if fixed else _GROWTH:
        limits = (page[0] * growth, page[1] * growth)
        found = [one for one in _candidates(wanted, columns, limits, fixed) if one.fits]
        if found:
            return _placed(wanted, max(found, key=lambda one: one.rank), page if fixed else None)
    last = max(_candidates(wanted, columns, limits, fixed), key=lambda one: one.cell)
    return _placed(wanted, last, page if fixed else None)


@dataclass(frozen=True)
class _Candidate:
    columns: int
    rows: int
    font: float
    cell: float
    label_width: float
    label_height: float
    fits: bool
    rank: tuple[float, ...]


def _candidates(wanted: Wanted, columns: int | None, limits: tuple[float, float], fixed: bool) -> Iterator[_Candidate]:
    count, high, wide = wanted.count, len(wanted.rows), len(wanted.columns)
    largest = math.inf if fixed else max(CELL, SMALLEST_SIDE / max(high, wide))
    square = _square(count)
    for across in [min(columns, count)] if columns else range(1, count + 1):
        down = math.ceil(count / across)
        for font in (FONT_SIZE, 7, 6, SMALLEST_FONT):
            for levels in range(1, MOST_LEVELS + 1):
                label_width = level_offsets(wanted.rows, levels, font, wanted.marked)[-1] / 72
                label_height = level_offsets(wanted.columns, levels, font)[-1] / 72
                free_width = limits[0] - _margins(wanted)[0] - label_width - (across - 1) * _GAP
                free_height = limits[1] - _margins(wanted)[1] - label_height - down * (_TITLE + _GAP)
                cell = min(free_width / (across * wide), free_height / (down * high), largest)
                if cell <= 0:
                    continue
                fits = levels_for(cell, font) <= levels
                legible = font - 2.5 * levels
                nearly_square = (round(min(cell, 0.1), 2), -abs(across - square), -(-count % across))
                rank = (legible, cell) if fixed else (legible, *nearly_square, cell)
                yield _Candidate(across, down, font, cell, label_width, label_height, fits, rank)
                if fits:
                    break


def _square(count: int) -> int:
    """The number of columns with which `count` panels are nearly square, with few empty places."""
    side = math.ceil(math.sqrt(count))
    return count if count <= 3 else min((side, side + 1), key=lambda across: (-count % across, across))


def _margins(wanted: Wanted) -> tuple[float, float]:
    """Width and height of the space outside panels and labels."""
    return _EDGE + _NAME + _BAR_GAP + _BAR + _BAR_TEXT, 2 * _EDGE + _NAME + (0.3 if wanted.heading else 0.0)


def _placed(wanted: Wanted, chosen: _Candidate, size: tuple[float, float] | None) -> Grid:
    high, wide = len(wanted.rows) * chosen.cell, len(wanted.columns) * chosen.cell
    margins = _margins(wanted)
    left = _EDGE + _NAME + chosen.label_width
    top = _EDGE + (0.3 if wanted.heading else 0.0)
    across = min(chosen.columns, wanted.count)
    width = left + across * wide + (across - 1) * _GAP
    height = margins[1] + chosen.rows * (high + _TITLE + _GAP) - _GAP + chosen.label_height + 0.04
    boxes = [
        (
            left + (index % chosen.columns) * (wide + _GAP),
            top + _TITLE + (index // chosen.columns) * (high + _TITLE + _GAP),
            wide,
            high,
        )
        for index in range(wanted.count)
    ]
    bottom = boxes[-1][1] + high
    bar_height = min(bottom - boxes[0][1], 2.4)
    lower = height  # of all labels
    height = max(height, boxes[0][1] + min(text_width(wanted.scale, FONT_SIZE), _LONGEST_SCALE) + _EDGE)
    bar = (width + _BAR_GAP, boxes[0][1], _BAR, bar_height)
    width += _BAR_GAP + _BAR + _BAR_TEXT
    return Grid(size or (width, height), boxes, bar, lower, chosen.columns, chosen.cell, chosen.font)
