"""Other forms of a generated text: its picture, new tokens by their sources, and what inseq shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
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
    scores: Tensor, generated: Sequence[str], sources: Sequence[str], *, split: int, share: Tensor, title: str
) -> Figure:
    """Draw scores `(n, columns)` of generated tokens by sources. See :meth:`GenerationAttribution.plot`.

    A line follows the first `split` columns, which are prompt tokens. The share of the prompt in each row, `(n,)`,
    is left out if scores are signed.
    """
    if not sources:
        raise ArgumentError("The mask leaves out all prompt tokens: there is nothing to draw. Keep at least one.")
    labels, steps = list(map(shortened, sources)), list(map(shortened, generated))
    scale = make_scale([scores], None, None)
    unit = "score" if scale.signed else "share of the row"
    panels = math.ceil(len(labels) / MOST_COLUMNS)
    width = math.ceil(len(labels) / panels)
    top = LETTER * max(map(len, labels)) + 0.25
    side = LETTER * max(map(len, steps)) + (0.0 if scale.signed else 0.9)
    inches = (max(width * CELL, 2.2) + side + MARGIN, panels * (len(steps) * CELL + top) + 0.9)
    figure = Picture(figsize=inches, dpi=150, layout="constrained")
    axes: list[Axes] = figure.subplots(panels, 1, squeeze=False).flatten().tolist()
    padded = torch.nn.functional.pad(scores, (0, panels * width - len(labels)), value=math.nan)
    for index, (panel, part) in enumerate(zip(axes, padded.split(width, 1), strict=True)):
        start = index * width
        image = panel.imshow(part.numpy(), cmap=scale.colors, norm=scale.shared, aspect="auto")
        shown = labels[start : start + width]
        panel.xaxis.tick_top()
        write_plain_labels(panel.xaxis, range(len(shown)), shown, rotation=90, fontsize=FONT_SIZE)
        write_plain_labels(panel.yaxis, range(len(steps)), steps, fontsize=FONT_SIZE)
        panel.tick_params(length=0)
        if start < split < start + len(shown):
            panel.axvline(split - start - 0.5, color="black", linewidth=0.8)
    if not scale.signed:
        look: dict[str, Any] = {"fontsize": FONT_SIZE - 1, "color": "#555555"}
        right = axes[0].secondary_yaxis("right")
        right.set_yticks(range(len(steps)), [f"{value:.2f}" for value in share.tolist()], **look)
        right.set_ylabel("prompt share", **look)
        right.tick_params(length=0)
        right.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=min(1, 3 / inches[1]), anchor=(0, 1), aspect=15, pad=0.02)
    bar.set_label(unit, fontsize=FONT_SIZE)
    set_ticks(bar, scale, 5 if inches[1] > 1.8 else 3)
    bar.ax.tick_params(labelsize=FONT_SIZE - 1)
    figure.supylabel("generated token", fontsize=FONT_SIZE + 1)
    figure.suptitle(title, fontsize=FONT_SIZE + 2)
    best = scores.abs().max(1).indices.tolist()
    most = ", ".join(f"{steps[i]} on {labels[j]} {float(scores[i, j]):.2f}" for i, j in enumerate(best))
    told = f"{len(steps)} generated tokens by {len(labels)} sources. Each depends most: {most}."
    heads = ("step", "generated token", "in", "source token", unit)
    places = product(range(len(steps)), range(len(labels)))
    cells = [(i, steps[i], j, labels[j], float(scores[i, j])) for i, j in places]
    set_content(axes[0], Content(told, heads, lambda: cells))
    return figure


def inseq_form(found: Any, index: int) -> Any:
    """The scores of a layer as inseq's object, see :meth:`GenerationAttribution.to_inseq`."""
    try:
        from inseq.data.attribution import CoarseFeatureAttributionSequenceOutput, FeatureAttributionOutput
        from inseq.utils.typing import TokenWithId
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_inseq needs inseq: pip install inseq.") from error
    given, steps = len(found.prompt.ids), len(found.generated.ids)
    seen = torch.ones(steps, given + steps).tril(given - 1).bool()
    scores = found.all_scores[..., index].masked_fill(~seen, float("nan")).T.float()
    tokens = [TokenWithId(*one) for one in zip(found.tokens, (*found.prompt.ids, *found.generated.ids), strict=True)]
    name, start, stop = found.prompt.sections[-1] if found.prompt.sections else ("", 0, 0)
    source = start if (name, stop) == ("decoder", given) else 0
    sequence = CoarseFeatureAttributionSequenceOutput(
        source=tokens[:source] if source else tokens[:given],
        target=tokens[source:],
        source_attributions=scores[:source] if source else None,
        target_attributions=scores[source:],
        step_scores={},
        sequence_scores={},
        attr_pos_start=given - source,
    )
    about = {"attribution_method": found.method, "layer": found.layers[index], "generated_texts": [found.text]}
    return FeatureAttributionOutput([sequence], info=about)
