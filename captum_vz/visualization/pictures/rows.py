"""Rows of scores above each other: one token layer by layer, or the scores of several methods and a truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional.scores import kendall_tau, overlap
from captum_vz.visualization.pictures import axes, scales
from captum_vz.visualization.pictures.axes import Axis, Chosen, Words, by_title, make_axis
from captum_vz.visualization.pictures.files import Content, Picture, largest, set_content
from captum_vz.visualization.tokens import one_example, position_of, quoted, shortened

# In inches.
ROW, WIDE, _TITLE = 0.22, 0.36, 0.28
_NUMBERED: Final = ((0.25, 6.5), (0.2, 5.5))  # the width of a cell and the font of its number in points
_WIDEST_FLAT: Final = 0.8  # of cells whose labels are written horizontally
_SPACE: Final = 0.45  # between groups, in rows
_NOTE: Final = 0.45  # the width of a column of notes, in inches
_FEW: Final = 0.9  # the height of rows above which the colour bar stands at their side
_LONGEST_NAME: Final = 60  # characters


@dataclass(frozen=True)
class Strips:
    """Rows of scores of the same tokens, and how they are drawn."""

    kind: str  # what a row is: "row" or "method"
    names: list[str]
    scores: Tensor  # (rows, columns); NaN is a place without a score
    axis: Axis
    groups: list[Any]  # of each row; there is a gap between groups
    tokens: Sequence[str]
    position: int | None  # of the token that is explained
    label: str  # of the scores
    notes: list[tuple[str, list[str]]] = field(default_factory=list)  # at the right: a head and the texts of the rows

    @property
    def longest(self) -> float:
        """The width of the longest label, in inches."""
        return _widest(self.axis.shown)

    @property
    def tops(self) -> list[float]:
        """The place of each row, in rows, with gaps between groups."""
        tops = [0.0]
        for one, other in pairwise(self.groups):
            tops.append(tops[-1] + 1 + (_SPACE if one != other else 0.0))
        return tops

    @property
    def marked(self) -> int | None:
        """The column of the token that is explained."""
        return self.axis.place_of(self.position)

    def content(self) -> Content:
        """The rows in words and as a table."""
        labels = self.axis.labels
        heading, notes = self.notes[0] if self.notes else ("", [""] * len(self.names))
        parts, rows = list[str](), list[tuple[Any, ...]]()
        for name, line, note in zip(self.names, self.scores, notes, strict=True):
            parts.append(f"{name}: {largest(line, labels.__getitem__, 2)}" + (f" ({heading} {note})" if note else ""))
            cells = enumerate(zip(labels, line.tolist(), strict=True))
            rows += [(name, place, *cell, note)[: 5 if heading else 4] for place, cell in cells]
        about = "" if self.position is None else f" for {self.tokens[self.position]}"
        sentence = f"Scores of {len(labels)} tokens{about}. The largest are, in {'; in '.join(parts)}."
        columns = (self.kind, "in", "source token", self.label, *([heading] if heading else []))
        return Content(sentence, columns, lambda: rows)


def _widest(texts: Sequence[str]) -> float:
    """The width of the widest text in inches."""
    return max(axes.text_width(one, axes.FONT_SIZE) for one in texts)


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
    size: tuple[float, float] = axes.PAGE,
) -> Figure:
    """Draws what one token draws on, layer by layer: a strip of scores for each layer.

    Zero is white. Scores are written into cells where there is room. In a dict, a gap separates rows that are not
    layers, such as "rollout" after "layer 0" and "layer 1".

    Args:
        rows: A dict from names to scores, a list with scores for each layer, or a tensor `(layers, in)`. Scores are
            `(in,)` or `(1, in)`, as `attribute` returns them for one token. Or they are whole maps `(out, in)` or
            `(1, out, in)`, from which the row of `token` is taken.
        tokens: The source tokens, `len(tokens) == in`.
        token: The position of the token that is explained. It is marked. Negative positions count from the end.
        label: The label of the colour scale.
        words: Merges pieces to words, see :func:`draw_maps`. Scores of a word are added.
        dim: Tokens that are drawn pale and do not count for the scale: "special", or positions.
        drop: Tokens that are left out: "special", or positions.
        scale: As in :func:`draw_maps`, with "row" in the place of "panel".
        vmax: The end of the scale, with "shared" or "root". None: the largest score.
        title: A title. None: "What [MASK] draws on" if `token` is given.
        size: The largest width and height in inches, such as (3.3, 3) for a column of a paper.

    Returns:
        A matplotlib figure.

    Raises:
        ArgumentError: Scores do not fit the tokens or are not finite, or an option is wrong.

    >>> import torch
    >>> figure = draw_row(torch.tensor([[0.1, 0.6, 0.3], [0.8, 0.1, 0.1]]), ["the", "pictures", "[MASK]"], token=2)
    >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
    ['layer 0', 'layer 1']
    """
    rows = by_title(rows, "draw_row needs the scores of at least one layer")
    position, axis = position_of(token, tokens), make_axis(tokens, words, dim, drop)
    kept = torch.stack([axis.columns(row_of(scores, tokens, position)) for scores in rows.values()])
    groups = [name.startswith("layer ") for name in rows]
    strips = Strips("row", list(rows), kept, axis, groups, tokens, position, label)
    return _drawn(strips, scale, vmax, title, size)


def row_of(scores: Any, tokens: Sequence[str], position: int | None) -> Tensor:
    """The scores of one token, which may be a row of a whole map."""
    if isinstance(scores, Tensor) and tuple(scores.shape[-2:]) == (len(tokens),) * 2 and scores.dim() >= 2:
        if position is None:
            raise ArgumentError("The scores are whole maps: pass token, the output token whose row is drawn.")
        return one_example(scores, len(tokens), len(tokens))[position]
    return one_example(scores, len(tokens))


def draw_comparison(
    scores: Mapping[str, Tensor],
    tokens: Sequence[str],
    token: int | None = None,
    label: str = "share",
    *,
    truth: Tensor | None = None,
    truth_name: str = "blanking out",
    scopes: Mapping[str, str] | None = None,
    families: Mapping[str, str] | None = None,
    words: Words = None,
    dim: Chosen = None,
    drop: Chosen = None,
    scale: str = "root",
    vmax: float | None = None,
    title: str | None = None,
    size: tuple[float, float] = axes.PAGE,
) -> Figure:
    r"""Draws the scores of several methods for one token: methods down, tokens across.

    The first row can be a truth, such as what blanking out each token does to the prediction. At the right stands how
    far each method agrees with it, from 0 to 1, and in grey the rank correlation of :func:`captum_vz.metrics.kendall`:

    .. math:: 1 - \tfrac12 \textstyle\sum_j \lvert s_j - b_j \rvert

    with shares s of the method and b of the truth, which is 0 where it is NaN. The correlation is that of tokens for
    which the truth is a number. It is left out if fewer than four entries of the truth exceed a hundredth of the
    largest. With a truth, methods of a family are sorted by their agreement.

    Args:
        scores: From the names of methods to scores `(tokens,)` or `(1, tokens)`.
        tokens: The tokens.
        token: See :func:`draw_row`.
        label: The label of the colour scale.
        truth: Scores `(tokens,)` of the first row, NaN where there is no truth. None: there is no such row.
        truth_name: The name of this row.
        scopes: From names of methods to the layers that their scores are about, written after the name.
        families: From names of methods to families. Methods of a family stand together, families apart.
        words: See :func:`draw_row`, like `dim`, `drop`, `title` and `size`.
        dim: See there.
        drop: See there.
        scale: "root": colours by the square root, so that one large score does not leave the others white; "row", where
            each row ends at its own largest score; or "shared".
        vmax: The end of the scale, with "shared" or "root". None: the largest score.
        title: See there.
        size: See there.

    Returns:
        A matplotlib figure, as :func:`draw_row`. The results of :func:`captum_vz.study.compare` draw it by `plot()`.

    Raises:
        ArgumentError: There is no method, scores do not fit the tokens, or an option is wrong.

    >>> rows = {"attention": torch.tensor([0.2, 0.3, 0.5]), "random": torch.tensor([0.4, 0.1, 0.5])}
    >>> truth = torch.tensor([0.1, 0.6, float("nan")])
    >>> figure = draw_comparison(rows, ["the", "pictures", "[MASK]"], token=2, truth=truth)
    >>> [text.get_text() for text in figure.axes[0].texts if "." in text.get_text()][:2]
    ['0.44', '0.24']
    """
    scores = by_title(scores, "draw_comparison needs the scores of at least one method")
    position, axis = position_of(token, tokens), make_axis(tokens, words, dim, drop)
    rows = {name: one_example(row, len(tokens)) for name, row in scores.items()}
    given, agrees = None, dict.fromkeys(rows, 0.0)
    if truth is not None:
        one_example(truth.nan_to_num(nan=0.0) if isinstance(truth, Tensor) else truth, len(tokens))
        given = truth.detach().reshape(-1).double().cpu()
        agrees = {name: float(overlap(row, given).nan_to_num(nan=0.0)) for name, row in rows.items()}
    family = {name: (families or {}).get(name, "") for name in rows}
    order = list(dict.fromkeys(family.values()))
    ordered = sorted(rows, key=lambda name: (order.index(family[name]), -agrees[name]))
    lines = [axis.columns(rows[name]) for name in ordered]
    names = [", ".join(filter(None, [name, (scopes or {}).get(name)])) for name in ordered]
    groups: list[str | None] = [family[name] for name in ordered]
    notes: list[tuple[str, list[str]]] = []
    if given is not None:
        known = axis.columns(given.isfinite().double()) > 0
        right = axis.columns(given.nan_to_num(nan=0.0)).masked_fill(~known, float("nan"))
        for heading, measure in (("agrees", overlap), ("τ", clear_tau)):
            numbers = [float(measure(row, right)) for row in lines]
            notes.append((heading, ["", *(f"{one:.2f}" if one == one else "" for one in numbers)]))
        notes = [one for one in notes if one[0] == "agrees" or any(one[1])]
        lines, names, groups = [right, *lines], [truth_name, *names], [None, *groups]
    strips = Strips("method", names, torch.stack(lines), axis, groups, tokens, position, label, notes)
    return _drawn(strips, scale, vmax, title, size)


def clear_tau(one: Tensor, truth: Tensor) -> float:
    """Kendall's rank correlation, NaN if fewer than four entries of the truth exceed a hundredth of the largest."""
    sizes = truth.double().nan_to_num(nan=0.0).abs()
    return float(kendall_tau(one, truth)) if int((sizes > sizes.max() / 100).sum()) >= 4 else float("nan")


def _drawn(strips: Strips, scale: Any, vmax: float | None, title: str | None, page: Any) -> Figure:
    count, scores = len(strips.axis.labels), strips.scores.nan_to_num(nan=0.0)
    counted = list(scores[:, strips.axis.counted or slice(None)])
    colors = scales.make_scale(list(scores), scale, vmax, counted, part="row")
    name, rows = colors.label(strips.label), strips.tops[-1] + 1
    if title is None and strips.position is not None:
        title = f"What {quoted(strips.tokens[strips.position])} draws on"
    flat_bar = page[0] < axes.NARROW_PAGE or ROW * rows < _FEW
    room = page[0] - 2 * axes.EDGE - _widest([shortened(one, _LONGEST_NAME) for one in strips.names]) - 0.08
    room -= _NOTE * len(strips.notes) + (0 if flat_bar else scales.BAR_ROOM)
    # A cell is as wide as its label, or as a number, or as the room that is left, whichever fits first.
    flat = strips.longest + 0.1
    fits = flat <= _WIDEST_FLAT and flat * count <= room
    cell = max(flat, WIDE) if fits else min(WIDE, max(room, 0.1) / count)
    below = 0.2
    if strips.longest + 0.05 > cell:
        below = axes.labels_room(strips.axis.shown, marked=strips.marked) + 0.05
    if flat_bar:
        below += 0.1 + scales.bar_room(name, min(scales.LONGEST_BAR, max(cell * count, 1.0)))
    above = (_TITLE if title else 0.0) + (0.2 if strips.notes else 0)
    height = max(0.05, min(ROW * rows, page[1] - above - below - 2 * axes.EDGE))
    figure = Picture(figsize=page, dpi=axes.DPI[0])
    _draw(axes.add_axes(figure, 0, 0, cell * count, height), strips, colors, cell, height / rows)
    scales.add_colorbar(figure, colors, name, flat_bar)
    axes.crop(figure, title)
    return figure


def _draw(panel: Axes, strips: Strips, colors: scales.Scale, cell: float, row_height: float) -> None:
    axis, tops = strips.axis, strips.tops
    count, bottom = len(axis.labels), tops[-1] + 1
    for index, top in enumerate(tops):
        place = (-0.5, count - 0.5, top + 0.5, top - 0.5)
        look: dict[str, Any] = {"cmap": colors.colors, "norm": colors.norms[index], "aspect": "auto"}
        panel.imshow(strips.scores[index : index + 1].numpy(), extent=place, **look)
        look = {"fill": False, "edgecolor": "0.6", "linewidth": 0.4, "clip_on": False}
        panel.add_artist(Rectangle((-0.5, top - 0.5), count, 1, **look))
    panel.set(xlim=(-0.5, count - 0.5), ylim=(bottom - 0.5, -0.5))
    panel.spines[:].set_visible(False)
    names = [shortened(one, _LONGEST_NAME) for one in strips.names]
    axes.write_plain_labels(panel.yaxis, tops, names, fontsize=axes.FONT_SIZE)
    panel.tick_params(axis="y", length=0)
    axes.write_labels(panel.xaxis, axis.shown, cell, axes.FONT_SIZE, strips.marked, axis.dimmed)
    if strips.longest + 0.05 <= cell:
        panel.tick_params(axis="x", rotation=0)
    for column in axis.dimmed:
        axes.add_pale(panel, column - 0.5, -0.5, 1, bottom)
    if strips.marked is not None:
        look = {"linewidth": 1.2, "zorder": 2.6, "clip_on": False}
        axes.add_frame(panel, strips.marked - 0.5, -0.5, 1, bottom, **look)
    set_content(panel, strips.content())
    for number, ((heading, notes), ink) in enumerate(zip(strips.notes, ("0.25", "0.6"), strict=False)):
        right = count - 0.5 + _NOTE * (number + 1) / cell
        look = {"fontsize": axes.FONT_SIZE, "color": ink, "ha": "right"}
        for top, note in zip(tops, notes, strict=True):
            panel.text(right, top, note, va="center", **look)
        panel.text(right, -0.8, heading, va="bottom", **look)
    font = next((size for width, size in _NUMBERED if cell >= width), None)
    if font is None or row_height < 0.13:
        return
    for norm, top, line in zip(colors.norms, tops, strips.scores.tolist(), strict=True):
        for column, score in enumerate(line):
            if abs(score) >= 0.005:  # others, and NaN, have no number
                ink = "black" if column in axis.dimmed else scales.ink_on(colors.colors(float(norm(score))))
                panel.text(column, top, scales.short_number(score), ha="center", va="center", color=ink, fontsize=font)
