"""Scores over other inputs than text: the frames of a sound, and the patches of an image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from os import PathLike
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures import axes
from captum_vz.visualization.pictures.axes import by_title
from captum_vz.visualization.pictures.files import Content, Picture, largest, set_content
from captum_vz.visualization.pictures.rows import row_of
from captum_vz.visualization.pictures.scales import Scale, make_scale, rollouts
from captum_vz.visualization.tokens import one_example, position_of, shortened

Array = npt.NDArray[np.float64]

_SOUND: Final = "0.25"
_MOST_POINTS: Final = 4000  # of the drawn waveform: more are not seen
_MIDDLE: Final = 1.65  # the height at which the waveform is drawn, as a multiple of the longest bar
_MOST_EXTRA = 8  # tokens before the patches: [CLS], one of distillation, registers
_PALE, _CLEAR = 0.6, 0.9  # how much of the image is white; how much of it the darkest patch hides


def draw_audio(
    waveform: Tensor,
    scores: Tensor,
    sampling_rate: int,
    label: str = "score",
    *,
    spans: Sequence[tuple[float, float]] | None = None,
    names: Sequence[str] | None = None,
    token: int | None = None,
    title: str | None = None,
    size: tuple[float, float] = (7.6, 2.4),
) -> Figure:
    """Draws a waveform and below it a bar for the score of each frame, or of each span of time.

    Captum's `visualize_timeseries_attr` fails with matplotlib 3.11 and later, which is why this picture is drawn here.

    Args:
        waveform: The samples, `(samples,)` or `(1, samples)`.
        scores: A score for each frame of the model, or for each span, `(frames,)` or `(1, frames)`, of either sign.
        sampling_rate: Samples per second.
        label: The label of the scores.
        spans: Start and end of each span in seconds, such as those of words. None: frames of equal length that fill
            the sound.
        names: A name for each span or frame, such as words.
        token: The frame or span that the scores explain. It is marked.
        title: A title.
        size: The width and height of the figure in inches, such as (3.3, 1.8) for a column of a paper.

    Returns:
        A matplotlib figure.

    Raises:
        ArgumentError: Shapes do not fit, numbers are not finite, or an option is out of range.

    >>> figure = draw_audio(torch.sin(torch.arange(1600) / 8), torch.tensor([0.1, 0.7, 0.2]), 16000)
    >>> figure.axes[0].get_xlabel()
    'seconds'
    """
    sound, values = _line(waveform, "waveform"), _line(scores, "scores")
    length, count = len(sound) / sampling_rate, len(values)
    edges = torch.linspace(0, length, count + 1).tolist()
    times = list(pairwise(edges)) if spans is None else [(float(a), float(b)) for a, b in spans]
    called = [""] * count if names is None else list(names)
    for what, listed in (("span", times), ("name", called)):
        if len(listed) != count:
            raise ArgumentError(f"There are {count} scores and {len(listed)} {what}s: pass a {what} for each score.")
    wrong = [one for one in times if not 0 <= one[0] < one[1] <= length * 1.01]
    if wrong:
        raise ArgumentError(f"The span {wrong[0]} is not inside the sound: pass seconds from 0 to {length:.3f}.")
    place = position_of(token, called)
    colors = make_scale([values], "shared")
    figure = Picture(figsize=size, dpi=axes.DPI[0], layout="constrained")
    panel = figure.subplots()
    _draw_sound(panel, sound, length, list(zip(times, values.tolist(), strict=True)), colors, place)
    axes.set_label(panel.set_ylabel(label, fontsize=axes.FONT_SIZE, loc="bottom"))
    for (start, end), name in zip(times, names or (), strict=False):
        look: Any = {"ha": "center", "va": "bottom", "fontsize": axes.FONT_SIZE}
        axes.set_label(panel.text((start + end) / 2, _MIDDLE + 0.55, shortened(name), **look))
    if title:
        axes.set_label(panel.set_title(title, fontsize=axes.FONT_SIZE + 2, pad=4 if names is None else 14))
    most = largest(values, lambda i: f"{called[i]} {times[i][0]:.2f} to {times[i][1]:.2f} s".strip())
    sentence = f"A sound of {times[-1][1]:.2f} seconds with {count} scores. The largest are {most}."
    rows = [(i, *times[i], called[i], value) for i, value in enumerate(values.tolist())]
    set_content(panel, Content(sentence, ("place", "start", "end", "name", label), lambda: rows))
    return figure


def _draw_sound(panel: Axes, sound: Tensor, length: float, bars: list[Any], colors: Scale, place: int | None) -> None:
    """Draw a sound of this length in seconds above bars, each with its start and end and its score."""
    norm, end = colors.norms[0], colors.end(0)
    for (start, stop), value in bars:
        shade = colors.colors(float(norm(value)))
        height = max(-1.0, min(1.0, value / end))
        panel.bar(start, height, stop - start, align="edge", color=shade, edgecolor="0.5", linewidth=0.3)
        below, above = _MIDDLE - 0.5, _MIDDLE + 0.5
        panel.fill_between([start, stop], below, above, color=shade, alpha=0.4, linewidth=0, zorder=0.5)
    step = max(1, len(sound) // _MOST_POINTS)
    blocks = sound[: len(sound) // step * step].view(-1, step) / (2.1 * (float(sound.abs().max()) or 1.0)) + _MIDDLE
    seconds = np.arange(len(blocks)) * step / len(sound) * length
    if step == 1:
        panel.plot(seconds, blocks[:, 0].numpy(), color=_SOUND, linewidth=0.6)
    else:
        panel.fill_between(seconds, blocks.amin(1).numpy(), blocks.amax(1).numpy(), color=_SOUND, linewidth=0.2)
    bottom = -1.05 if colors.signed else 0.0
    if place is not None:
        panel.fill_between(bars[place][0], bottom, _MIDDLE + 0.5, facecolor="none", edgecolor=axes.MARK, linewidth=1.2)
    panel.axhline(0, color="0.4", linewidth=0.6)
    panel.set(xlim=(0, length), ylim=(bottom, _MIDDLE + 0.52))
    ticks = [-1.0, 0.0, 1.0] if colors.signed else [0.0, 0.5, 1.0]
    panel.set_yticks([*ticks, _MIDDLE], [*(f"{tick * end:.2g}" for tick in ticks), "sound"], fontsize=axes.FONT_SIZE)
    panel.set_xlabel("seconds", fontsize=axes.FONT_SIZE)
    panel.tick_params(labelsize=axes.FONT_SIZE, length=2)
    panel.spines[["top", "right"]].set_visible(False)


def _line(values: Any, name: str) -> Tensor:
    """Numbers `(n,)` or `(1, n)` in float64."""
    count = values.shape[-1] if isinstance(values, Tensor) and values.dim() else 0
    return one_example(values, count, place=f"{name}: ").double()


def draw_image(
    rows: Mapping[str, Tensor] | Sequence[Tensor] | Tensor,
    image: Any,
    token: int | None = None,
    label: str = "share of the row",
    *,
    grid: tuple[int, int] | None = None,
    scale: str | None = None,
    size: tuple[float, float] = axes.PAGE,
    title: str | None = None,
) -> Figure:
    """Draws the scores of patches over an image: a panel for each layer, after a panel of the image alone.

    The image is grey and pale. A patch is the bluer, the larger its score, and clear at zero.

    Args:
        rows: Scores of one token in each layer, as in :func:`draw_row`. Tokens before the patches are left out.
        image: The image, see :func:`image_grid`.
        token: The position of the token that is explained. A patch is framed.
        label: The label of the colour scale.
        grid: The numbers of rows and columns of patches. None: the largest grid in the proportions of the image.
        scale: See :func:`draw_maps`.
        size: The width and height of the page in inches. The figure is no larger.
        title: A title above the panels.

    Returns:
        A matplotlib figure.

    Raises:
        ArgumentError: Scores or image have another shape, the patches do not make a grid, or an option is wrong.

    >>> layers = torch.rand(3, 17).softmax(-1)  # [CLS] and sixteen patches, in three layers
    >>> figure = draw_image(layers, torch.rand(3, 32, 32), token=0)
    >>> [panel.get_title() for panel in figure.axes[:4]]
    ['image', 'layer 0', 'layer 1', 'layer 2']
    """
    rows = by_title(rows, "draw_image needs the scores of at least one layer")
    first = next(iter(rows.values()))
    tokens = [""] * (first.shape[-1] if isinstance(first, Tensor) and first.dim() else 0)
    position = position_of(token, tokens)
    pixels = _pixels(image)
    height, width = pixels.shape[:2]
    patches = {name: _patches(row_of(row, tokens, position).double(), pixels, grid) for name, row in rows.items()}
    down, across = next(iter(patches.values())).shape
    colors = make_scale(list(patches.values()), scale, apart=rollouts(patches))
    wide = axes.square(len(patches) + 1)
    high = math.ceil((len(patches) + 1) / wide)
    side = min((size[0] - 0.8) / wide, (size[1] - 0.4) / (high * (height / width + 0.15)))
    full = side * wide + 0.8, min(size[1], side * high * (height / width + 0.15) + 0.4)
    fig = Picture(figsize=full, dpi=axes.DPI[0], layout="constrained")
    panels: list[Axes] = list(fig.subplots(high, wide, squeeze=False).flat)
    for panel in panels:
        panel.set_axis_off()
    grey = pixels.mean(-1)
    panels[0].imshow(pixels if pixels.shape[2] == 3 else grey, cmap="gray", vmin=0, vmax=1)
    panels[0].set_title("image", fontsize=axes.FONT_SIZE, pad=3)
    titles = colors.titled(patches)
    marked = -1 if position is None else position - (len(tokens) - down * across)
    sides = ListedColormap([colors.colors(0.1 if colors.signed else 0.9), colors.colors(0.9)])  # below and above zero
    for index, (panel, (name, scores)) in enumerate(zip(panels[1:], patches.items(), strict=False)):
        panel.imshow(_PALE + (1 - _PALE) * grey, cmap="gray", vmin=0, vmax=1)
        norm, place = colors.norms[index], (-0.5, width - 0.5, height - 0.5, -0.5)
        strength = np.clip(np.asarray(norm(scores.numpy())), 0, 1)
        strength = np.abs(2 * strength - 1) if colors.signed else strength
        panel.imshow(scores.numpy(), cmap=sides, norm=norm, extent=place, alpha=_CLEAR * strength)
        axes.set_label(panel.set_title(titles[index], fontsize=axes.FONT_SIZE, pad=3))
        if marked >= 0:
            corner = marked % across * width / across - 0.5, marked // across * height / down - 0.5
            axes.add_frame(panel, *corner, width / across, height / down, linewidth=1)
        most = largest(scores, lambda i: f"row {i // across} column {i % across}", form=".2g")
        sentence = f"{name}, scores of {down} by {across} patches: the largest are {most}."
        lines = [(name, i, j, value) for i, line in enumerate(scores.tolist()) for j, value in enumerate(line)]
        set_content(panel, Content(sentence, ("panel", "row", "column", label), partial(list, lines)))
    bar = fig.colorbar(colors.mappable(), ax=panels, shrink=0.6, aspect=30, pad=0.02)
    bar.set_label(colors.label(label), fontsize=axes.FONT_SIZE)
    bar.ax.tick_params(labelsize=axes.FONT_SIZE - 1, length=2)
    if title:
        axes.write_heading(fig, title, fontsize=axes.FONT_SIZE + 2)
    return fig


def image_grid(row: Tensor, image: Any, *, grid: tuple[int, int] | None = None) -> tuple[Array, Array]:
    """The scores of patches as an image, and the image: the first two arguments of Captum's `visualize_image_attr`.

    Args:
        row: Scores of one output token, `(tokens,)` or `(1, tokens)`. Tokens that are not patches come first, such as
            [CLS] and registers. They are left out. The patches follow line by line.
        image: The image, `(channels, height, width)`, `(1, channels, height, width)` or `(height, width, channels)`, as
            a tensor or an array, with 1 or 3 channels. Other ranges, such as normalized pixels for a model, are moved
            to 0 to 1. Integers are divided by 255.
        grid: The numbers of rows and columns of patches. None: the largest grid in the proportions of the image.

    Returns:
        `(height, width, 1)` and `(height, width, channels)`. Each pixel has the score of its patch.

    Raises:
        ArgumentError: Scores or image have another shape, or the patches do not make a grid.

    >>> row = torch.tensor([0.5, 0.1, 0.2, 0.3, 0.4])  # [CLS] and four patches
    >>> scores, pixels = image_grid(row, torch.rand(3, 8, 8))
    >>> scores.shape, pixels.shape, scores[0, 0, 0].round(1), scores[7, 7, 0].round(1)
    ((8, 8, 1), (8, 8, 3), np.float64(0.1), np.float64(0.4))
    """
    scores, pixels = _line(row, "row"), _pixels(image)
    patches = _patches(scores, pixels, grid)
    rows, columns = (torch.arange(all_) * part // all_ for all_, part in zip(pixels.shape, patches.shape, strict=False))
    return patches[rows][:, columns][..., None].numpy(), pixels


def _patches(row: Tensor, pixels: Array, grid: tuple[int, int] | None) -> Tensor:
    """The scores of patches in their places. None: the largest grid in the proportions of the image."""
    count, (height, width) = len(row), pixels.shape[:2]
    if grid is None:
        part = math.gcd(height, width)
        tall, wide = height // part, width // part
        size = math.isqrt(count // (tall * wide))
        grid = tall * size, wide * size
        if not size or count - grid[0] * grid[1] > _MOST_EXTRA:
            raise ArgumentError(
                f"row has {count} scores, which make no grid for an image of {height} by {width} pixels with at most "
                f"{_MOST_EXTRA} tokens before it: pass grid=(rows, columns)."
            )
    if count < grid[0] * grid[1]:
        raise ArgumentError(f"row has {count} scores, too few for {grid[0]} by {grid[1]} patches: pass another grid=.")
    return row[count - grid[0] * grid[1] :].view(grid)


def _pixels(image: Any) -> Array:
    if isinstance(image, (str, PathLike)):
        raise ArgumentError(f"image is the name of a file: pass the image itself, such as PIL.Image.open({image!r}).")
    given = torch.as_tensor(np.asarray(image)) if not isinstance(image, Tensor) else image.detach().cpu()
    one = given[0] if given.dim() == 4 and len(given) == 1 else given
    if one.dim() != 3 or (one.shape[0] not in (1, 3) and one.shape[2] not in (1, 3)):
        raise ArgumentError(
            f"image is {tuple(given.shape)}: pass (channels, height, width) or (height, width, channels), with 1 or 3 "
            "channels."
        )
    # If both ends could be channels, they come first, as in torch.
    last = (one.permute(1, 2, 0) if one.shape[0] in (1, 3) else one).double()
    if not one.is_floating_point():
        return (last / 255).numpy()
    low, high = float(last.min()), float(last.max())
    if low < 0 or high > 1:
        last = (last - low) / ((high - low) or 1.0)
    return last.numpy()
