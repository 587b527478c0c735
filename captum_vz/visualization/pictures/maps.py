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
from captum_vz.visualization.pictures import axes, scales
from captum_vz.visualization.pictures.axes import Chosen, Words
from captum_vz.visualization.pictures.files import Content, Picture, largest, root_figure, set_content
from captum_vz.visualization.tokens import one_example, position_of

# In inches. A cell is as high as a line of text.
CELL: Final = 0.17
SMALLEST_SIDE: Final = 1.15  # of the longer side of a panel with few tokens
_ACROSS, _DOWN = "source token", "output token"
_TITLE, _GAP, _HEADING = 0.24, 0.12, 0.3
_NAME: Final = 0.26  # "source token" and "output token"
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
    rows, sources = _axes_of(tokens, out_tokens, words, dim, drop)
    outputs = tokens if out_tokens is None else out_tokens
    position = position_of(token, outputs)
    panels = Panels(_merged(maps, rows, sources, heads), rows, sources, rows.place_of(position))
    if position is not None and panels.marked is None:
        raise ArgumentError(f"token {token} ({outputs[position]}) is marked and left out: keep it, or mark another.")
    if minus is not None:
        if out_tokens is not None or not 2 <= len(minus) <= 3:
            raise ArgumentError(
                "minus needs maps of one text: pass (maps, tokens) or (maps, tokens, words), and no out_tokens."
            )
        other = axes.make_axis(minus[1], minus[2] if len(minus) == 3 else words is True, dim, drop)
        panels = _difference(panels, _merged(minus[0], other, other, heads), other.labels)
        label = f"{label}, first text minus second"
    drawn = list(panels.scores.values())
    counted = [panels.counted(one) for one in drawn]
    colors = scales.make_scale(drawn, scale, vmax, counted, scales.rollouts(panels.scores))
    named = colors.label(label)
    if ax is not None:
        return _draw_into(ax, panels, colors, label, named)
    across, font, cell = _grid(panels, size, _HEADING if title else 0.0, named, columns)
    figure = Picture(figsize=size, dpi=axes.DPI[font < 7])
    high, wide = len(panels.rows.labels) * cell, len(panels.columns.labels) * cell
    places = [divmod(index, across) for index in range(len(drawn))]
    down, along = high + _TITLE + _GAP, wide + _GAP
    given = [axes.add_axes(figure, along * right, down * below, wide, high) for below, right in places]
    edges = [(index + across >= len(drawn), index % across == 0) for index in range(len(drawn))]
    _draw_panels(given, edges, panels, colors, label, font)
    _name_axes(figure, across)
    scales.add_colorbar(figure, colors, named, size[0] < axes.NARROW_PAGE)
    axes.crop(figure, title)
    return figure


def _draw_into(ax: Any, panels: Panels, colors: scales.Scale, label: str, named: str) -> Figure:
    """Draw into axes of a user, with names and labels at the left and lower edges of a grid."""
    given = [ax] if isinstance(ax, Axes) else list(getattr(ax, "flat", ax))
    if len(given) != (count := len(panels.scores)):
        raise ArgumentError(f"ax holds {len(given)} axes, but there are {count} panels: pass one for each panel.")
    specs = [panel.get_subplotspec() for panel in given]
    edges = [(one is None or one.is_last_row(), one is None or one.is_first_col()) for one in specs]
    _draw_panels(given, edges, panels, colors, label, axes.FONT_SIZE)
    for panel, (is_lowest, is_first) in zip(given, edges, strict=True):
        panel.set_xlabel(_ACROSS if is_lowest else "", fontsize=axes.FONT_SIZE)
        panel.set_ylabel(_DOWN if is_first else "", fontsize=axes.FONT_SIZE)
    scales.draw_colorbar(given[-1].inset_axes((1.03, 0, 0.05, 1)), colors, named, axes.size_of(given[-1])[1])
    return root_figure(given[-1].figure)


def _draw_panels(
    given: list[Axes], edges: list[tuple[bool, bool]], panels: Panels, colors: scales.Scale, label: str, font: float
) -> None:
    """Draw each panel into its axes. `edges`: whether the axes are the lowest ones, and the first ones."""
    rows, columns, marked = panels.rows, panels.columns, panels.marked
    high, wide = len(rows.labels), len(columns.labels)
    titles, width = colors.titled(panels.scores), min(axes.size_of(one)[0] for one in given)
    title_font = axes.largest_font(titles, width, axes.FONT_SIZE + 1.5)
    # A title that is wider than its panel has two lines, or is cut.
    titles = [axes.in_lines(one, width, title_font, 3, max_lines=2, placeholder="…") for one in titles]
    for index, (panel, (name, scores)) in enumerate(zip(given, panels.scores.items(), strict=True)):
        panel.imshow(scores.numpy(), cmap=colors.colors, norm=colors.norms[index], interpolation="nearest")
        axes.set_label(panel.set_title(titles[index], fontsize=title_font, pad=3))
        panel.spines[:].set_linewidth(0.5)
        for row in rows.dimmed:
            axes.add_pale(panel, -0.5, row - 0.5, wide, 1)
        for column in columns.dimmed:
            axes.add_pale(panel, column - 0.5, -0.5, 1, high)
        width, height = axes.size_of(panel)
        if marked is not None:  # above the frame of the panel
            look: dict[str, Any] = {"clip_on": False, "zorder": 2.6, "linewidth": min(1.2, 72 * width / wide * 0.2)}
            axes.add_frame(panel, -0.5, marked - 0.5, wide, 1, **look)
        panel.set(xticks=[], yticks=[])
        is_lowest, is_first = edges[index]
        cell = min(width / wide, height / high)
        if is_first:
            axes.write_labels(panel.yaxis, rows.shown, cell, font, marked, rows.dimmed)
        if is_lowest:
            axes.write_labels(panel.xaxis, columns.shown, cell, font, None, columns.dimmed)
        set_content(panel, panels.content(name, label))


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
            height -= 0.1 + scales.bar_room(label, min(limits[0] * 0.6, scales.LONGEST_BAR))
        else:
            width -= scales.BAR_ROOM
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


def _axes_of(
    tokens: Sequence[str], out_tokens: Sequence[str] | None, words: Any, dim: Chosen, drop: Chosen
) -> tuple[axes.Axis, axes.Axis]:
    """The rows and the columns. Positions name source tokens, but special tokens are known at both sides."""
    if out_tokens is None:
        both = axes.make_axis(tokens, words, dim, drop)
        return both, both
    if words not in (None, True, False) and not (isinstance(words, tuple) and len(words) == 2):
        raise ArgumentError("words are numbers for one side: with out_tokens pass a pair, (sources, outputs), or True.")
    in_words, out_words = words if isinstance(words, tuple) else (words, words)
    named = (one if isinstance(one, str) else None for one in (dim, drop))
    return axes.make_axis(out_tokens, out_words, *named), axes.make_axis(tokens, in_words, dim, drop)


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
