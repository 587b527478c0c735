"""A figure of maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase, SubFigure
from matplotlib.patches import Rectangle
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures.description import set_content
from captum_vz.visualization.pictures.parts.labels import (
    fit_titles,
    hide_labels,
    write_heading,
    write_labels,
    write_title,
)
from captum_vz.visualization.pictures.parts.layout import PAGE, Wanted, make_grid
from captum_vz.visualization.pictures.parts.panels import Chosen, Panels, Words, map_content, prepare_panels
from captum_vz.visualization.pictures.parts.picture import (
    add_axes,
    axes_list,
    is_outer,
    name_axes,
    new_picture,
    size_of,
    size_of_axes,
    target_figure,
)
from captum_vz.visualization.pictures.parts.scales import Scale, ScaleName, add_colorbar, make_scale
from captum_vz.visualization.pictures.parts.style import FONT_SIZE, MARK

_FAINT: Final = 0.2  # of the scale: a panel without larger scores looks white


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
    scale: ScaleName = None,
    vmax: float | None = None,
    columns: int | None = None,
    size: tuple[float, float] = PAGE,
    title: str | None = None,
    ax: Axes | Sequence[Axes] | None = None,
    fig: Figure | SubFigure | None = None,
) -> Figure:
    """Draws maps as panels of a grid. Rows are output tokens, columns are source tokens.

    Zero is white. Panels share one scale, which ends at the largest score. Colours of shares are by the square root, so
    that small shares can be seen. A rollout has an end of its own, which its title names. To compare two figures, pass
    the same `vmax` to both: 1 for rows that sum to 1. If a score is negative, the scale is centred at 0: blue above,
    red below. Labels are written once, at the left and lower edges of the grid. The figure fits a page. It is larger
    only if its labels could not be read otherwise. It is not registered with pyplot, so it need not be closed.

    Args:
        maps: A dict from the titles of the panels to maps, or a list of maps, one for each layer. Maps in a list are
            titled "layer 0", "layer 1" and so on. A map is `(out, in)`, or `(1, out, in)` as `attribute` returns it for
            one sentence.
        tokens: The source tokens, `len(tokens) == in`.
        token: The position of the output token whose row is marked. Negative positions count from the end.
        label: The label of the colour scale, such as "share of the row" for rows that sum to 1.
        out_tokens: The output tokens of maps of cross-attention, `len(out_tokens) == out`. None: the source tokens.
        minus: Maps that are subtracted, and their tokens: `(maps, tokens)` or `(maps, tokens, words)`. The two texts
            are aligned. Tokens that differ are labelled with both, and passages of different lengths become one. The
            label of the scale says which text is subtracted.
        heads: Whether maps hold heads, `(heads, out, in)` or `(1, heads, out, in)`, which become panels of their own.
        words: Merges pieces to words. It is the number of each token's word, as `word_ids()` of a tokenizer's output,
            or True, which reads the marks "##", "Ġ" and "▁". Columns of a word are added, its rows are averaged, so
            rows keep their sums. With `out_tokens`: True, or a pair of numbers for sources and for outputs.
        dim: Tokens that are drawn pale and do not count for the scale: "special", or positions.
        drop: Tokens that are left out: "special", or positions. The other scores do not change. Positions of `dim` and
            `drop` count source tokens, and output tokens if these are the same.
        scale: "shared": one scale for all panels. A panel without scores above a fifth of its end names its largest
            score. "panel": each panel ends at its own largest score, which its title says. "root": shared, with colours
            by the square root. None: "root" for shares, which are not negative and have rows that sum to at most 1,
            else "shared"; unless `vmax` is given, panels whose titles have the word "rollout" end at their own largest
            score.
        vmax: The end of the scale of all panels, with "shared" or "root". None: the largest score.
        columns: The number of panels in a row. None: the number that uses the page best.
        size: The width and height of the page in inches.
        title: A title above the panels.
        ax: Axes to draw into, one for each panel. In a grid of axes, labels are at the left and lower edges. The scale
            is drawn at the right of the last one.
        fig: A figure or a subfigure to draw into, which keeps its size.

    Returns:
        A matplotlib figure: a new one, `fig`, or the figure of `ax`. `figure.savefig("maps.png")` writes it to a file,
        and a notebook shows it. :func:`describe` gives its numbers.

    Raises:
        ArgumentError: There is no map. A map does not fit the tokens, or is a batch of several examples. Scores are not
            finite. `token` is out of range or left out. An option has an unknown value.

    >>> from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> layers = find_layers(model)
    >>> maps = {f"layer {i}": scores for i, scores in enumerate(ValueZeroing(model, layers).attribute(inputs))}
    >>> maps["rollout, residual 0.5"] = ValueZeroingRollout(model, layers, residual=0.5).attribute(inputs)
    >>> figure = draw_maps(maps, inputs.tokens(), token=6, label="share of the row", vmax=1)
    >>> [panel.get_title() for panel in figure.axes[:5]]
    ['layer 0', 'layer 1', 'layer 2', 'layer 3', 'rollout, residual 0.5']
    """
    target_figure(ax, fig)
    if columns is not None and columns < 1:
        raise ArgumentError(f"columns is {columns}: pass the number of panels in a row, at least 1.")
    panels = prepare_panels(maps, tokens, token, out_tokens, minus, heads, words, dim, drop)
    label = panels.scale_label(label)
    drawn = list(panels.scores.values())
    apart = [place for place, name in enumerate(panels.scores) if "rollout" in name.lower()]
    colors = make_scale(drawn, scale, vmax, [panels.counted(one) for one in drawn], apart)
    if ax is not None:
        return _draw_into(axes_list(ax, len(drawn)), panels, colors, label)
    wanted = Wanted(len(drawn), *panels.shown, bool(title), colors.label(label, "panel"), panels.marked)
    grid = make_grid(wanted, columns, size if fig is None else size_of(fig), fixed=fig is not None)
    figure = new_picture(grid.size, grid.font) if fig is None else fig
    titles = _titles(panels, colors, grid.boxes[0][2])
    for index, box in enumerate(grid.boxes):
        panel = add_axes(figure, box, grid.size)
        _draw_panel(panel, panels, index, colors, box[2], label, titles)
        is_lowest = index + grid.columns >= len(drawn)
        _label_panel(panel, panels, grid.cell, grid.font, x=is_lowest, y=index % grid.columns == 0)
    bar = add_axes(figure, grid.bar, grid.size)
    length = max(grid.bar[2:])
    add_colorbar(bar, colors, wanted.scale, length, None if grid.flat else grid.size[1] - grid.bar[1], grid.flat)
    name_axes(figure, grid.size, *panels.axis_names, grid.boxes, grid.bottom)
    if title:
        write_heading(figure, title, grid.boxes[0][0], 0.06, grid.size)
    return figure  # type: ignore[return-value]  # a subfigure has the same methods


def _draw_into(axes: list[Axes], panels: Panels, colors: Scale, label: str) -> Figure:
    """Draw panels into the axes of a user."""
    titles = _titles(panels, colors, min(size_of_axes(panel)[0] for panel in axes))
    for index, panel in enumerate(axes):
        width, height = size_of_axes(panel)
        _draw_panel(panel, panels, index, colors, width, label, titles)
        cell = min(width / len(panels.column_labels), height / len(panels.row_labels))
        x, y = is_outer(panel, axes)
        _label_panel(panel, panels, cell, FONT_SIZE, x=x, y=y)
        across, down = panels.axis_names
        panel.set_xlabel(across if x else "", fontsize=FONT_SIZE)
        panel.set_ylabel(down if y else "", fontsize=FONT_SIZE)
    add_colorbar(axes[-1].inset_axes((1.03, 0, 0.05, 1)), colors, colors.label(label, "panel"), height)
    figure: FigureBase | None = axes[-1].figure
    return figure  # type: ignore[return-value]  # as above


def _draw_panel(
    panel: Axes,
    panels: Panels,
    index: int,
    colors: Scale,
    width: float,
    label: str,
    titles: tuple[list[str], float],
) -> None:
    name, scores = list(panels.scores.items())[index]
    panel.imshow(scores.numpy(), cmap=colors.colors, norm=colors.norms[index], interpolation="nearest")
    write_title(panel, titles[0][index], titles[1])
    panel.spines[:].set_linewidth(0.5)
    high, wide = scores.shape
    pale: dict[str, Any] = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "zorder": 1.5}
    for row in panels.dimmed_rows:
        panel.add_artist(Rectangle((-0.5, row - 0.5), wide, 1, **pale))
    for column in panels.dimmed_columns:
        panel.add_artist(Rectangle((column - 0.5, -0.5), 1, high, **pale))
    if panels.marked is not None:
        line = min(1.2, 72 * width / wide * 0.2)
        look: dict[str, Any] = {"fill": False, "edgecolor": MARK, "linewidth": line}
        look |= {"clip_on": False, "zorder": 2.6}  # above the frame of the panel
        panel.add_patch(Rectangle((-0.5, panels.marked - 0.5), wide, 1, **look))
    set_content(panel, map_content(name, panels, scores, label))


def _titles(panels: Panels, colors: Scale, width: float) -> tuple[list[str], float]:
    """The titles of panels. Panels with their own scale, and nearly white panels, show their largest score."""
    titles = []
    for index, (name, scores) in enumerate(panels.scores.items()):
        highest, end = float(panels.counted(scores).abs().max()), colors.end(index)
        is_faint = 0 < highest < _FAINT * end and not colors.root
        has_end = colors.own or index in colors.apart
        note = f" (to {end:.2g})" if has_end else f" (up to {highest:.2g})" if is_faint else ""
        titles.append(f"{name}{note}")
    return fit_titles(titles, width)


def _label_panel(panel: Axes, panels: Panels, cell: float, font: float, *, x: bool, y: bool) -> None:
    hide_labels(panel, x=not x, y=not y)
    rows, across = panels.shown
    if y:
        write_labels(panel.yaxis, rows, cell, font, panels.marked, panels.dimmed_rows)
    if x:
        write_labels(panel.xaxis, across, cell, font, None, panels.dimmed_columns)
