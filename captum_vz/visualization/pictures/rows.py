"""One token through the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import one_example, position_of
from captum_vz.visualization.pictures.description import Content
from captum_vz.visualization.pictures.parts.layout import PAGE
from captum_vz.visualization.pictures.parts.sources import Axis, Chosen, Words, make_axis
from captum_vz.visualization.pictures.parts.style import quoted
from captum_vz.visualization.pictures.strips import Strips, draw_strips


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
