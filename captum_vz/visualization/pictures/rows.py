"""Rows of scores above each other: one token through the layers, and what `draw_comparison` shares with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import one_example, position_of
from captum_vz.visualization.pictures.description import Content, set_content
from captum_vz.visualization.pictures.parts.fonts import set_label
from captum_vz.visualization.pictures.parts.labels import (
    level_offsets,
    text_width,
    used_levels,
    write_heading,
    write_labels,
    write_plain_labels,
)
from captum_vz.visualization.pictures.parts.layout import NARROW_PAGE, PAGE
from captum_vz.visualization.pictures.parts.panels import Axis, Chosen, Words, make_axis
from captum_vz.visualization.pictures.parts.picture import (
    add_axes,
    axes_list,
    new_picture,
    size_of,
    size_of_axes,
    target_figure,
)
from captum_vz.visualization.pictures.parts.scales import BAR, Scale, add_colorbar, bar_room, make_scale
from captum_vz.visualization.pictures.parts.style import FONT_SIZE, MARK, ink_on, quoted, short_number, shortened


def draw_row(
    rows: Mapping[str, Tensor] | Sequence[Tensor] | Tensor,
    tokens: Sequence[str],
    token: int | None = None,
    label: str = "share of the row",
    *,
    words: Words = None,
    dim: Chosen = None,
    drop: Chosen = None,
    scale: str | None = None,
    vmax: float | None = None,
    title: str | None = None,
    size: tuple[float, float] = PAGE,
    ax: Axes | None = None,
    fig: Figure | SubFigure | None = None,
) -> Figure:
    """Draws what one token draws on, layer by layer: a strip of scores for each layer.

    Zero is white. Scores are written into cells where there is room. In a dict, a gap separates rows that are not
    layers, such as "rollout" after "layer 0" and "layer 1".

    Args:
        rows: A dict from names to scores, or a list with scores for each layer, or a tensor `(layers, in)`. Scores are
            `(in,)` or `(1, in)`, as `attribute` returns them for one token. Or they are whole maps `(out, in)` or
            `(1, out, in)`, from which the row of `token` is taken.
        tokens: The source tokens, `len(tokens) == in`.
        token: The position of the token that is explained. It is marked. Negative positions count from the end.
        label: The label of the colour scale.
        words: Merges pieces to words, see :func:`draw_maps`. Scores of a word are added.
        dim: Tokens that are drawn pale and do not count for the scale: "special", or positions.
        drop: Tokens that are left out: "special", or positions.
        scale: "shared"; "row", where each strip ends at its own largest score; or "root", shared, with colours by the
            square root. None: "root" for shares, which are not negative and sum to at most 1; else "shared".
        vmax: The end of the scale, with "shared" or "root". None: the largest score.
        title: A title. None: "What [MASK] draws on" if `token` is given.
        size: The width and height of the page in inches, such as (3.3, 3) for a column of a paper. The figure is no
            larger.
        ax: Axes to draw into.
        fig: A figure or a subfigure to draw into.

    Returns:
        A matplotlib figure: a new one, `fig`, or the figure of `ax`.

    Raises:
        ArgumentError: There is no row, scores do not fit the tokens or are not finite, maps come without `token`, or an
            option has an unknown value.

    >>> import torch
    >>> figure = draw_row(torch.tensor([[0.1, 0.6, 0.3], [0.8, 0.1, 0.1]]), ["the", "pictures", "[MASK]"], token=2)
    >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
    ['layer 0', 'layer 1']
    """
    if not isinstance(rows, Mapping):
        rows = {f"layer {index}": scores for index, scores in enumerate(rows)}
    if not rows:
        raise ArgumentError("draw_row needs the scores of at least one layer, got none.")
    position = position_of(token, tokens)
    axis = make_axis(tokens, words, dim, drop)
    kept = torch.stack([axis.columns(row_of(scores, tokens, position)) for scores in rows.values()])
    marked, explained, title = explained_token(axis, tokens, position, title)
    names = list(rows)
    strips = Strips(names, kept, axis.labels, marked, axis.dimmed, [name.startswith("layer ") for name in names])
    content = strips_content(strips, explained, label, "row")
    return draw_strips(strips, content, scale, vmax, label, title, size, ax, fig)


def explained_token(
    axis: Axis, tokens: Sequence[str], position: int | None, title: str | None
) -> tuple[int | None, str | None, str | None]:
    """The column of the explained token, unless it is left out, the token, and the title."""
    if position is None:
        return None, None, title
    column = int(axis.member[position])
    name = f"What {quoted(tokens[position])} draws on" if title is None else title
    return column if column >= 0 else None, tokens[position], name


def row_of(scores: Any, tokens: Sequence[str], position: int | None) -> Tensor:
    """The scores of one token, which may be a row of a whole map."""
    if isinstance(scores, Tensor) and tuple(scores.shape[-2:]) == (len(tokens),) * 2 and scores.dim() >= 2:
        if position is None:
            raise ArgumentError("The scores are whole maps: pass token, the output token whose row is drawn.")
        return one_example(scores, tokens, dimensions=2)[position]
    return one_example(scores, tokens, dimensions=1)


def strips_content(strips: Strips, explained: str | None, label: str, kind: str) -> Content:
    """Rows of scores in words and as a table."""

    def table() -> list[tuple[Any, ...]]:
        lines = strips.scores.tolist()
        notes = strips.notes or [""] * len(strips.names)
        return [
            (name, place, token, score, *([note] if strips.notes else []))
            for name, line, note in zip(strips.names, lines, notes, strict=True)
            for place, (token, score) in enumerate(zip(strips.labels, line, strict=True))
        ]

    parts = []
    for index, name in enumerate(strips.names):
        line = strips.scores[index].nan_to_num(nan=0.0)
        best = line.abs().topk(min(2, len(line))).indices.tolist()
        most = ", ".join(f"{strips.labels[i]} {float(line[i]):.2f}" for i in best)
        note = f" ({strips.headings[0]} {strips.notes[index]})" if strips.notes and strips.notes[index] else ""
        parts.append(f"{name}: {most}{note}")
    about = "" if explained is None else f" for {explained}"
    sentence = f"Scores of {len(strips.labels)} tokens{about}. The largest are, in {'; in '.join(parts)}."
    columns = (kind, "in", "source token", label, *([strips.headings[0]] if strips.notes else []))
    return Content(sentence, columns, table)


# In inches.
ROW, WIDE = 0.22, 0.36
_NUMBERED: Final = ((0.25, 6.5), (0.2, 5.5))  # the width of a cell and the font of its number in points
_WIDEST_FLAT: Final = 0.8  # of cells whose labels are written horizontally
_LONGEST_BAR: Final = 2.2
_SPACE: Final = 0.45  # between groups, in rows
_BAR_TEXT, _EDGE = 0.62, 0.06
_FEW: Final = 0.9  # the height of rows above which the colour bar stands at their side


@dataclass(frozen=True)
class Strips:
    """Rows of scores of the same tokens.

    Attributes:
        names: The label of each row.
        scores: `(rows, columns)`. NaN is a place without a score.
        labels: The label of each column.
        marked: The marked column. None: none.
        dimmed: Columns that are drawn pale.
        groups: The group of each row. There is a gap between groups.
        notes: What stands at the right of each row; empty: nothing.
        headings: What stands above the notes and the pale notes.
        pale: What stands right of the notes, in grey.
    """

    names: list[str]
    scores: Tensor
    labels: list[str]
    marked: int | None
    dimmed: list[int]
    groups: list[Any]
    notes: list[str] = field(default_factory=list)
    headings: tuple[str, str] = ("", "")
    pale: list[str] = field(default_factory=list)

    @property
    def shown(self) -> list[str]:
        """The written labels of the columns."""
        return [shortened(one) for one in self.labels]


def draw_strips(
    strips: Strips,
    content: Content,
    scale: str | None,
    vmax: float | None,
    label: str,
    title: str | None,
    page: tuple[float, float],
    ax: Any,
    fig: Any,
) -> Any:
    """Draw the rows into a new figure, a given figure, or given axes. Returns the figure."""
    target_figure(ax, fig)
    if scale not in (None, "shared", "row", "root"):
        raise ArgumentError(f"scale is {scale!r}: pass 'shared', 'row' or 'root'.")
    kept = [i for i in range(len(strips.labels)) if i not in strips.dimmed] or list(range(len(strips.labels)))
    drawn = strips.scores.nan_to_num(nan=0.0)
    rows = list(drawn)
    colors = make_scale(rows, "panel" if scale == "row" else scale, vmax, list(drawn[:, kept]))
    tops = _tops(strips.groups)
    if ax is not None:
        (panel,) = axes_list(ax, 1)
        wide, high = size_of_axes(panel)
        _draw(panel, strips, colors, tops, wide / len(strips.labels), high / (tops[-1] + 1))
        set_content(panel, content)
        bar = panel.inset_axes((1.03 + (0.12 if strips.notes else 0), 0, 0.04, 1))
        add_colorbar(bar, colors, colors.label(label, "row"), high)
        if title:
            set_label(panel.set_title(title, fontsize=FONT_SIZE + 2, pad=14 if strips.notes else 4))
        return panel.figure
    left = _EDGE + max(text_width(shortened(name, 60), FONT_SIZE) for name in strips.names) + 0.08
    right = 0.12 + sum(_columns_of_notes(strips))
    fixed = None if fig is None else size_of(fig)
    limits = fixed or page
    height = ROW * (tops[-1] + 1)
    flat_bar = limits[0] < NARROW_PAGE or height < _FEW
    side = 0 if flat_bar else BAR + _BAR_TEXT
    shown = strips.shown
    cell = _cell(shown, limits[0] - left - right - side)
    across = cell * len(strips.labels)
    name = colors.label(label, "row")
    below = 0.2
    if not _is_flat(shown, cell):
        below = level_offsets(shown, used_levels(cell, FONT_SIZE), FONT_SIZE, strips.marked)[-1] / 72 + 0.05
    length = min(_LONGEST_BAR, max(across, 1.0))
    if flat_bar:
        below += 0.1 + bar_room(name, length)
    above = _EDGE + (0.28 if title else 0.04) + (0.2 if strips.headings[0] else 0)
    height = max(0.05, min(height, limits[1] - above - below - _EDGE))
    total = above + height + below + _EDGE
    if not flat_bar:
        total = max(total, above + min(text_width(name, FONT_SIZE), 3) + _EDGE)
    heading = text_width(title, FONT_SIZE + 2) if title else 0
    size = fixed or (min(max(across + right + side, length + 0.15, heading + 0.1) + left, limits[0]), total)
    figure = new_picture(size) if fig is None else fig
    panel = add_axes(figure, (left, above, across, height), size)
    _draw(panel, strips, colors, tops, cell, height / (tops[-1] + 1))
    set_content(panel, content)
    if flat_bar:
        bar = add_axes(figure, (left, above + height + below - bar_room(name, length), length, BAR), size)
        add_colorbar(bar, colors, name, length, flat=True)
    else:
        length = min(_LONGEST_BAR, max(height, 0.8))
        bar = add_axes(figure, (left + across + right, above, BAR, length), size)
        add_colorbar(bar, colors, name, length, size[1] - above)
    if title:
        write_heading(figure, title, left, 0.05, size, fontsize=FONT_SIZE + 2)
    return figure


def _tops(groups: Sequence[Any]) -> list[float]:
    """The place of each row, in rows, with gaps between groups."""
    tops = [0.0]
    for one, other in pairwise(groups):
        tops.append(tops[-1] + 1 + (_SPACE if one != other else 0.0))
    return tops


def _cell(labels: Sequence[str], room: float) -> float:
    """The width of a cell: the width of its label, or of a number, or the room that is left, whichever fits first."""
    flat = max(text_width(one, FONT_SIZE) for one in labels) + 0.1
    if flat <= _WIDEST_FLAT and flat * len(labels) <= room:
        return max(flat, WIDE)
    return min(WIDE, max(room, 0.1) / len(labels))


def _is_flat(labels: Sequence[str], cell: float) -> bool:
    return max(text_width(one, FONT_SIZE) for one in labels) + 0.05 <= cell


def _draw(panel: Axes, strips: Strips, colors: Scale, tops: list[float], cell: float, row_height: float) -> None:
    count = len(strips.labels)
    for index, top in enumerate(tops):
        shown = strips.scores[index : index + 1].numpy()
        place = (-0.5, count - 0.5, top + 0.5, top - 0.5)
        panel.imshow(shown, cmap=colors.colors, norm=colors.norms[index], extent=place, aspect="auto")
        frame: dict[str, Any] = {"fill": False, "edgecolor": "0.6", "linewidth": 0.4, "clip_on": False}
        panel.add_artist(Rectangle((-0.5, top - 0.5), count, 1, **frame))
    panel.set_xlim(-0.5, count - 0.5)
    panel.set_ylim(tops[-1] + 0.5, -0.5)
    panel.spines[:].set_visible(False)
    write_plain_labels(panel.yaxis, tops, [shortened(name, 60) for name in strips.names], fontsize=FONT_SIZE)
    panel.tick_params(axis="y", length=0)
    write_labels(panel.xaxis, strips.shown, cell, FONT_SIZE, strips.marked, strips.dimmed)
    if _is_flat(strips.shown, cell):
        panel.tick_params(axis="x", rotation=0)
    for column in strips.dimmed:
        pale: dict[str, Any] = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "zorder": 1.5}
        panel.add_artist(Rectangle((column - 0.5, -0.5), 1, tops[-1] + 1, **pale))
    if strips.marked is not None:
        look: dict[str, Any] = {"fill": False, "edgecolor": MARK, "linewidth": 1.2, "zorder": 2.6, "clip_on": False}
        panel.add_patch(Rectangle((strips.marked - 0.5, -0.5), 1, tops[-1] + 1, **look))
    left = count - 0.5 + 0.08 / cell
    for wide, notes, heading, ink in zip(
        _columns_of_notes(strips), (strips.notes, strips.pale), strips.headings, ("0.25", "0.6"), strict=False
    ):
        look = {"fontsize": FONT_SIZE, "color": ink}
        for top, note in zip(tops, notes, strict=False):
            panel.text(left, top, note, va="center", **look)
        panel.text(left + (wide - 0.1) / cell, -0.8, heading, va="bottom", ha="right", **look)
        left += wide / cell
    font = next((size for width, size in _NUMBERED if cell >= width), None)
    if font is not None and row_height >= 0.13:
        _write_numbers(panel, strips, colors, tops, font)


def _columns_of_notes(strips: Strips) -> list[float]:
    """The widths of the columns of notes, in inches."""
    columns = [
        [*notes, heading]
        for notes, heading in zip((strips.notes, strips.pale), strips.headings, strict=True)
        if any(notes)
    ]
    return [0.1 + max(text_width(one, FONT_SIZE) for one in column) for column in columns]


def _write_numbers(panel: Axes, strips: Strips, colors: Scale, tops: list[float], font: float) -> None:
    """The scores in their cells. Cells that round to 0.00 have no number."""
    shades = colors.mappable().get_cmap()
    for index, (top, line) in enumerate(zip(tops, strips.scores.tolist(), strict=True)):
        for place, score in enumerate(line):
            if score == score and abs(score) >= 0.005:
                ink = "black" if place in strips.dimmed else ink_on(shades(float(colors.norms[index](score))))
                panel.text(place, top, short_number(score), ha="center", va="center", color=ink, fontsize=font)
