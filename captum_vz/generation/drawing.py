"""The picture of a generated text: new tokens by their sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures.axes import FONT_SIZE, write_plain_labels
from captum_vz.visualization.pictures.files import Content, Picture, set_content
from captum_vz.visualization.pictures.scales import make_scale, set_ticks
from captum_vz.visualization.tokens import shortened

# In inches. A cell is as high as a line of text.
CELL, LETTER, MARGIN = 0.17, 0.075, 0.9
MOST_COLUMNS = 64  # of a panel, about ten inches


def draw_steps(
    columns: Tensor, generated: Sequence[str], sources: Sequence[str], *, split: int, share: Tensor, title: str
) -> Figure:
    """Draw scores, generated tokens from top to bottom. See :meth:`GenerationAttribution.plot`.

    Args:
        columns: The scores, `(n, columns)`.
        generated: The labels of the rows.
        sources: The labels of the columns.
        split: How many first columns are prompt tokens. A line stands after them.
        share: The share of the prompt in each row, `(n,)`. It is left out if scores are signed.
        title: The title.
    """
    if not sources:
        raise ArgumentError("The mask leaves out all prompt tokens: there is nothing to draw. Keep at least one.")
    labels, steps = [shortened(label) for label in sources], [shortened(label) for label in generated]
    scale = make_scale([columns], None, None)
    signed = scale.signed
    panels = math.ceil(len(labels) / MOST_COLUMNS)
    width = math.ceil(len(labels) / panels)
    shares = None if signed else [f"{value:.2f}" for value in share.tolist()]
    top = LETTER * max(map(len, labels)) + 0.25
    side = LETTER * max(map(len, steps)) + (0.0 if shares is None else 0.9)
    inches = (max(width * CELL, 2.2) + side + MARGIN, panels * (len(steps) * CELL + top) + 0.9)
    figure = Picture(figsize=inches, dpi=150, layout="constrained")
    axes: list[Axes] = figure.subplots(panels, 1, squeeze=False).flatten().tolist()
    for index, panel in enumerate(axes):
        start = index * width
        shown = torch.full((len(steps), width), float("nan"), dtype=torch.float64)
        part = columns[:, start : start + width]
        shown[:, : part.shape[1]] = part
        image = panel.imshow(shown.numpy(), cmap=scale.colors, norm=scale.shared, aspect="auto")
        _label(panel, labels[start : start + width], steps, shares if index == 0 else None)
        if start < split < start + part.shape[1]:
            panel.axvline(split - start - 0.5, color="black", linewidth=0.8)
    bar = figure.colorbar(image, ax=axes, shrink=min(1, 3 / inches[1]), anchor=(0, 1), aspect=15, pad=0.02)
    bar.set_label("score" if signed else "share of the row", fontsize=FONT_SIZE)
    set_ticks(bar, scale, 5 if inches[1] > 1.8 else 3)
    bar.ax.tick_params(labelsize=FONT_SIZE - 1)
    figure.supylabel("generated token", fontsize=FONT_SIZE + 1)
    figure.suptitle(title, fontsize=FONT_SIZE + 2)
    set_content(axes[0], _content(columns, steps, labels, "score" if signed else "share of the row"))
    return figure


def _label(panel: Axes, columns: list[str], steps: list[str], share: list[str] | None) -> None:
    panel.xaxis.tick_top()
    write_plain_labels(panel.xaxis, range(len(columns)), columns, rotation=90, fontsize=FONT_SIZE)
    write_plain_labels(panel.yaxis, range(len(steps)), steps, fontsize=FONT_SIZE)
    panel.tick_params(length=0)
    if share is not None:
        right = panel.secondary_yaxis("right")
        right.set_yticks(range(len(steps)), share, fontsize=FONT_SIZE - 1, color="#555555")
        right.set_ylabel("prompt share", fontsize=FONT_SIZE - 1, color="#555555")
        right.tick_params(length=0)
        right.spines[:].set_visible(False)


def _content(scores: Tensor, steps: list[str], labels: list[str], name: str) -> Content:
    """Steps by sources in words and as a table."""

    def table() -> list[tuple[Any, ...]]:
        return [
            (i, steps[i], j, labels[j], value) for i, row in enumerate(scores.tolist()) for j, value in enumerate(row)
        ]

    best = scores.abs().max(1).indices.tolist()
    each = zip(steps, best, scores, strict=True)
    most = ", ".join(f"{step} on {labels[j]} {float(row[j]):.2f}" for step, j, row in each)
    sentence = f"{len(steps)} generated tokens by {len(labels)} sources. Each depends most: {most}."
    return Content(sentence, ("step", "generated token", "in", "source token", name), table)
