"""Scores of the patches of an image: a picture, and the form that Captum's own picture takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import position_of
from captum_vz.visualization.pictures.description import Content, set_content, set_heading
from captum_vz.visualization.pictures.parts.fonts import set_label
from captum_vz.visualization.pictures.parts.labels import write_title
from captum_vz.visualization.pictures.parts.layout import PAGE, square
from captum_vz.visualization.pictures.parts.picture import new_picture, target_figure
from captum_vz.visualization.pictures.parts.scales import make_scale
from captum_vz.visualization.pictures.parts.style import FONT_SIZE, MARK
from captum_vz.visualization.pictures.rows import row_of

Array = npt.NDArray[np.float64]

_MOST_EXTRA = 8  # tokens before the patches: [CLS], one of distillation, registers
_PALE, _CLEAR = 0.6, 0.9  # how much of the image is white; how much of it the darkest patch hides


def draw_image(
    rows: Mapping[str, Tensor] | Sequence[Tensor] | Tensor,
    image: Any,
    token: int | None = None,
    label: str = "share of the row",
    *,
    grid: tuple[int, int] | None = None,
    extra: int | None = None,
    scale: str | None = None,
    vmax: float | None = None,
    columns: int | None = None,
    size: tuple[float, float] = PAGE,
    title: str | None = None,
    fig: Figure | SubFigure | None = None,
) -> Figure:
    """Draws the scores of patches over an image: a panel for each layer, after a panel of the image alone.

    The image is grey and pale. A patch is the bluer, the larger its score, and clear at zero.

    Args:
        rows: A dict from names to scores, or a list with scores for each layer, or a tensor `(layers, in)`. Scores are
            `(in,)` or `(1, in)`, as `attribute` returns them for one token. Or they are whole maps `(out, in)` or
            `(1, out, in)`, from which the row of `token` is taken. Tokens before the patches are left out.
        image: The image, see :func:`image_grid`.
        token: The position of the token that is explained. A patch is framed.
        label: The label of the colour scale.
        grid: The numbers of rows and columns of patches. None: the largest grid in the proportions of the image.
        extra: The number of tokens before the patches. None: what the grid leaves.
        scale: "shared"; "panel", where each panel ends at its own largest score; or "root", shared, with colours by
            the square root. None: "root" for shares, with a scale of its own for a rollout; else "shared".
        vmax: The end of the scale, with "shared" or "root". None: the largest score of a patch.
        columns: The number of panels in a row. None: nearly a square.
        size: The width and height of the page in inches. The figure is no larger.
        title: A title above the panels.
        fig: A figure or a subfigure to draw into.

    Returns:
        A matplotlib figure: a new one, or `fig`.

    Raises:
        ArgumentError: There is no row, scores or image have another shape, the patches do not make a grid, or an option
            has an unknown value.

    >>> layers = torch.rand(3, 17).softmax(-1)  # [CLS] and sixteen patches, in three layers
    >>> figure = draw_image(layers, torch.rand(3, 32, 32), token=0)
    >>> [panel.get_title() for panel in figure.axes[:4]]
    ['image', 'layer 0', 'layer 1', 'layer 2']
    """
    target_figure(None, fig)
    if columns is not None and columns < 1:
        raise ArgumentError(f"columns is {columns}: pass the number of panels in a row, at least 1.")
    if not isinstance(rows, Mapping):
        rows = {f"layer {index}": scores for index, scores in enumerate(rows)}
    if not rows:
        raise ArgumentError("draw_image needs the scores of at least one layer, got none.")
    first = next(iter(rows.values()))
    tokens = [str(place) for place in range(first.shape[-1] if isinstance(first, Tensor) and first.dim() else 0)]
    position = position_of(token, tokens)
    lines = {name: row_of(scores, tokens, position).double() for name, scores in rows.items()}
    pixels = _pixels(image)
    height, width = pixels.shape[:2]
    down, across = _checked_grid(len(tokens), height, width, grid, extra)
    before = len(tokens) - down * across
    patches = {name: line[before:].view(down, across) for name, line in lines.items()}
    apart = [place for place, name in enumerate(patches) if "rollout" in name.lower()]
    colors = make_scale(list(patches.values()), scale, vmax, apart=apart)
    count = len(patches) + 1
    wide = min(columns or square(count), count)
    high = math.ceil(count / wide)
    if fig is None:
        side = min((size[0] - 0.8) / wide, (size[1] - 0.4) / (high * (height / width + 0.15)))
        fig = new_picture((side * wide + 0.8, min(size[1], side * high * (height / width + 0.15) + 0.4)))
        fig.set_layout_engine("constrained")
    panels: list[Axes] = list(fig.subplots(high, wide, squeeze=False).flat)
    grey = pixels.mean(-1) if pixels.shape[2] == 3 else pixels[..., 0]
    marked = None if position is None or position < before else divmod(position - before, across)
    sides = ListedColormap([colors.colors(0.1 if colors.signed else 0.9), colors.colors(0.9)])  # below and above zero
    for index, panel in enumerate(panels):
        panel.set_axis_off()
        if index == 0:
            panel.imshow(pixels if pixels.shape[2] == 3 else grey, cmap="gray", vmin=0, vmax=1)
            write_title(panel, "image", FONT_SIZE)
        if not 0 < index < count:
            continue
        name = list(patches)[index - 1]
        panel.imshow(_PALE + (1 - _PALE) * grey, cmap="gray", vmin=0, vmax=1)
        norm, place = colors.norms[index - 1], (-0.5, width - 0.5, height - 0.5, -0.5)
        strength = np.clip(np.asarray(norm(patches[name].numpy())), 0, 1)
        strength = np.abs(2 * strength - 1) if colors.signed else strength
        panel.imshow(patches[name].numpy(), cmap=sides, norm=norm, extent=place, alpha=_CLEAR * strength)
        end = f" (to {colors.end(index - 1):.2g})" if colors.own or index - 1 in colors.apart else ""
        write_title(panel, f"{name}{end}", FONT_SIZE)
        if marked is not None:
            corner = (marked[1] * width / across - 0.5, marked[0] * height / down - 0.5)
            panel.add_patch(Rectangle(corner, width / across, height / down, fill=False, edgecolor=MARK, linewidth=1))
        set_content(panel, _image_content(name, patches[name], label))
    bar = fig.colorbar(ScalarMappable(colors.shared, colors.colors), ax=panels, shrink=0.6, aspect=30, pad=0.02)
    bar.set_label(colors.label(label, "panel"), fontsize=FONT_SIZE)
    bar.ax.tick_params(labelsize=FONT_SIZE - 1, length=2)
    if title:
        set_label(fig.suptitle(title, fontsize=FONT_SIZE + 2))
        set_heading(fig, title)
    return fig  # type: ignore[return-value]  # a subfigure has the same methods


def _image_content(name: str, patches: Tensor, label: str) -> Content:
    down, across = patches.shape
    places = patches.abs().flatten().topk(min(3, patches.numel())).indices.tolist()
    most = ", ".join(
        f"row {place // across} column {place % across} {float(patches.flatten()[place]):.2g}" for place in places
    )
    sentence = f"{name}, scores of {down} by {across} patches: the largest are {most}."

    def table() -> list[tuple[Any, ...]]:
        return [(name, i, j, value) for i, line in enumerate(patches.tolist()) for j, value in enumerate(line)]

    return Content(sentence, ("panel", "row", "column", label), table)


def image_grid(
    row: Tensor, image: Any, *, grid: tuple[int, int] | None = None, extra: int | None = None
) -> tuple[Array, Array]:
    """The scores of patches as an image, and the image: the first two arguments of Captum's `visualize_image_attr`.

    Args:
        row: Scores of one output token, `(tokens,)` or `(1, tokens)`. Tokens that are not patches come first, such as
            [CLS] and registers. They are left out. The patches follow line by line.
        image: The image, `(channels, height, width)`, `(1, channels, height, width)` or `(height, width, channels)`, as
            a tensor or an array, with 1 or 3 channels. Other ranges, such as normalized pixels for a model, are moved
            to 0 to 1. Integers are divided by 255.
        grid: The numbers of rows and columns of patches. None: the largest grid in the proportions of the image.
        extra: The number of tokens before the patches. None: what the grid leaves.

    Returns:
        `(height, width, 1)` and `(height, width, channels)`. Each pixel has the score of its patch.

    Raises:
        ArgumentError: Scores or image have another shape, or the patches do not make a grid.

    >>> row = torch.tensor([0.5, 0.1, 0.2, 0.3, 0.4])  # [CLS] and four patches
    >>> scores, pixels = image_grid(row, torch.rand(3, 8, 8))
    >>> scores.shape, pixels.shape, scores[0, 0, 0].round(1), scores[7, 7, 0].round(1)
    ((8, 8, 1), (8, 8, 3), np.float64(0.1), np.float64(0.4))
    """
    scores = _scores(row)
    pixels = _pixels(image)
    height, width = pixels.shape[:2]
    down, across = _checked_grid(len(scores), height, width, grid, extra)
    left = len(scores) - down * across
    rows = torch.arange(height) * down // height
    columns = torch.arange(width) * across // width
    patches = scores[left:].view(down, across)
    return patches[rows][:, columns][..., None].numpy(), pixels


def _checked_grid(
    count: int, height: int, width: int, grid: tuple[int, int] | None, extra: int | None
) -> tuple[int, int]:
    down, across = _grid(count, height, width, extra) if grid is None else grid
    left = count - down * across
    if left < 0 or (extra is not None and left != extra):
        raise ArgumentError(
            f"row has {count} scores, but the grid of {down} by {across} patches and {extra or 0} tokens before them "
            "need another number: pass grid=(rows, columns) and extra= of the model."
        )
    return down, across


def _grid(count: int, height: int, width: int, extra: int | None) -> tuple[int, int]:
    """The largest grid in the proportions of the image that leaves few tokens."""
    part = math.gcd(height, width)
    tall, wide = height // part, width // part
    for size in range(math.isqrt(count // (tall * wide)), 0, -1):
        left = count - tall * wide * size * size
        if left > _MOST_EXTRA:
            break
        if extra is None or left == extra:
            return tall * size, wide * size
    raise ArgumentError(
        f"row has {count} scores, which make no grid for an image of {height} by {width} pixels with at most "
        f"{_MOST_EXTRA} tokens before it: pass grid=(rows, columns)."
    )


def _scores(row: Tensor) -> Tensor:
    if not isinstance(row, Tensor) or row.dim() not in (1, 2) or (row.dim() == 2 and len(row) != 1):
        shape = tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__
        raise ArgumentError(f"row is {shape}: pass scores (tokens,) or (1, tokens) of one output token.")
    if not row.isfinite().all():
        raise ArgumentError("row holds NaN or infinity, which cannot be drawn.")
    return row.detach().reshape(-1).double().cpu()


def _pixels(image: Any) -> Array:
    given = torch.as_tensor(np.asarray(image)) if not isinstance(image, Tensor) else image.detach().cpu()
    one = given[0] if given.dim() == 4 and len(given) == 1 else given
    if one.dim() != 3 or (one.shape[0] not in (1, 3) and one.shape[2] not in (1, 3)):
        raise ArgumentError(
            f"image is {tuple(given.shape)}: pass (channels, height, width) or (height, width, channels), with 1 or 3 "
            "channels."
        )
    last = one.permute(1, 2, 0) if one.shape[0] in (1, 3) and one.shape[2] not in (1, 3) else one
    if one.shape[0] in (1, 3) and one.shape[2] in (1, 3):  # both could be channels: torch's order
        last = one.permute(1, 2, 0)
    if not one.is_floating_point():
        return (last.double() / 255).numpy()
    last = last.double()
    low, high = float(last.min()), float(last.max())
    if low < 0 or high > 1:
        last = (last - low) / ((high - low) or 1.0)
    return last.numpy()
