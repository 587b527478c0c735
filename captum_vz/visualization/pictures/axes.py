"""Axes of pictures: their tokens and labels, text in any script, titles, and the axes that pictures draw into."""

from __future__ import annotations

import math
import unicodedata
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

import numpy as np
import torch
from matplotlib import font_manager, rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis as MatplotlibAxis
from matplotlib.figure import Figure, FigureBase
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization import tokens as pieces
from captum_vz.visualization.pictures.files import root_figure

#: Numbers of words, one for each token, as `word_ids()` of a tokenizer's output gives them; or True: by their marks.
Words = Sequence[int | None] | bool | None
Chosen = str | Collection[int] | None  #: "special", or positions of tokens

FONT_SIZE: Final = 8
SMALLEST_FONT: Final = 5  # points
TITLE_SIZE: Final = 10
LINE: Final = 1.15 / 72  # inches between two lines of text, for each point of the font
MARK: Final = "#d55e00"  # the vermilion of the palette of Okabe & Ito, which differs from blue for all readers
QUIET: Final = "0.55"  # the grey of labels that matter less
DPI: Final = (150, 200)  # of figures, and of figures with small fonts
PAGE: Final = (7.6, 10.2)  #: width and height in inches of the space on a sheet of A4 or Letter
NARROW_PAGE: Final = 5.0  # inches: on narrower pages, the colour bar is below the panels
TICK, PAD = 2.0, 2.0  # points
EDGE: Final = 0.08  # inches around all that is drawn
PAIR: Final = " / "  # between the tokens of two texts
_LONGEST_SIDE: Final = 14  # characters of each of them

# Parts of the names of fonts that are taken last, of several that have a character.
_AVOIDED: Final = ("bold", "italic", "oblique", "mono", "serif", "condensed", "lastresort", "light", "thin", "black")


@dataclass(frozen=True)
class Axis:
    """The drawn tokens at one side of a map."""

    labels: list[str]  # of each drawn row or column
    member: Tensor  # for each token its row or column, -1 for tokens that are left out
    dimmed: list[int]  # the rows or columns that are pale

    @property
    def shown(self) -> list[str]:
        """The written labels. A long label of two texts has the beginning of both."""
        return [
            PAIR.join(pieces.shortened(side, _LONGEST_SIDE) for side in one.split(PAIR))
            if PAIR in one and len(one) > pieces.LONGEST_LABEL
            else pieces.shortened(one)
            for one in map(writable, self.labels)  # a code for a letter is longer than the letter
        ]

    @property
    def counted(self) -> list[int]:
        """The rows or columns that are not dimmed."""
        return [i for i in range(len(self.labels)) if i not in self.dimmed]

    def columns(self, scores: Tensor) -> Tensor:
        """Scores `(..., tokens)` as `(..., columns)`: the scores of a word's pieces are added."""
        return scores.to(torch.float64) @ self._ones()

    def rows(self, scores: Tensor) -> Tensor:
        """Scores `(tokens, ...)` as `(rows, ...)`: the row of a word is the mean of its pieces' rows."""
        ones = self._ones()
        return (ones / ones.sum(0)).T @ scores.to(torch.float64)

    def place_of(self, position: int | None) -> int | None:
        """The row or column of a token. None: there is no token, or it is left out."""
        place = -1 if position is None else int(self.member[position])
        return None if place < 0 else place

    def _ones(self) -> Tensor:
        return (self.member[:, None] == torch.arange(len(self.labels))).to(torch.float64)


def make_axis(tokens: Sequence[str], words: Words = None, dim: Chosen = None, drop: Chosen = None) -> Axis:
    """The axis of some tokens, whose marks for spaces are left out; see :func:`draw_maps` for the arguments."""
    gone, pale = _positions(tokens, drop, "drop"), _positions(tokens, dim, "dim")
    kept = [position for position in range(len(tokens)) if position not in gone]
    if not kept:
        raise ArgumentError("drop leaves out all tokens: there is nothing to draw. Keep at least one.")
    if words is None or words is False:
        numbers, texts = list(range(len(tokens))), pieces.without_marks(tokens)
        labels = [texts[position] for position in kept]
    else:
        numbers = pieces.words_of(tokens, None if words is True else words)
        labels = pieces.word_texts([tokens[position] for position in kept], [numbers[position] for position in kept])
    firsts = {numbers[position]: position for position in reversed(kept)}
    places = {number: place for place, number in enumerate(sorted(firsts))}
    member = [-1 if position in gone else places[numbers[position]] for position in range(len(tokens))]
    return Axis(labels, torch.tensor(member), [places[number] for number in places if firsts[number] in pale])


def _positions(tokens: Sequence[str], chosen: Chosen, name: str) -> set[int | None]:
    if chosen == "special":
        return {position for position, token in enumerate(tokens) if pieces.is_special(token)}
    if isinstance(chosen, str):
        raise ArgumentError(f"{name} is {chosen!r}: pass 'special', or positions of tokens.")
    return {pieces.position_of(one, tokens) for one in chosen or ()}


def by_title(given: Any, needed: str) -> Mapping[str, Any]:
    """Maps or rows by their titles. `needed` is the error, if there are none."""
    found = given if isinstance(given, Mapping) else {f"layer {index}": one for index, one in enumerate(given)}
    if not found:
        raise ArgumentError(f"{needed}, got none.")
    return found


def set_label(text: Text, source: str | None = None) -> None:
    """Make a text plain: no formula, and fonts for all its characters.

    `source` is what is written, if the text is the label of a tick, which matplotlib writes again whenever it draws.
    """
    text.set_parse_math(False)  # a token may be a dollar sign
    text.set_text(writable(text.get_text() if source is None else source))
    if not text.get_text().isascii():
        text.set_fontfamily(_families(text.get_text()))


def writable(text: str) -> str:
    """The text with escapes for control characters, and with codes for characters that no font has."""
    return "".join(map(_written, "\n".join(map(pieces.printable, text.split("\n")))))


def _families(text: str) -> list[str]:
    """The families of fonts that together have the characters of the text, in matplotlib's own order first."""
    found = (_family_of(letter) for letter in sorted(set(text)) if not letter.isascii())
    return list(dict.fromkeys([*rcParams["font.family"], *filter(None, found)]))


@cache
def _written(letter: str) -> str:
    if letter.isascii() or _family_of(letter) is not None:
        return letter
    if unicodedata.category(letter) in ("Cf", "Mn", "Me", "Sk"):  # joiners, marks of other letters, and tones of skin
        return ""
    code = f"U+{ord(letter):04X}"
    warnings.warn(
        f"No font of this system has {letter!r}, so pictures write {code}: install a font of its script, such as Noto.",
        stacklevel=2,
    )
    return code


@cache
def _family_of(letter: str) -> str | None:
    """The family of the first font that has a character, which is added to matplotlib's list. None: no font has it."""
    for path in _font_files():
        if ord(letter) in _letters_of(path):
            if all(path != entry.fname for entry in font_manager.fontManager.ttflist):
                font_manager.fontManager.addfont(path)
            return FT2Font(path).family_name
    return None


@cache
def _font_files() -> list[str]:
    """Matplotlib's own font, and the scalable fonts of the system, regular ones without serifs first."""

    def rank(path: str) -> tuple[int, bool, str]:
        name = Path(path).stem.lower()
        return sum(part in name for part in _AVOIDED), "sans" not in name, path

    system = (path for path in font_manager.findSystemFonts() if "color" not in path.lower())
    return [str(font_manager.findfont(FontProperties(family=rcParams["font.family"]))), *sorted(system, key=rank)]


@cache
def _letters_of(path: str) -> frozenset[int]:
    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):  # a font of bitmaps
        return frozenset()


@lru_cache(maxsize=4096)
def text_width(text: str, font: float, weight: str = "normal") -> float:
    """The width of a text in inches, with room for files of pixels, in which letters begin at whole pixels."""
    text = writable(text)
    properties = FontProperties(family=_families(text), size=font, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(text, properties, ismath=False)
    return 1.05 * float(width) / 72


def labels_room(labels: Sequence[str], font: float = FONT_SIZE, marked: int | None = None) -> float:
    """The room in inches of labels and their ticks. The label `marked` is bold."""
    widths = [text_width(label, font) for label in labels]
    if marked is not None:
        widths[marked] = max(widths[marked], text_width(labels[marked], font, "bold"))
    return max(widths, default=0.0) + (TICK + PAD) / 72


def write_labels(
    axis: MatplotlibAxis,
    labels: Sequence[str],
    cell: float,
    font: float = FONT_SIZE,
    marked: int | None = None,
    dimmed: Sequence[int] = (),
) -> None:
    """Label each row or column with cells of this size in inches, or every k-th if the labels would overlap.

    The row or column `marked` always has a label, in the colour of the mark. Labels of `dimmed` are grey.
    """
    every = max(1, math.ceil(font * LINE / cell - 1e-6))
    kept = list(range(0, len(labels), every))
    if marked is not None:
        kept = sorted({marked, *(i for i in kept if every == 1 or abs(i - marked) >= every)})
    look: dict[str, Any] = {"fontsize": font} | ({"rotation": 90} if axis is axis.axes.xaxis else {})
    write_plain_labels(axis, kept, [labels[i] for i in kept], **look)
    axis.set_tick_params(length=TICK, width=0.4, color="0.3", pad=PAD)
    for place, text in zip(kept, axis.get_ticklabels(), strict=True):
        if place == marked:
            text.set(color=MARK, fontweight="bold")
        elif place in dimmed:
            text.set_color(QUIET)


def write_plain_labels(axis: MatplotlibAxis, places: Sequence[float], labels: Sequence[str], **options: Any) -> None:
    """Label places of an axis, with options of a text."""
    axis.set_ticks(places, [writable(label) for label in labels], **options)
    for text, label in zip(axis.get_ticklabels(), labels, strict=True):
        set_label(text, label)


def in_lines(text: str, width: float, font: float = FONT_SIZE, least: int = 12, **options: Any) -> str:
    """The text in lines that are about as wide as this in inches, and have at least so many characters."""
    letters = len(text) * min(1.0, width / (text_width(text, font) or width))
    return "\n".join(wrap(text, max(least, int(letters)), **options)) or text


def largest_font(texts: Iterable[str], width: float, largest: float) -> float:
    """The largest font in which all texts are at most so wide in inches, or the smallest that can be read."""
    lines = [line for text in texts for line in text.split("\n")]
    widest, font = max(lines, key=lambda line: text_width(line, FONT_SIZE)), largest
    while font > SMALLEST_FONT and text_width(widest, font) > width:
        font -= 0.5
    return font


def write_heading(figure: FigureBase, title: str, **look: Any) -> None:
    """Write the title of a figure."""
    set_label(figure.suptitle(title, **look))


def size_of(panel: Axes) -> tuple[float, float]:
    """The size of axes in inches, as far as it is known before the figure is drawn."""
    box, dpi = panel.get_window_extent(), root_figure(panel.figure).dpi
    return box.width / dpi, box.height / dpi


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes of this size in inches, at this place from the left and from the upper end of the figure."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def panels_of(figure: Figure) -> Bbox:
    """The box around all axes of a figure, in parts of the figure."""
    return Bbox.union([panel.get_position() for panel in figure.axes])


def drawn_in(figure: Figure) -> Bbox:
    """The box around all that is drawn, with labels that stand outside of the figure, in parts of the figure."""
    return Bbox(figure.get_tightbbox().get_points() / figure.get_size_inches())


def crop(figure: Figure, title: str | None = None) -> None:
    """Write a title above all that is drawn, in lines as long as the figure. Then fit the figure to what is drawn."""
    size = figure.get_size_inches()
    if title:
        place = {"x": panels_of(figure).x0, "y": drawn_in(figure).y1 + EDGE / size[1], "ha": "left", "va": "bottom"}
        write_heading(figure, in_lines(title, size[0] - 0.2, TITLE_SIZE), **place, fontsize=TITLE_SIZE)
    box = figure.get_tightbbox().padded(EDGE)

    def moved(points: Any) -> Any:
        return (np.asarray(points) * size - box.min) / box.size

    for panel in figure.axes:
        panel.set_position(Bbox(moved(panel.get_position(original=True).get_points())))
    for text in figure.texts:
        text.set_position(moved(text.get_position()))
    figure.set_size_inches(box.size)


def add_pale(panel: Axes, left: float, top: float, wide: float, high: float) -> None:
    """Cover cells with pale white."""
    look: dict[str, Any] = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "zorder": 1.5}
    panel.add_artist(Rectangle((left, top), wide, high, **look))


def add_frame(panel: Axes, left: float, top: float, wide: float, high: float, **look: Any) -> None:
    """Frame cells in the colour of the mark."""
    panel.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=MARK, **look))


def square(count: int) -> int:
    """The number of columns with which `count` panels are nearly square, with few empty places."""
    side = math.ceil(math.sqrt(count))
    return count if count <= 3 else min((side, side + 1), key=lambda across: (-count % across, across))
