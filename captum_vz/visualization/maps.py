"""A figure of maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import one_example, position_of
from captum_vz.visualization.terminal import printable

# One hue from white to dark is also readable in print and without colour vision. The mark is the vermilion of the
# palette of Okabe & Ito, which differs from blue for all readers.
COLORS = "Blues"
MARK = "#d55e00"

FONT_SIZE = 8
# In inches. A cell is as high as a line of text.
CELL, SMALLEST_PANEL, LARGEST_PANEL = 0.17, 1.7, 7.0
TALLEST_BAR, BAR_WIDTH = 5.0, 0.2
LONGEST_LABEL = 20  # characters


def draw_maps(
    maps: Mapping[str, Tensor] | Sequence[Tensor],
    tokens: Sequence[str],
    token: int | None = None,
    label: str = "score",
) -> Figure:
    """Draws maps as panels with one colour scale. Rows are output tokens, columns are source tokens.

    The scale begins at 0, which is white, and ends at the largest score of all maps, so that colours can be compared
    between panels. The figure is not registered with pyplot, so it need not be closed.

    Args:
        maps: A dict from the titles of the panels to maps, or a list of maps, one for each layer. Maps in a list are
            titled "layer 0", "layer 1" and so on. A map is `(out, in)`, or `(1, out, in)` as `attribute` returns it for
            one sentence.
        tokens: The labels of the axes, `len(tokens) == out == in`. If there is no room for all labels, only every
            second one is written, or fewer. The marked token always has a label.
        token: The position of the output token whose row is marked. Negative positions count from the end.
        label: The label of the colour scale, such as "share of the row" for rows that sum to 1.

    Returns:
        A matplotlib figure. `figure.savefig("maps.png")` writes it to a file, and a notebook shows it.

    Raises:
        ArgumentError: There is no map. A map does not fit the tokens, or is a batch of several examples. Scores are
            negative or not finite. `token` is out of range.

    >>> from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> layers = find_layers(model)
    >>> maps = {f"layer {i}": scores for i, scores in enumerate(ValueZeroing(model, layers).attribute(inputs))}
    >>> maps["rollout"] = ValueZeroingRollout(model, layers).attribute(inputs)
    >>> figure = draw_maps(maps, inputs.tokens(), token=6, label="share of the row")
    >>> [panel.get_title() for panel in figure.axes[:5]]
    ['layer 0', 'layer 1', 'layer 2', 'layer 3', 'rollout']
    """
    if not isinstance(maps, Mapping):
        maps = {f"layer {index}": scores for index, scores in enumerate(maps)}
    panels = {title: one_example(scores, tokens, dimensions=2) for title, scores in maps.items()}
    if not panels:
        raise ArgumentError("draw_maps needs at least one map, got none.")
    lowest = min(scores.min().item() for scores in panels.values())
    if lowest < 0:
        raise ArgumentError(
            f"The lowest score is {lowest:.3g}, but the colour scale begins at 0: pass maps of scores without a sign."
        )
    highest = max(scores.max().item() for scores in panels.values()) or 1.0
    marked = position_of(token, tokens)

    rows, columns = _grid(len(panels))
    names = [shortened(name) for name in tokens]
    side = min(max(CELL * len(tokens), SMALLEST_PANEL), LARGEST_PANEL)
    label_size = 0.075 * max(map(len, names))  # inches, about
    width, height = columns * (side + 0.15) + label_size + 1.3, rows * (side + label_size + 0.35) + 0.7
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in axes[len(panels) :]:
        unused.remove()
    for index, (title, scores) in enumerate(panels.items()):
        panel = axes[index]
        image = panel.imshow(scores.double().numpy(), cmap=COLORS, vmin=0, vmax=highest)
        panel.set_title(title, fontsize=FONT_SIZE + 2).set_parse_math(False)
        _label_tokens(panel, names, marked, every=math.ceil(CELL * 0.75 * len(tokens) / side))
        panel.tick_params(labelleft=index % columns == 0)
        if marked is not None:
            panel.add_patch(Rectangle((-0.5, marked - 0.5), len(names), 1, fill=False, edgecolor=MARK, linewidth=1.2))
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
    figure.supylabel("output token", fontsize=FONT_SIZE + 1)
    return figure


def _grid(count: int) -> tuple[int, int]:
    """The numbers of rows and columns for `count` panels: nearly square, with few empty places."""
    side = math.ceil(math.sqrt(count))
    columns = count if count <= 3 else min((side, side + 1), key=lambda columns: -count % columns)
    return math.ceil(count / columns), columns


def _label_tokens(panel: Axes, names: list[str], marked: int | None, every: int) -> None:
    """Writes every `every`-th token at both axes of a panel. The marked row has the colour of its mark."""
    # Labels next to the marked one are left out, because they would overlap with it.
    shown = [i for i in range(0, len(names), every) if marked is None or abs(i - marked) >= every]
    shown = sorted([*shown, *([] if marked is None else [marked])])
    panel.set_xticks(shown, [names[i] for i in shown], rotation=90, fontsize=FONT_SIZE)
    panel.set_yticks(shown, [names[i] for i in shown], fontsize=FONT_SIZE)
    panel.tick_params(length=2)
    for text in [*panel.get_xticklabels(), *panel.get_yticklabels()]:
        text.set_parse_math(False)  # a token may be a dollar sign
    if marked is not None:
        panel.get_yticklabels()[shown.index(marked)].set(color=MARK, fontweight="bold")


def shortened(token: str) -> str:
    """The token in one line of at most `LONGEST_LABEL` characters."""
    token = printable(token)
    return token if len(token) <= LONGEST_LABEL else token[: LONGEST_LABEL - 1] + "…"
