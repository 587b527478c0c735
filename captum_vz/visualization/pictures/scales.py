"""Colours, and colour scales: shared by all panels, one for each panel, of square roots, or with a given end."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap, FuncNorm, ListedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures import axes

# Inches of a colour bar, and of the room that it takes at the right of panels, with its numbers and its label.
BAR, LONGEST_BAR, BAR_ROOM = 0.11, 2.4, 0.75
_MOST_SHARES: Final = 1.01  # sums of rows of float16 are not exact


def _white_at(name: str, zero: float) -> Colormap:
    """A colour map of matplotlib, made lighter until the colour of zero is white. Zero is in the middle of a shade."""
    shades = colormaps[name](np.linspace(0, 1, 257))
    shades[:, :3] /= colormaps[name](zero)[:3]
    return ListedColormap(shades.clip(0, 1), f"{name}, white at zero")


# One hue from white to dark is also readable in print and without colour vision.
COLORS: Final = _white_at("Blues", 0.0)
# Blue above zero as in COLORS, red below. They differ without red or green vision.
SIGNED_COLORS: Final = _white_at("RdBu", 0.5)


@dataclass(frozen=True)
class Scale:
    """How scores become colours."""

    norms: list[Normalize]  # from scores to 0 to 1, one for each panel
    signed: bool  # whether the scale has a middle at 0 and a side below it
    clipped: bool  # whether some drawn score is beyond the end of its scale
    apart: Collection[int]  # the panels with an end of their own; the others share one
    part: str  # what a panel is called: "panel" or "row"

    @property
    def colors(self) -> Colormap:
        """The colour map."""
        return SIGNED_COLORS if self.signed else COLORS

    def end(self, panel: int) -> float:
        """The score at which the colour of a panel is darkest."""
        return float(self.norms[panel].vmax or 1.0)

    def titled(self, names: Iterable[str]) -> list[str]:
        """The titles of panels. Those of panels with an end of their own name it."""
        return [f"{one} (to {self.end(i):.2g})" if i in self.apart else one for i, one in enumerate(names)]

    def mappable(self) -> ScalarMappable:
        """What a colour bar is drawn from: the shared scale. If each panel has its own, that of shares of its end."""
        own = Normalize(-1 if self.signed else 0, 1)
        return ScalarMappable(next((x for i, x in enumerate(self.norms) if i not in self.apart), own), self.colors)

    def label(self, label: str) -> str:
        """The label of the colour bar."""
        return f"{label} / largest of the {self.part}" if len(self.apart) == len(self.norms) else label


def make_scale(
    panels: Sequence[Tensor],
    scale: str | None,
    vmax: float | None = None,
    counted: Sequence[Tensor] | None = None,
    apart: Collection[int] = (),
    part: str = "panel",
) -> Scale:
    """The scale of some panels, of two sides if a score is negative; see :func:`draw_maps` for `scale` and `vmax`.

    Scores of `counted` decide the end (None: all). Panels of `apart` end at their own largest score, unless `scale` or
    `vmax` is given. `part` is what a panel is called, also in `scale`.
    """
    names = ("shared", part, "root")
    if scale is not None or vmax is not None or len(apart) == len(panels):
        apart = range(len(panels)) if scale == part else ()
    signed = any(bool((one < 0).any()) for one in panels)
    if scale is None:  # scores are shares if none is negative, and rows sum to at most 1
        sums = [float(one.sum(-1).max()) for one in panels if one.numel()]
        scale = "shared" if signed or max(sums, default=0.0) > _MOST_SHARES else "root"
    if scale not in names:
        raise ArgumentError(f"scale is {scale!r}: pass one of {', '.join(map(repr, names))}.")
    if vmax is not None and (scale == part or not 0 < vmax < math.inf):
        raise ArgumentError(f"vmax is {vmax!r} with scale {scale!r}: pass a positive number with 'shared' or 'root'.")
    highest = [float(one.abs().max()) if one.numel() else 0.0 for one in (counted or panels)]
    most = vmax or max((one for place, one in enumerate(highest) if place not in apart), default=0.0)
    ends = [(highest[place] if place in apart else most) or 1.0 for place in range(len(panels))]
    clipped = any(bool((one.abs() > end * (1 + 1e-9)).any()) for one, end in zip(panels, ends, strict=True))
    kind = partial(FuncNorm, (_root, _square)) if scale == "root" else Normalize
    norms = {end: kind(-end if signed else 0.0, end) for end in ends}
    return Scale([norms[end] for end in ends], signed, clipped, apart, part)


def rollouts(names: Iterable[str]) -> list[int]:
    """The panels of rollouts, which end at their own largest score."""
    return [place for place, name in enumerate(names) if "rollout" in name.lower()]


def bar_room(label: str, width: float) -> float:
    """The height in inches of a horizontal colour bar with its numbers and its label, in lines of this width."""
    return BAR + 0.18 + axes.FONT_SIZE * axes.LINE * (axes.in_lines(label, width).count("\n") + 1)


def add_colorbar(figure: Figure, scale: Scale, label: str, flat: bool) -> None:
    """Draw the colour bar of a scale at the right of all that is drawn, or below it if it is flat."""
    panels, (wide, high) = axes.panels_of(figure), figure.get_size_inches()
    drawn = axes.drawn_in(figure)
    length = min(LONGEST_BAR, max(panels.width * wide, 1.0) if flat else max(panels.height * high, 0.8))
    if flat:
        left = (panels.x0 + panels.x1) / 2 - length / wide / 2
        box = left, drawn.y0 - (0.08 + BAR) / high, length / wide, BAR / high
    else:
        box = drawn.x1 + 0.12 / wide, panels.y1 - length / high, BAR / wide, length / high
    draw_colorbar(figure.add_axes(box), scale, label, length, flat)


def draw_colorbar(place: Axes, scale: Scale, label: str, length: float, flat: bool = False) -> None:
    """Draw the colour bar of a scale into axes of this length in inches. A long label has lines, or a smaller font."""
    extend: Any = ("both" if scale.signed else "max") if scale.clipped else "neither"  # the ends that are open
    orientation: Any = "horizontal" if flat else "vertical"
    bar = place.figure.colorbar(scale.mappable(), cax=place, extend=extend, orientation=orientation)
    _set_ticks(bar, 5 if length > (1.6 if flat else 1.2) else 3)
    if flat:
        bar.set_label(axes.in_lines(label, length), fontsize=axes.FONT_SIZE, labelpad=2)
    else:
        font = axes.largest_font([label], max(length, LONGEST_BAR), axes.FONT_SIZE)
        bar.set_label(label, fontsize=font, loc="top" if axes.text_width(label, font) > length else "center")
    axes.set_label(bar.ax.xaxis.label if flat else bar.ax.yaxis.label)
    bar.ax.tick_params(labelsize=axes.FONT_SIZE - 1, length=2)
    bar.outline.set_linewidth(0.5)


def _set_ticks(bar: Colorbar, count: int) -> None:
    """Write about `count` round numbers on a colour bar."""
    if not isinstance(bar.norm, FuncNorm):
        bar.locator = MaxNLocator(count, steps=[1, 2, 5, 10])
        bar.update_ticks()
        return
    end = float(bar.norm.vmax or 1.0)  # ticks are nearly evenly spaced on the bar
    steps = [0.0, *(_round(end * (step / count) ** 2) for step in range(1, count)), end]
    ticks = [*(-one for one in reversed(steps[1:])), *steps] if bar.norm.vmin else steps
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.minorticks_off()


def _round(value: float) -> float:
    """A positive number with few digits: 1, 1.5, or 2 to 9, times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    first = value / power
    return float(f"{(round(2 * first) / 2 if first < 2 else round(first)) * power:.2g}")


def _root(values: Any) -> Any:
    return np.sign(values) * np.sqrt(np.abs(values))


def _square(values: Any) -> Any:
    return np.sign(values) * np.square(values)


def luminance(color: Any) -> float:
    """The relative luminance of a colour, from 0 to 1, as WCAG 2 defines it."""
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(color: Any) -> str:
    """Black or white, whichever has the larger contrast (WCAG 2) on a background colour."""
    light = luminance(color)
    return "black" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "white"


def short_number(value: float) -> str:
    """Two decimals without the leading zero, as cells of pictures have them: ".25", "1.00", "-.10"."""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"
