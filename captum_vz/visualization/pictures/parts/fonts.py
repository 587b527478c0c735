"""Fonts for labels in any script: matplotlib's own, and fonts of the system for what it lacks."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from matplotlib import font_manager, rcParams
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

# Characters that may be left out if no font has them: joiners, and marks above or around others.
_INVISIBLE: Final = {"Cf", "Mn", "Me"}
# Of several fonts that have a character, these are taken first. The word is part of the name of the file.
_PREFERRED: Final = ("sanscjk", "sansarabic", "sanshebrew", "sans", "emoji", "symbol")
_AVOIDED: Final = ("bold", "italic", "oblique", "mono", "serif", "condensed", "lastresort", "light", "thin", "black")


def font_families(texts: Iterable[str]) -> list[str]:
    """The families of fonts that together have the characters of the texts, in matplotlib's own order first."""
    families = list(rcParams["font.family"])
    needed = {letter for text in texts for letter in text}
    return [*families, *dict.fromkeys(name for letter in sorted(needed) if (name := _family_of(letter)))]


def writable(text: str) -> str:
    """The text, with the names of symbols that no font has, such as ":rocket:", and numbers of other characters."""
    return "".join(_written(letter) for letter in text)


def set_label(text: Text, color: str | None = None) -> None:
    """Make a text plain: no formula, fonts for all its characters, and a name for what no font has."""
    text.set_parse_math(False)  # a token may be a dollar sign
    if not text.get_text().isascii():
        text.set_text(writable(text.get_text()))
        text.set_fontfamily(font_families([text.get_text()]))
    if color is not None:
        text.set_color(color)


def _written(letter: str) -> str:
    if letter.isascii() or _family_of(letter) is not None or _is_in(_default_font(), letter):
        return letter
    category = unicodedata.category(letter)
    if category in _INVISIBLE:
        return ""
    name = unicodedata.name(letter, "")
    return f":{name.lower().replace(' ', '-')}:" if category.startswith("S") and name else f"U+{ord(letter):04X}"


def _is_format(letter: str) -> bool:
    """Whether a character only says how its neighbours are drawn: joiners, directions, variation selectors."""
    return unicodedata.category(letter) == "Cf" or "\ufe00" <= letter <= "\ufe0f"


@cache
def _family_of(letter: str) -> str | None:
    """A family of fonts for a character that matplotlib's own font lacks. None: that has it, or no font has."""
    if letter.isascii() or _is_in(_default_font(), letter) or _is_format(letter):
        return None
    for path in _font_files():
        if _is_in(path, letter):
            return _registered(path)
    return None


@cache
def _registered(path: str) -> str | None:
    """The family of a font file. The file is added to matplotlib's list of fonts if the list lacks it."""
    known = {entry.fname: entry.name for entry in font_manager.fontManager.ttflist}
    if path not in known:
        try:
            font_manager.fontManager.addfont(path)
        except (OSError, RuntimeError, NotImplementedError):  # a bitmap font, such as that of coloured emoji
            return None
    return FT2Font(path).family_name


@cache
def _default_font() -> str:
    return str(font_manager.findfont(font_manager.FontProperties(family=rcParams["font.family"])))


@cache
def _font_files() -> list[str]:
    """The scalable fonts of the system, preferred ones first."""

    def rank(path: str) -> tuple[int, int, str]:
        name = Path(path).stem.lower().replace("-", "").replace("_", "")
        preferred = next((place for place, part in enumerate(_PREFERRED) if part in name), len(_PREFERRED))
        return sum(part in name for part in _AVOIDED), preferred, path

    return sorted((path for path in font_manager.findSystemFonts() if "color" not in path.lower()), key=rank)


@cache
def _letters_of(path: str) -> frozenset[int]:
    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


def _is_in(path: str, letter: str) -> bool:
    return ord(letter) in _letters_of(path)
