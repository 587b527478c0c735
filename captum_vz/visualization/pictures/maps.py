"""A figure of maps, and where its panels are: as large as a page allows, with labels that can be read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from torch import Tensor

from captum_vz.visualization.pictures import axes
from captum_vz.visualization.pictures.files import Picture, root_figure, set_content
from captum_vz.visualization.pictures.panels import Chosen, Panels, Words, prepare_panels
from captum_vz.visualization.pictures.scales import BAR, Scale, add_colorbar, bar_room, make_scale, rollouts

# In inches. A cell is as high as a line of text.
CELL: Final = 0.17
SMALLEST_SIDE: Final = 1.15  # of the longer side of a panel with few tokens
_ACROSS, _DOWN = "source token", "output token"
_TITLE, _GAP, _EDGE, _HEADING = 0.24, 0.12, 0.06, 0.3
_NAME: Final = 0.2  # "source token" and "output token"
_BAR_GAP, _BAR_TEXT, _BAR_SIDE, _LONGEST_BAR = 0.14, 0.62, 0.14, 2.4
_SPARSE_FONT: Final = 7.0
_SMALLEST_CELL: Final = 1 / 72  # of panels in which every k-th token has a label
_LONGEST_SCALE: Final = 3.0
_GROWTH: Final = (1.0, 1.08, 1.2, 1.35, 1.5, 1.7)  # of pages that are tried if labels do not fit

Box = tuple[float, float, float, float]  # left, top, width and height


def draw_maps(
    maps: Mapping[str, Tensor] | Sequence[Tensor],
    tokens: Sequence[str],
    token: int | None = None,
    label: str = "score",
    *,
    out_tokens: Sequence[str] | None = None,
    minus: tuple[Any, ...] | None = None,
    heads: bool = False,
    words: Words = None,
    dim: Chosen = None,
    drop: Chosen = None,
    scale: Literal["shared", "panel", "root"] | None = None,
    vmax: float | None = None,
    columns: int | None = None,
    size: tuple[float, float] = axes.PAGE,
    title: str | None = None,
    ax: Axes | Sequence[Axes] | None = None,
) -> Figure:
    """Draws maps as panels of a grid. Rows are output tokens, columns are source tokens.

    Zero is white. Panels share one scale, which ends at the largest score. Colours of shares are by the square root, so
    that small shares can be seen. A rollout has an end of its own, which its title names. To compare two figures, pass
    the same `vmax` to both: 1 for rows that sum to 1. If a score is negative, the scale is centred at 0: blue above,
    red below. The figure fits a page, and is larger only if its labels could not be read otherwise.

    Args:
        maps: A dict from the titles of the panels to maps, or a list of maps, titled "layer 0", "layer 1" and so on. A
            map is `(out, in)`, or `(1, out, in)` as `attribute` returns it for one sentence.
        tokens: The source tokens, `len(tokens) == in`.
        token: The position of the output token whose row is marked. Negative positions count from the end.
        label: The label of the colour scale, such as "share of the row" for rows that sum to 1.
        out_tokens: The output tokens of maps of cross-attention, `len(out_tokens) == out`. None: the source tokens.
        minus: Maps that are subtracted, and their tokens: `(maps, tokens)` or `(maps, tokens, words)`. The two texts
            are aligned. Tokens that differ are labelled with both, and passages of different lengths become one.
        heads: Whether maps hold heads, `(heads, out, in)` or `(1, heads, out, in)`, which become panels of their own.
        words: Merges pieces to words: the number of each token's word, as `word_ids()` of a tokenizer's output, or
            True, which reads the marks "##", "Ġ" and "▁". Columns of a word are added, its rows are averaged. With
            `out_tokens`: True, or a pair of numbers for sources and for outputs.
        dim: Tokens that are drawn pale and do not count for the scale: "special", or positions of source tokens.
        drop: Tokens that are left out: "special", or positions of source tokens. The other scores do not change.
        scale: "shared": one scale for all panels. "panel": each panel ends at its own largest score, which its title
            says. "root": shared, with colours by the square root. None: "root" for shares, which are not negative and
            have rows that sum to at most 1, else "shared"; panels whose titles have the word "rollout" end at their own
            largest score.
        vmax: The end of the scale of all panels, with "shared" or "root". None: the largest score.
        columns: The number of panels in a row. None: the number that uses the page best.
        size: The width and height of the page in inches.
        title: A title above the panels.
        ax: Axes to draw into, one for each panel. The scale is drawn at the right of the last one.

    Returns:
        A matplotlib figure: a new one, which is not registered with pyplot, or the figure of `ax`.
        `figure.savefig("maps.png")` writes it, a notebook shows it, and :func:`describe` gives its numbers.

    Raises:
        ArgumentError: Maps do not fit the tokens, are a batch, or are not finite. A position or an option is wrong.

    >>> from captum_vz import ValueZeroing, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> maps = ValueZeroing(model, find_layers(model)).attribute(inputs)
    >>> figure = draw_maps(maps, inputs.tokens(), token=6, label="share of the row", vmax=1)
    >>> [panel.get_title() for panel in figure.axes[:4]]
    ['layer 0', 'layer 1', 'layer 2', 'layer 3']
    """
    panels = prepare_panels(maps, tokens, token, out_tokens, minus, heads, words, dim, drop)
    label = f"{label}, first text minus second" if panels.is_difference else label
    drawn = list(panels.scores.values())
    given = axes.given_axes(ax, len(drawn))
    colors = make_scale(drawn, scale, vmax, [panels.counted(one) for one in drawn], rollouts(panels.scores))
    named = colors.label(label, "panel")
    if given is not None:
        return _draw_into(given, panels, colors, label)
    grid = Layout(panels, _EDGE + (_HEADING if title else 0.0), named, size).grid(columns)
    figure = Picture(figsize=grid.size, dpi=axes.DPI[grid.font < 7])
    titles = _titles(panels, colors, grid.boxes[0][2])
    for index, box in enumerate(grid.boxes):
        panel = axes.add_axes(figure, box, grid.size)
        _draw_panel(panel, panels, index, colors, box[2], label, titles)
        is_lowest = index + grid.columns >= len(drawn)
        _label_panel(panel, panels, grid.cell, grid.font, x=is_lowest, y=index % grid.columns == 0)
    bar = axes.add_axes(figure, grid.bar, grid.size)
    add_colorbar(bar, colors, named, max(grid.bar[2:]), grid.size[1] - grid.bar[1], grid.is_flat)
    _name_axes(figure, grid)
    if title:
        x, y = grid.boxes[0][0] / grid.size[0], 1 - 0.06 / grid.size[1]
        axes.write_heading(figure, title, x=x, y=y, ha="left")
    return figure


def _draw_into(given: list[Axes], panels: Panels, colors: Scale, label: str) -> Figure:
    titles = _titles(panels, colors, min(axes.size_of_axes(panel)[0] for panel in given))
    for index, panel in enumerate(given):
        width, height = axes.size_of_axes(panel)
        _draw_panel(panel, panels, index, colors, width, label, titles)
        cell = min(width / len(panels.columns.labels), height / len(panels.rows.labels))
        place = panel.get_subplotspec()
        x, y = (True, True) if place is None else (place.is_last_row(), place.is_first_col())
        _label_panel(panel, panels, cell, axes.FONT_SIZE, x=x, y=y)
        panel.set_xlabel(_ACROSS if x else "", fontsize=axes.FONT_SIZE)
        panel.set_ylabel(_DOWN if y else "", fontsize=axes.FONT_SIZE)
    add_colorbar(given[-1].inset_axes((1.03, 0, 0.05, 1)), colors, colors.label(label, "panel"), height)
    return root_figure(given[-1].figure)


def _draw_panel(
    panel: Axes, panels: Panels, index: int, colors: Scale, width: float, label: str, titles: tuple[list[str], float]
) -> None:
    name, scores = list(panels.scores.items())[index]
    panel.imshow(scores.numpy(), cmap=colors.colors, norm=colors.norms[index], interpolation="nearest")
    axes.write_title(panel, titles[0][index], titles[1])
    panel.spines[:].set_linewidth(0.5)
    high, wide = scores.shape
    for row in panels.rows.dimmed:
        axes.add_pale(panel, -0.5, row - 0.5, wide, 1)
    for column in panels.columns.dimmed:
        axes.add_pale(panel, column - 0.5, -0.5, 1, high)
    if panels.marked is not None:  # above the frame of the panel
        look: dict[str, Any] = {"clip_on": False, "zorder": 2.6, "linewidth": min(1.2, 72 * width / wide * 0.2)}
        axes.add_frame(panel, -0.5, panels.marked - 0.5, wide, 1, **look)
    set_content(panel, panels.content(name, label))


def _titles(panels: Panels, colors: Scale, width: float) -> tuple[list[str], float]:
    """The titles of panels. Those of panels with their own scale say where it ends."""
    ends = (f" (to {colors.end(index):.2g})" if index in colors.apart else "" for index in range(len(panels.scores)))
    return axes.fit_titles([f"{name}{end}" for name, end in zip(panels.scores, ends, strict=True)], width)


def _label_panel(panel: Axes, panels: Panels, cell: float, font: float, *, x: bool, y: bool) -> None:
    panel.set(xticks=[], yticks=[])
    if y:
        axes.write_labels(panel.yaxis, panels.rows.shown, cell, font, panels.marked, panels.rows.dimmed)
    if x:
        axes.write_labels(panel.xaxis, panels.columns.shown, cell, font, None, panels.columns.dimmed)


def _name_axes(figure: FigureBase, grid: Grid) -> None:
    """Write what columns and rows are, below and at the left of the middle of the panels."""
    look: dict[str, Any] = {"fontsize": axes.FONT_SIZE + 0.5, "color": "0.25"}
    (width, height), boxes = grid.size, grid.boxes
    left = min(box[0] for box in boxes if box[1] == boxes[-1][1])  # the lowest panels
    middle = (left + boxes[-1][0] + boxes[-1][2]) / 2
    figure.text(middle / width, 1 - (grid.bottom - 0.05) / height, _ACROSS, va="bottom", ha="center", **look)
    middle = (boxes[0][1] + boxes[-1][1] + boxes[-1][3]) / 2
    figure.text(0.05 / width, 1 - middle / height, _DOWN, va="center", rotation=90, **look)


@dataclass(frozen=True)
class Grid:
    """Panels in inches, from the upper left corner of the figure."""

    columns: int  # panels in a row
    font: float
    cell: float  # its side
    size: tuple[float, float]
    boxes: list[Box]
    bar: Box
    is_flat: bool  # whether the bar is horizontal
    bottom: float  # the lower end of all labels


class Layout:
    """What a grid has to hold: panels below a title of height `top`, and a colour bar with the label `scale`."""

    def __init__(self, panels: Panels, top: float, scale: str, page: tuple[float, float]) -> None:
        self.count, self.marked = len(panels.scores), panels.marked
        self.rows, self.columns = panels.rows.shown, panels.columns.shown
        self.top, self.scale, self.page = top, scale, page
        self.is_flat = page[0] < axes.NARROW_PAGE  # the colour bar is below the panels

    def grid(self, columns: int | None) -> Grid:
        """The grid with the largest font that fits the page, or the next larger page.

        If no page has room for a label of each token, every k-th token has one.
        """
        choices = [min(columns, self.count)] if columns else range(1, self.count + 1)
        pages = [(self.page[0] * growth, self.page[1] * growth) for growth in _GROWTH]
        for limits in pages:
            for font in (axes.FONT_SIZE, 7, 6, axes.SMALLEST_FONT):
                cells = self._cells(choices, font, limits)
                fitting = [across for across, cell in cells.items() if cell >= font * axes.LINE - 1e-9]
                if fitting:
                    across = max(fitting, key=lambda one: self._rank(one, cells[one]))
                    return self._placed(across, font, cells[across])
        for limits in pages:
            cells = self._cells(choices, _SPARSE_FONT, limits)
            across = max(cells, key=cells.__getitem__)
            if cells[across] >= _SMALLEST_CELL:
                break
        return self._placed(across, _SPARSE_FONT, cells[across])

    def _rank(self, across: int, cell: float) -> tuple[float, ...]:
        """How good so many columns are: nearly a square."""
        return round(min(cell, 0.1), 2), -abs(across - axes.square(self.count)), -(-self.count % across), cell

    def _cells(self, choices: Iterable[int], font: float, limits: tuple[float, float]) -> dict[int, float]:
        """For each number of columns of panels the side of a cell, on a page of these limits."""
        high, wide = len(self.rows), len(self.columns)
        left, below = self._labels(font)
        width = limits[0] - left - (0.1 if self.is_flat else _BAR_GAP + BAR + _BAR_TEXT)
        height = limits[1] - self.top - below
        height -= 0.15 + bar_room(self.scale, min(limits[0] * 0.6, _LONGEST_BAR)) if self.is_flat else 0.0
        largest = max(CELL, SMALLEST_SIDE / max(high, wide))
        cells = {}
        for across in choices:
            down = math.ceil(self.count / across)
            sides = (width - (across - 1) * _GAP) / (across * wide), (height - down * (_TITLE + _GAP)) / (down * high)
            cells[across] = max(min(*sides, largest), 1e-3)
        return cells

    def _labels(self, font: float) -> tuple[float, float]:
        """The room at the left of the panels and below them."""
        left = _EDGE + _NAME + axes.labels_room(self.rows, font, self.marked)
        return left, axes.labels_room(self.columns, font) + _NAME + _EDGE + 0.04

    def _placed(self, across: int, font: float, cell: float) -> Grid:
        high, wide = len(self.rows) * cell, len(self.columns) * cell
        left, below = self._labels(font)
        boxes = [
            (left + column * (wide + _GAP), self.top + _TITLE + row * (high + _TITLE + _GAP), wide, high)
            for row, column in (divmod(index, across) for index in range(self.count))
        ]
        panels, first, last = across * (wide + _GAP) - _GAP, boxes[0][1], boxes[-1][1] + high
        bottom = last + below  # of all labels
        if self.is_flat:
            length = min(max(panels - 2 * _BAR_SIDE, 1.0), _LONGEST_BAR)
            bar = (max(left + (panels - length) / 2, 2 * _EDGE), bottom + 0.08, length, BAR)
            size = left + panels + 0.1, bar[1] + bar_room(self.scale, length) + _EDGE
        else:
            bar = (left + panels + _BAR_GAP, first, BAR, min(last - first, _LONGEST_BAR))
            scale = first + min(axes.text_width(self.scale, axes.FONT_SIZE), _LONGEST_SCALE) + _EDGE
            size = bar[0] + BAR + _BAR_TEXT, max(bottom, scale)
        return Grid(across, font, cell, size, boxes, bar, self.is_flat, bottom)
