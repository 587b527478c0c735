"""Maps of tokens by tokens: checked, merged to words, subtracted, and drawn as a grid of panels that can be read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures import axes
from captum_vz.visualization.pictures.axes import Chosen, Words
from captum_vz.visualization.pictures.files import Content, Picture, largest, root_figure, set_content
from captum_vz.visualization.pictures.scales import (
    Scale,
    add_colorbar,
    bar_room,
    draw_colorbar,
    make_scale,
    rollouts,
)
from captum_vz.visualization.tokens import one_example, position_of

# In inches. A cell is as high as a line of text.
CELL: Final = 0.17
SMALLEST_SIDE: Final = 1.15  # of the longer side of a panel with few tokens
_ACROSS, _DOWN = "source token", "output token"
_TITLE, _GAP, _HEADING = 0.24, 0.12, 0.3
_NAME: Final = 0.26  # "source token" and "output token"
_BAR_ROOM: Final = 0.75  # of a colour bar with its numbers and its label
_LONGEST_BAR: Final = 2.4
_FONTS: Final = (axes.FONT_SIZE, 7, 6, axes.SMALLEST_FONT)
_SPARSE_FONT: Final = 7
_SMALLEST_CELL: Final = 1 / 72  # of panels in which every k-th token has a label
_GROWTH: Final = (1.0, 1.08, 1.2, 1.35, 1.5, 1.7)  # of pages that are tried if labels do not fit


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
    across, font, cell = _grid(panels, size, _HEADING if title else 0.0, named, columns)
    figure = Picture(figsize=size, dpi=axes.DPI[font < 7])
    high, wide = len(panels.rows.labels) * cell, len(panels.columns.labels) * cell
    titles = _titles(panels, colors, wide)
    for index in range(len(drawn)):
        down, along = divmod(index, across)
        panel = axes.add_axes(figure, along * (wide + _GAP), down * (high + _TITLE + _GAP), wide, high)
        _draw_panel(panel, panels, index, colors, wide, label, titles)
        _label_panel(panel, panels, cell, font, x=index + across >= len(drawn), y=along == 0)
    _name_axes(figure, across)
    add_colorbar(figure, colors, named, size[0] < axes.NARROW_PAGE)
    axes.crop(figure, title)
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
    draw_colorbar(given[-1].inset_axes((1.03, 0, 0.05, 1)), colors, colors.label(label, "panel"), height)
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


def _name_axes(figure: Figure, across: int) -> None:
    """Write what columns and rows are, below and at the left of the middle of the panels."""
    look: dict[str, Any] = {"fontsize": axes.FONT_SIZE + 0.5, "color": "0.25"}
    panels, box, (wide, high) = axes.panels_of(figure), axes.drawn_in(figure), figure.get_size_inches()
    lowest = Bbox.union([panel.get_position() for panel in figure.axes[(len(figure.axes) - 1) // across * across :]])
    figure.text((lowest.x0 + lowest.x1) / 2, box.y0 - 0.04 / high, _ACROSS, va="top", ha="center", **look)
    middle = (panels.y0 + panels.y1) / 2
    figure.text(box.x0 - 0.04 / wide, middle, _DOWN, va="center", ha="right", rotation=90, **look)


def _grid(
    panels: Panels, page: tuple[float, float], top: float, label: str, columns: int | None
) -> tuple[int, float, float]:
    """The number of panels in a row, the font of the labels, and the side of a cell in inches.

    They are those with the largest font that fits the page, or the next larger page. If no page has room for a label of
    each token, every k-th token has one.
    """
    count, rows, wide = len(panels.scores), panels.rows.shown, panels.columns.shown
    choices = [min(columns, count)] if columns else range(1, count + 1)
    largest_cell = max(CELL, SMALLEST_SIDE / max(len(rows), len(wide)))
    is_flat = page[0] < axes.NARROW_PAGE  # the colour bar is below the panels

    def cell(across: int, font: float, limits: tuple[float, float]) -> float:
        down = math.ceil(count / across)
        width = limits[0] - 2 * axes.EDGE - _NAME - axes.labels_room(rows, font, panels.marked)
        height = limits[1] - 2 * axes.EDGE - _NAME - axes.labels_room(wide, font) - top
        if is_flat:
            height -= 0.1 + bar_room(label, min(limits[0] * 0.6, _LONGEST_BAR))
        else:
            width -= _BAR_ROOM
        side = (width - (across - 1) * _GAP) / (across * len(wide))
        return max(min(side, (height - down * (_TITLE + _GAP)) / (down * len(rows)), largest_cell), 1e-3)

    def rank(across: int) -> tuple[float, ...]:
        """How good so many columns are: nearly a square."""
        return round(min(cells[across], 0.1), 2), -abs(across - axes.square(count)), -(-count % across), cells[across]

    limits = [(page[0] * growth, page[1] * growth) for growth in _GROWTH]
    tried = [(font, one, font * axes.LINE) for one in limits for font in _FONTS]
    for font, limit, least in [*tried, *((_SPARSE_FONT, one, _SMALLEST_CELL) for one in limits)]:
        cells = {across: cell(across, font, limit) for across in choices}
        if max(cells.values()) >= least - 1e-9:
            break
    fitting = [across for across in choices if cells[across] >= least - 1e-9]
    across = max(fitting or choices, key=rank if font * axes.LINE == least else cells.__getitem__)
    return across, font, cells[across]


@dataclass(frozen=True)
class Panels:
    """Maps `(rows, columns)` in float64 by their titles, ready to be drawn."""

    scores: dict[str, Tensor]
    rows: axes.Axis
    columns: axes.Axis
    marked: int | None  # a row
    is_difference: bool = False

    def counted(self, scores: Tensor) -> Tensor:
        """The scores that are not dimmed. If all are dimmed: all."""
        rows, columns = self.rows.counted, self.columns.counted
        return scores[rows][:, columns] if rows and columns else scores

    def content(self, title: str, label: str) -> Content:
        """A map in words and as a table."""
        scores, rows, columns = self.scores[title], self.rows.labels, self.columns.labels

        def table() -> list[tuple[Any, ...]]:
            lines = enumerate(scores.tolist())
            return [(title, i, rows[i], j, columns[j], one) for i, line in lines for j, one in enumerate(line)]

        kind = "difference of two maps" if self.is_difference else "map"
        size = f"{len(rows)} tokens"
        if self.rows is not self.columns:
            size = f"{len(rows)} output tokens by {len(columns)} source tokens"
        if self.marked is not None:
            most = largest(scores[self.marked], columns.__getitem__)
            found = f"the row of {rows[self.marked]} has its largest scores at {most}."
        else:
            most = largest(scores, lambda i: f"{rows[i // len(columns)]} from {columns[i % len(columns)]}")
            found = f"the largest scores are {most}."
        names = ("panel", "out", "output token", "in", "source token", label)
        return Content(f"{title}, {kind} of {size}: {found}", names, table)


def prepare_panels(
    maps: Mapping[str, Tensor] | Sequence[Tensor],
    tokens: Sequence[str],
    token: int | None,
    out_tokens: Sequence[str] | None,
    minus: tuple[Any, ...] | None,
    heads: bool,
    words: Any,
    dim: Chosen,
    drop: Chosen,
) -> Panels:
    """Maps that are ready to be drawn; see :func:`draw_maps`."""
    if out_tokens is None:
        outputs, columns = tokens, axes.make_axis(tokens, words, dim, drop)
        rows = columns
    else:
        if words not in (None, True, False) and not (isinstance(words, tuple) and len(words) == 2):
            raise ArgumentError(
                "words are numbers for one side: with out_tokens pass a pair, (sources, outputs), or True."
            )
        in_words, out_words = words if isinstance(words, tuple) else (words, words)
        outputs, columns = out_tokens, axes.make_axis(tokens, in_words, dim, drop)
        # Positions name source tokens, but special tokens are known at both sides.
        rows = axes.make_axis(outputs, out_words, *(one if isinstance(one, str) else None for one in (dim, drop)))
    scores = _merged(maps, rows, columns, heads)
    position = position_of(token, outputs)
    marked = None if position is None else int(rows.member[position])
    if marked == -1:
        raise ArgumentError(
            f"token {token} ({outputs[position or 0]}) is marked and left out: keep it, or mark another."
        )
    found = Panels(scores, rows, columns, marked)
    if minus is None:
        return found
    if out_tokens is not None or not 2 <= len(minus) <= 3:
        raise ArgumentError(
            "minus needs maps of one text: pass (maps, tokens) or (maps, tokens, words), and no out_tokens."
        )
    other = axes.make_axis(minus[1], minus[2] if len(minus) == 3 else words is True, dim, drop)
    return _difference(found, _merged(minus[0], other, other, heads), other.labels)


def _merged(maps: Any, rows: axes.Axis, columns: axes.Axis, heads: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for title, scores in axes.by_title(maps, "draw_maps needs at least one map").items():
        one = one_example(scores, len(rows.member), len(columns.member), heads=heads)
        found |= {f"{title}, head {head}": each for head, each in enumerate(one)} if heads else {title: one}
    return {title: rows.rows(columns.columns(one)) for title, one in found.items()}


def _difference(found: Panels, others: dict[str, Tensor], other: list[str]) -> Panels:
    """The first maps minus the others, of tokens that are aligned by what the two texts share."""
    if found.scores.keys() != others.keys():
        raise ArgumentError(f"minus has the maps {list(others)}: pass the same as maps, {list(found.scores)}.")
    passages = _aligned(found.rows.labels, other)
    labels = [axes.PAIR.join(dict.fromkeys(map(" ".join, pair))) for pair in passages]
    first, second = ([place for place, pair in enumerate(passages) for _ in pair[side]] for side in (0, 1))
    marked = None if found.marked is None else first[found.marked]
    axis = axes.Axis(labels, torch.tensor(first), sorted({first[i] for i in found.rows.dimmed}))
    minus = axes.Axis(labels, torch.tensor(second), [])
    scores = {
        title: axis.columns(axis.rows(mine)) - minus.columns(minus.rows(others[title]))
        for title, mine in found.scores.items()
    }
    return Panels(scores, axis, axis, marked, is_difference=True)


def _aligned(first: Sequence[str], second: Sequence[str]) -> list[tuple[Sequence[str], Sequence[str]]]:
    """Passages that stand for each other: one by one where as many differ as in the other text, else together."""
    groups: list[tuple[Sequence[str], Sequence[str]]] = []
    for _, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if b - a == d - c:
            groups += [([one], [other]) for one, other in zip(first[a:b], second[c:d], strict=True)]
        elif b > a and d > c:
            groups.append((first[a:b], second[c:d]))
        else:
            raise ArgumentError(
                f"The two texts cannot be aligned: {' '.join(first[a:b] or second[c:d])!r} has no partner. Pass texts "
                "that differ in words, with words=True if only their pieces differ."
            )
    return groups
