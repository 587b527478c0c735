"""Maps as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from captum_vz.visualization._checks import one_example, place_of
from captum_vz.visualization.terminal import printable

# One hue from white to dark: it reads the same to the colour-blind and in print. The mark is the vermilion of
# Okabe & Ito's palette, which nobody takes for a blue.
COLORS = "Blues"
MARK = "#d55e00"

FONT_SIZE = 8
# Inches; a cell is as high as a line of text.
CELL, SMALLEST_PANEL, LARGEST_PANEL = 0.17, 1.7, 7.0
TALLEST_BAR, BAR_WIDTH = 5.0, 0.2
LONGEST_LABEL = 20  # characters


def draw_maps(
    maps: Mapping[str, Tensor] | Sequence[Tensor],
    tokens: Sequence[str],
    target: int | None = None,
    label: str = "score",
) -> Figure:
    """Draws maps side by side: output tokens down, source tokens across, one colour scale for all of them.

    The scale begins at 0, which is white, and ends at the largest score in any of the maps, so that colours can be
    compared between panels. The figure is the caller's alone: pyplot does not know of it.

    Args:
        maps: Panels by their titles, or a list of maps, one a layer, which are titled "layer 0", "layer 1" and so on.
            A map is `(out, in)`, or `(1, out, in)` as `attribute` returns it for one sentence.
        tokens: What to write at the axes, `len(tokens) == out == in`. Where there are too many of them to be read,
            every second is left out, or more; the target never.
        target: The output token whose row is marked, by its position; negative ones count from the end.
        label: What the numbers are, at the colour scale; such as "share of the row" for rows that sum to 1.

    Returns:
        A matplotlib figure: `figure.savefig("maps.png")`; a notebook shows it by itself.

    Raises:
        AssertionError: No map, a map that does not fit the tokens, a batch of several, scores below 0 or not finite.

    >>> from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> layers = find_layers(model)
    >>> maps = {f"layer {i}": one for i, one in enumerate(ValueZeroing(model, layers).attribute(inputs))}
    >>> maps["rollout"] = ValueZeroingRollout(model, layers).attribute(inputs)
    >>> figure = draw_maps(maps, inputs.tokens(), target=6, label="share of the row")
    >>> [panel.get_title() for panel in figure.axes[:5]]
    ['layer 0', 'layer 1', 'layer 2', 'layer 3', 'rollout']
    """
    if not isinstance(maps, Mapping):
        maps = {f"layer {index}": one for index, one in enumerate(maps)}
    panels = {title: one_example(one, tokens, dimensions=2) for title, one in maps.items()}
    assert panels, "draw_maps needs at least one map, got none."
    lowest = min(one.min().item() for one in panels.values())
    assert lowest >= 0, f"The lowest score is {lowest:.3g}, but the colour scale of a map begins at 0."
    highest = max(one.max().item() for one in panels.values()) or 1.0
    place = place_of(target, tokens)

    rows, columns = _grid(len(panels))
    names = [shortened(token) for token in tokens]
    side = min(max(CELL * len(tokens), SMALLEST_PANEL), LARGEST_PANEL)
    names_take = 0.075 * max(map(len, names))  # inches, about
    width, height = columns * (side + 0.15) + names_take + 1.3, rows * (side + names_take + 0.35) + 0.7
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in axes[len(panels) :]:
        unused.remove()
    for index, (title, one) in enumerate(panels.items()):
        panel = axes[index]
        image = panel.imshow(one.double().numpy(), cmap=COLORS, vmin=0, vmax=highest)
        panel.set_title(title, fontsize=FONT_SIZE + 2).set_parse_math(False)
        _name_tokens(panel, names, place, every=math.ceil(CELL * 0.75 * len(tokens) / side))
        panel.tick_params(labelleft=index % columns == 0)
        if place is not None:
            panel.add_patch(Rectangle((-0.5, place - 0.5), len(names), 1, fill=False, edgecolor=MARK, linewidth=1.2))
    bar = figure.colorbar(
        image,
        ax=axes[: len(panels)],
        shrink=min(1, TALLEST_BAR / height),
        anchor=(0, 1),
        aspect=min(height, TALLEST_BAR) / BAR_WIDTH,
        pad=0.15 / width,
    )
    bar.set_label(label, fontsize=FONT_SIZE + 1)
    bar.ax.tick_params(labelsize=FONT_SIZE)
    figure.supxlabel("source token", fontsize=FONT_SIZE + 1)
    figure.supylabel("output token (target)", fontsize=FONT_SIZE + 1)
    return figure


def _grid(count: int) -> tuple[int, int]:
    """Rows and columns for that many panels: nearly square, with as few places left empty as may be."""
    side = math.ceil(math.sqrt(count))
    columns = count if count <= 3 else min((side, side + 1), key=lambda columns: -count % columns)
    return math.ceil(count / columns), columns


def _name_tokens(panel: Axes, names: list[str], place: int | None, every: int) -> None:
    """Write the tokens at both axes of a panel, every so many of them, the target's row in the colour of its mark."""
    # A name beside the target's would overlap with it.
    shown = [i for i in range(0, len(names), every) if place is None or abs(i - place) >= every]
    shown = sorted([*shown, *([] if place is None else [place])])
    panel.set_xticks(shown, [names[i] for i in shown], rotation=90, fontsize=FONT_SIZE)
    panel.set_yticks(shown, [names[i] for i in shown], fontsize=FONT_SIZE)
    panel.tick_params(length=2)
    for text in [*panel.get_xticklabels(), *panel.get_yticklabels()]:
        text.set_parse_math(False)  # a token may be a dollar sign
    if place is not None:
        panel.get_yticklabels()[shown.index(place)].set(color=MARK, fontweight="bold")


def shortened(token: str) -> str:
    """The token in one line of at most so many characters, as figures have room for it."""
    token = printable(token)
    return token if len(token) <= LONGEST_LABEL else token[: LONGEST_LABEL - 1] + "…"
