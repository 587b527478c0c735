"""The strongest paths from a token down through the layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import groupby, pairwise
from typing import Any, Final

import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional import Residual, add_residual
from captum_vz.visualization.pictures import axes
from captum_vz.visualization.pictures.axes import Words, make_axis
from captum_vz.visualization.pictures.files import Content, Picture, set_content
from captum_vz.visualization.pictures.scales import COLORS, short_number
from captum_vz.visualization.tokens import one_example, position_of, quoted

_EDGE_COLOR: Final = "#2171b5"
_NUMBER: Final = 6.5  # points
_LEVEL, _COLUMN = 0.5, 0.6  # inches
_THICKEST: Final = 7.0  # points, of an edge with all of the flow
_LEGEND: Final = 7  # points


def draw_route(
    maps: Sequence[Tensor],
    tokens: Sequence[str],
    token: int,
    *,
    threshold: float = 0.04,
    paths: int = 1,
    residual: Residual = None,
    words: Words = None,
    title: str | None = None,
    size: tuple[float, float] = axes.PAGE,
) -> Figure:
    r"""Draws the routes by which a token draws on the input: a graph of tokens by layers.

    .. math:: F_L = e_i, \qquad E_l = \operatorname{diag}(F_{l+1})\, S_l, \qquad F_l = E_l^\top \mathbf 1

    :math:`S_l` is the map of layer l with its residual added, and i is the token. :math:`F_l` is the share of each
    token before layer l. :math:`E_l` is the share of each edge. :math:`F_0` is the token's row of the rollout. Edges
    with at least `threshold` of the whole are drawn if they are connected to the token, as wide as their share. The
    strongest paths, with the largest product of scores, are drawn in the colour of the mark. Numbers are the scores of
    the steps of the first.

    Args:
        maps: A map `(tokens, tokens)` or `(1, tokens, tokens)` for each layer, first layer first, whose rows sum to 1.
        tokens: The tokens.
        token: The position of the token at which all routes end. Negative positions count from the end.
        threshold: The smallest share of an edge that is drawn, more than 0 and at most 1.
        paths: How many of the strongest paths are marked.
        residual: None, 0.5, "renormalize" or "add", see :func:`captum_vz.functional.add_residual`.
        words: Merges pieces to words, see :func:`draw_maps`.
        title: A title. None: "Where [MASK] draws from".
        size: The width and height of the page in inches.

    Returns:
        A matplotlib figure. :func:`describe` lists its edges and paths.

    Raises:
        ArgumentError: Maps do not fit the tokens, or are no shares. An option is out of range.

    >>> first = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.1, 0.3, 0.6]])
    >>> second = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1]])
    >>> figure = draw_route([first, second], ["the", "pictures", "[MASK]"], token=2)
    >>> figure.axes[0].get_title()
    'Where [MASK] draws from'
    """
    if not 0 < threshold <= 1:
        raise ArgumentError(f"threshold is {threshold!r}: pass a share above 0 and at most 1.")
    axis, count = make_axis(tokens, words), len(tokens)
    layers = [axis.rows(axis.columns(one_example(one, count, count))) for one in maps]
    if not layers:
        raise ArgumentError("draw_route needs the map of at least one layer, got none.")
    steps = [add_residual(one[None], residual)[0].double() for one in layers]
    for layer, step in enumerate(steps):
        if bool((step < 0).any()) or float(step.sum(1).max()) > 1.01:
            raise ArgumentError(
                f"The map of layer {layer} has scores from {float(step.min()):.3g} and rows with a sum of up to "
                f"{float(step.sum(1).max()):.3g}: pass maps of shares, whose rows sum to 1."
            )
    start = int(axis.member[position_of(token, tokens) or 0])
    edges, strongest = route_edges(steps, start, threshold), strongest_paths(steps, start, paths)
    route = Route(axis.labels, start, steps, edges, strongest, threshold)
    labels = axis.shown
    left = axes.text_width(f"layer {len(steps)}", axes.FONT_SIZE) + 0.2
    width = min(size[0] - left - 0.15, max(_COLUMN * len(labels), 1.6))
    below = axes.labels_room(labels, marked=start) + 0.1
    below += _LEGEND * axes.LINE * (route.legend(width).count("\n") + 1) + 0.1
    room = size[1] - below - 0.35
    height = min(room, _LEVEL * (len(steps) + 1))
    figure = Picture(figsize=size, dpi=axes.DPI[0])
    panel = axes.add_axes(figure, left, 0.32, width, height)
    _draw(panel, route, labels, width / len(labels), height / (len(steps) + 1))
    title = f"Where {quoted(axis.labels[start])} draws from" if title is None else title
    axes.set_label(panel.set_title(title, fontsize=axes.FONT_SIZE + 2))
    panel.set_xlabel(route.legend(width), fontsize=_LEGEND, color="0.25", labelpad=5)
    set_content(panel, route.content())
    axes.crop(figure)
    return figure


@dataclass(frozen=True)
class Route:
    """What is drawn."""

    labels: list[str]
    start: int  # the token at which all routes end
    steps: list[Tensor]  # the map of each layer, with its residual
    edges: list[tuple[int, int, int, float]]
    paths: list[tuple[float, list[int]]]
    threshold: float

    def legend(self, width: float) -> str:
        """What lines, colours and numbers mean, in lines that are as wide as the panel."""
        count = len(self.paths)
        marked = f"{count} strongest paths, with scores of the first"
        marked = "strongest path, with each step's score" if count == 1 else marked
        told = f"Lines carry at least {self.threshold:g} of the whole. Width and colour are their share."
        return axes.in_lines(f"{told} Orange: the {marked}." if count else told, width, _LEGEND, 24)

    def content(self) -> Content:
        """The routes in words and as a table."""
        labels, edges = self.labels, self.edges
        sentence = f"Routes through the layers to {labels[self.start]}: "
        sentence += f"{len(edges)} steps carry at least {self.threshold:.0%} of it."
        if self.paths:
            share, path = self.paths[0]
            part = f"{share:.0%}" if share >= 0.01 else f"{share:.1g} of the whole"
            sentence += f" The strongest path, from the input up, has {part}: {', '.join(labels[i] for i in path)}."
        totals: dict[int, float] = {}
        for share, j in sorted(((share, j) for layer, _, j, share in edges if layer == 0), reverse=True):
            totals[j] = totals.get(j, 0.0) + share
        if totals:
            most = nlargest(3, totals, key=totals.__getitem__)
            sentence += f" The drawn steps begin at {', '.join(f'{labels[j]} {totals[j]:.2f}' for j in most)}."
        columns = ("layer", "out", "output token", "in", "source token", "share of the whole")
        return Content(sentence, columns, lambda: [(at, i, labels[i], j, labels[j], one) for at, i, j, one in edges])


def route_edges(steps: Sequence[Tensor], start: int, threshold: float) -> list[tuple[int, int, int, float]]:
    """The drawn edges: layer, output token, source token, share of the whole. From the last layer to the first."""
    flow = torch.zeros(len(steps[0]), dtype=torch.float64)
    flow[start] = 1
    connected = {start}
    found = []
    for layer in range(len(steps) - 1, -1, -1):
        shares = flow[:, None] * steps[layer]
        kept = [(i, j) for i, j in (shares >= threshold).nonzero().tolist() if i in connected]
        found += [(layer, i, j, float(shares[i, j])) for i, j in kept]
        connected = {j for _, j in kept}
        flow = shares.sum(0)
    return found


def strongest_paths(steps: Sequence[Tensor], start: int, count: int) -> list[tuple[float, list[int]]]:
    """The `count` paths with the largest product of scores: the product, and the tokens from the input to `start`."""
    best = torch.ones(len(steps[0]), 1, dtype=torch.float64)
    back: list[Tensor] = []
    for step in steps:
        ways = (step[:, :, None] * best[None]).flatten(1)  # (out, in x ranks)
        best, chosen = ways.topk(min(count, ways.shape[1]), dim=1)
        back.append(chosen)
    found = []
    for rank, share in enumerate(best[start].tolist()):
        place, position, path = start, rank, [start]
        for layer in range(len(steps) - 1, -1, -1):
            ranks = back[layer - 1].shape[1] if layer else 1
            place, position = divmod(int(back[layer][place, position]), ranks)
            path.append(place)
        if share > 0:
            found.append((share, path[::-1]))
    return found


def _draw(panel: Axes, route: Route, labels: list[str], cell: float, level: float) -> None:
    depth = len(route.steps)
    lines = [[(j, layer), (i, layer + 1)] for layer, i, j, _ in route.edges]
    widths = [max(0.4, _THICKEST * share) for *_, share in route.edges]
    shades = [COLORS(0.25 + 0.35 * share**0.5) for *_, share in route.edges]  # thin lines differ by their colours
    panel.add_collection(LineCollection(lines, linewidths=widths, colors=shades, capstyle="round"))
    places = sorted({(j, layer) for layer, _, j, _ in route.edges} | {(route.start, depth)})
    across, up = zip(*places, strict=True)
    panel.scatter(across, up, s=min(22, (72 * cell * 0.5) ** 2), color=_EDGE_COLOR, zorder=3)
    for rank, (_, path) in enumerate(route.paths):
        look: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": max(0.8, 1.8 - 0.4 * rank)}
        panel.plot(path, range(depth + 1), color=axes.MARK, zorder=4 - 0.01 * rank, **look)
    look = {"fontsize": _NUMBER, "color": axes.MARK, "ha": "center", "va": "center", "zorder": 5}
    look["bbox"] = {"boxstyle": "round,pad=0.1", "facecolor": "white", "alpha": 0.8, "linewidth": 0}
    for at, number in _numbers(route.steps, route.paths[0][1], level) if route.paths else ():
        panel.text(*at, number, **look)
    panel.set(xlim=(-0.5, len(labels) - 0.5), ylim=(-0.5, depth + 0.5))
    names = ["input", *(f"layer {layer}" for layer in range(depth))]
    every = math.ceil(0.13 / level)
    panel.set_yticks(range(0, depth + 1, every), names[::every], fontsize=axes.FONT_SIZE)
    panel.tick_params(axis="y", length=0)
    axes.write_labels(panel.xaxis, labels, cell, axes.FONT_SIZE, route.start)
    for place in range(depth + 1):
        panel.axhline(place, color="0.92", linewidth=0.6, zorder=0)
    panel.spines[:].set_visible(False)


def _numbers(steps: list[Tensor], path: list[int], level: float) -> Iterator[tuple[tuple[float, float], str]]:
    """The scores of the steps of a path, and their places. Equal steps in a row at one token have one number."""
    each = [
        (low, high, short_number(float(step[high, low])))
        for step, (low, high) in zip(steps, pairwise(path), strict=True)
    ]
    layer = 0
    for (low, high, number), equal in groupby(each):
        count = len(list(equal))
        if level * count >= _NUMBER * axes.LINE:
            text = number if count == 1 else f"{number} ({count} layers)"
            yield ((low + high) / 2, layer + count / 2), text
        layer += count
