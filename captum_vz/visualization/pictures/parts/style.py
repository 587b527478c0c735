"""Colours and sizes of all pictures."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Colormap, ListedColormap, to_rgb

from captum_vz.visualization.terminal import printable


def _white_at(name: str, zero: float) -> Colormap:
    """A colour map of matplotlib, made lighter until the colour of zero is white. Zero is in the middle of a shade."""
    shades = colormaps[name](np.linspace(0, 1, 257))
    shades[:, :3] /= colormaps[name](zero)[:3]
    return ListedColormap(shades.clip(0, 1), f"{name}, white at zero")


# One hue from white to dark is also readable in print and without colour vision. The mark is the vermilion of the
# palette of Okabe & Ito, which differs from blue for all readers.
COLORS: Final = _white_at("Blues", 0.0)
# Blue above zero as in COLORS, red below. They differ without red or green vision.
SIGNED_COLORS: Final = _white_at("RdBu", 0.5)
MARK: Final = "#d55e00"
QUIET: Final = "0.55"  # the grey of labels that matter less

FONT_SIZE: Final = 8
DPI: Final = (150, 200)  # of figures, and of figures with small fonts
SMALLEST_FONT: Final = 5  # points
LINE: Final = 1.15 / 72  # inches between two lines of text, for each point of the font

# In inches. A cell is as high as a line of text.
CELL: Final = 0.17
LONGEST_LABEL: Final = 20  # characters
EMPTY: Final = "\N{EMPTY SET}"  # in the place of a token without characters


def shortened(token: str, longest: int = LONGEST_LABEL) -> str:
    """The token in one line of at most `longest` characters."""
    token = printable(token) or EMPTY
    return token if len(token) <= longest else token[: longest - 1] + "…"


def quoted(token: str) -> str:
    """The token in a title: words have quotation marks, unlike signs and tokens in brackets, such as [MASK]."""
    short = shortened(token)
    return f"“{short}”" if short[:1].isalnum() else short


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
