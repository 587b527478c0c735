"""The sound of a speech model with the scores of its frames."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures.description import Content, set_content
from captum_vz.visualization.pictures.parts.fonts import set_label
from captum_vz.visualization.pictures.parts.picture import (
    add_axes,
    axes_list,
    new_picture,
    size_of,
    target_figure,
)
from captum_vz.visualization.pictures.parts.scales import make_scale
from captum_vz.visualization.pictures.parts.style import FONT_SIZE, MARK, shortened

_SOUND: Final = "0.25"
_MOST_POINTS: Final = 4000  # of the drawn waveform: more are not seen
_MIDDLE: Final = 1.65  # the height at which the waveform is drawn, as a multiple of the longest bar


def draw_audio(
    waveform: Tensor,
    scores: Tensor,
    sampling_rate: int,
    label: str = "score",
    *,
    spans: Sequence[tuple[float, float]] | None = None,
    names: Sequence[str] | None = None,
    token: int | None = None,
    scale: str = "shared",
    vmax: float | None = None,
    title: str | None = None,
    size: tuple[float, float] = (7.6, 2.4),
    ax: Axes | None = None,
    fig: Figure | SubFigure | None = None,
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
        scale: "shared", or "root": colours by the square root. Bars are as long as their scores in any case.
        vmax: The end of the scale. None: the largest score.
        title: A title.
        size: The width and height of the figure in inches, such as (3.3, 1.8) for a column of a paper.
        ax: Axes to draw into.
        fig: A figure or a subfigure to draw into.

    Returns:
        A matplotlib figure: a new one, `fig`, or the figure of `ax`.

    Raises:
        ArgumentError: Shapes do not fit, numbers are not finite, or an option is out of range.

    >>> figure = draw_audio(torch.sin(torch.arange(1600) / 8), torch.tensor([0.1, 0.7, 0.2]), 16000)
    >>> figure.axes[0].get_xlabel()
    'seconds'
    """
    target_figure(ax, fig)
    sound, values = _line(waveform, "waveform"), _line(scores, "scores")
    if sampling_rate <= 0:
        raise ArgumentError(f"sampling_rate is {sampling_rate}: pass samples per second, such as 16000.")
    if scale not in ("shared", "root"):
        raise ArgumentError(f"scale is {scale!r}: pass 'shared' or 'root'.")
    length = len(sound) / sampling_rate
    edges = torch.linspace(0, length, len(values) + 1).tolist()
    times = list(pairwise(edges)) if spans is None else [(float(a), float(b)) for a, b in spans]
    _check(times, values, names, length)
    if token is not None and not -len(values) <= token < len(values):
        raise ArgumentError(
            f"token {token} is out of range: there are {len(values)} scores, from 0 to {len(values) - 1}."
        )
    colors = make_scale([values], scale, vmax)
    if ax is not None:
        (panel,) = axes_list(ax, 1)
    else:
        size = size if fig is None else size_of(fig)
        fig = new_picture(size) if fig is None else fig
        top = 0.32 if title else 0.12
        top += 0.16 if names is not None else 0
        panel = add_axes(fig, (0.65, top, size[0] - 0.8, size[1] - top - 0.42), size)
    _draw(panel, sound, values, times, length, colors, token, label)
    if names is not None:
        for (start, end), name in zip(times, names, strict=True):
            text = shortened(name)
            set_label(panel.text((start + end) / 2, _MIDDLE + 0.55, text, ha="center", va="bottom", fontsize=FONT_SIZE))
    if title:
        set_label(panel.set_title(title, fontsize=FONT_SIZE + 2, pad=14 if names is not None else 4))
    set_content(panel, _content(values, times, names, label))
    return panel.figure  # type: ignore[return-value]  # a subfigure has the same methods


def _draw(
    panel: Axes,
    sound: Tensor,
    values: Tensor,
    times: list[tuple[float, float]],
    length: float,
    colors: Any,
    token: Any,
    label: str,
) -> None:
    shades = colors.mappable().get_cmap()
    norm, end = colors.norms[0], colors.end(0)
    for (start, stop), value in zip(times, values.tolist(), strict=True):
        shade = shades(float(norm(value)))
        height = max(-1.0, min(1.0, value / end))
        panel.bar(start, height, stop - start, align="edge", color=shade, edgecolor="0.5", linewidth=0.3)
        behind = {"color": shade, "alpha": 0.4, "linewidth": 0, "zorder": 0.5}
        panel.fill_between([start, stop], _MIDDLE - 0.5, _MIDDLE + 0.5, **behind)
    step = max(1, len(sound) // _MOST_POINTS)
    blocks = sound[: len(sound) // step * step].view(-1, step) / (2.1 * (float(sound.abs().max()) or 1.0)) + _MIDDLE
    seconds = np.arange(len(blocks)) * step / len(sound) * length
    if step == 1:
        panel.plot(seconds, blocks[:, 0].numpy(), color=_SOUND, linewidth=0.6)
    else:
        panel.fill_between(seconds, blocks.amin(1).numpy(), blocks.amax(1).numpy(), color=_SOUND, linewidth=0.2)
    bottom = -1.05 if colors.signed else 0.0
    if token is not None:
        start, stop = times[token % len(times)]
        panel.fill_between([start, stop], bottom, _MIDDLE + 0.5, facecolor="none", edgecolor=MARK, linewidth=1.2)
    panel.axhline(0, color="0.4", linewidth=0.6)
    panel.set_xlim(0, length)
    panel.set_ylim(bottom, _MIDDLE + 0.52)
    ticks = [-1.0, 0.0, 1.0] if colors.signed else [0.0, 0.5, 1.0]
    panel.set_yticks([*ticks, _MIDDLE], [*(f"{tick * end:.2g}" for tick in ticks), "sound"], fontsize=FONT_SIZE)
    set_label(panel.set_ylabel(label, fontsize=FONT_SIZE, loc="bottom"))
    panel.set_xlabel("seconds", fontsize=FONT_SIZE)
    panel.tick_params(labelsize=FONT_SIZE, length=2)
    panel.spines[["top", "right"]].set_visible(False)


def _line(values: Any, name: str) -> Tensor:
    if not isinstance(values, Tensor):
        raise ArgumentError(f"{name} is of type {type(values).__name__}: pass a tensor.")
    one = values[0] if values.dim() == 2 and len(values) == 1 else values
    if one.dim() != 1 or not len(one):
        raise ArgumentError(f"{name} is {tuple(values.shape)}: pass one line of numbers, (n,) or (1, n).")
    if not one.isfinite().all():
        raise ArgumentError(f"{name} holds NaN or infinity, which cannot be drawn.")
    return one.detach().double().cpu()


def _check(times: list[tuple[float, float]], values: Tensor, names: Sequence[str] | None, length: float) -> None:
    if len(times) != len(values):
        raise ArgumentError(f"There are {len(values)} scores and {len(times)} spans: pass a span for each score.")
    if names is not None and len(names) != len(values):
        raise ArgumentError(f"There are {len(values)} scores and {len(names)} names: pass a name for each score.")
    wrong = [one for one in times if not 0 <= one[0] < one[1] <= length * 1.01]
    if wrong:
        raise ArgumentError(f"The span {wrong[0]} is not inside the sound: pass seconds from 0 to {length:.3f}.")


def _content(values: Tensor, times: list[tuple[float, float]], names: Sequence[str] | None, label: str) -> Content:
    called = [""] * len(values) if names is None else list(names)
    best = values.abs().topk(min(3, len(values))).indices.tolist()
    most = ", ".join(
        f"{called[i] + ' ' if called[i] else ''}{times[i][0]:.2f} to {times[i][1]:.2f} s {float(values[i]):.2f}"
        for i in best
    )
    sentence = f"A sound of {times[-1][1]:.2f} seconds with {len(values)} scores. The largest are {most}."

    def table() -> list[tuple[Any, ...]]:
        lines = zip(times, called, values.tolist(), strict=True)
        return [(i, start, stop, name, value) for i, ((start, stop), name, value) in enumerate(lines)]

    return Content(sentence, ("place", "start", "end", "name", label), table)
