"""Text in any script: fonts of the system for what matplotlib's own lacks, and emoji, drawn in colour by Pillow."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib import font_manager, ft2font, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

from captum_vz.visualization.pictures.description import root_figure
from captum_vz.visualization.pictures.parts.style import shortened
from captum_vz.visualization.terminal import printable

_DRAWS_LEFTWARDS: Final = hasattr(ft2font, "__libraqm_version__")  # matplotlib 3.11 and later
#: Settings for files. Publishers refuse the Type 3 fonts that matplotlib embeds in PDF by default. Text in SVG can be
#: searched and edited, but a browser would turn around letters that are already in the order of the page.
TEXT_IN_FILES: Final[Any] = {"pdf.fonttype": 42, "ps.fonttype": 42} | (
    {"svg.fonttype": "none"} if _DRAWS_LEFTWARDS else {}
)
_LEFTWARDS: Final = ("R", "AL")  # directions of letters, of Hebrew and of Arabic
_MIRRORED: Final = str.maketrans("()[]{}<>«»", ")(][}{><»«")
_LAM: Final = "\u0644"  # it makes one sign with an alef that follows
# Characters that may be left out if no font has them: joiners, and marks above or around others.
_INVISIBLE: Final = {"Cf", "Mn", "Me"}
# Of several fonts that have a character, these are taken first. The word is part of the name of the file.
_PREFERRED: Final = ("sanscjk", "sansarabic", "sanshebrew", "sans", "emoji", "symbol")
_AVOIDED: Final = ("bold", "italic", "oblique", "mono", "serif", "condensed", "lastresort", "light", "thin", "black")

_CJK: Final = ("Cjk", "Hiragana", "Katakana", "Hangul", "Bopomofo", "Fullwidth", "Halfwidth", "Ideographic")
_FLAGS: Final = "".join(map(chr, range(0x1F1E6, 0x1F200)))  # two of these letters are a flag


def font_families(texts: Iterable[str]) -> list[str]:
    """The families of fonts that together have the characters of the texts, in matplotlib's own order first."""
    families = list(rcParams["font.family"])
    needed = {letter for text in texts for letter in text}
    return [*families, *dict.fromkeys(name for letter in sorted(needed) if (name := _family_of(letter)))]


def writable(text: str) -> str:
    """The text as it is given to matplotlib, whose own text cannot have emoji, nor letters that no font has.

    It has spaces for coloured emoji, and names, such as ":rocket:", for characters that no font has. Matplotlib before
    3.11 neither joins Arabic letters nor draws from right to left. There, the letters are in the order of the page.
    """
    text = "\n".join(map(printable, text.split("\n")))
    if text.isascii():
        return text
    written = "".join(_written(letter) for letter in spaced(text)[0])
    return written if _DRAWS_LEFTWARDS else from_left(written)


def from_left(text: str) -> str:
    r"""Text from right to left with its letters from left to right, Arabic letters in their joined forms.

    >>> from_left("abc \u05d0\u05d1 12") == "abc \u05d1\u05d0 12"
    True
    """
    if not any(unicodedata.bidirectional(letter) in _LEFTWARDS for letter in text):
        return text
    # Letters with their marks, which neither change places nor take part in joining.
    letters = re.findall(rf"(?:{_LAM}[\u0622\u0623\u0625\u0627]|.)[\u0591-\u05c7\u0610-\u061a\u064b-\u065f]*", text)
    bases = [one[:2] if one[:2] in _forms() else one[0] for one in letters]
    base = _is_leftwards(text)
    runs: list[tuple[bool, list[str]]] = []
    for place, one in enumerate(letters):
        before, after = bases[place - 1] if place else "", bases[place + 1] if place + 1 < len(bases) else ""
        shown = _joined(before, bases[place], after) + one[len(bases[place]) :]
        leftwards = _side(bases, place, base)
        if not runs or runs[-1][0] != leftwards:
            runs.append((leftwards, []))
        runs[-1][1].append(shown)
    ordered = ["".join(run[::-1]).translate(_MIRRORED) if leftwards else "".join(run) for leftwards, run in runs]
    return "".join(ordered[::-1] if base else ordered)


def set_label(text: Text, color: str | None = None, source: str | None = None, panel: Axes | None = None) -> None:
    """Make a text plain: no formula, fonts for all its characters, emoji in colour, names of what no font has.

    Args:
        text: The text.
        color: Its new colour. None: it keeps its own.
        source: What is written, if the text is the label of a tick, which matplotlib writes again whenever it draws.
        panel: The axes of the tick.
    """
    text.set_parse_math(False)  # a token may be a dollar sign
    source = text.get_text() if source is None else source
    text.set_text(writable(source))
    if not source.isascii():
        text.set_fontfamily(font_families([text.get_text()]))
        emoji = [(writable(before), picture) for before, picture in spaced(source)[1]]
        if emoji:
            place: Any = panel or text.axes or text.get_figure()
            place.add_artist(EmojiPictures(text, emoji, _is_leftwards(source)))
    if color is not None:
        text.set_color(color)


def _written(letter: str) -> str:
    if letter.isascii() or _family_of(letter) is not None or _is_in(_default_font(), letter):
        return letter
    category = unicodedata.category(letter)
    if category not in _INVISIBLE and category[0] in "LMNPS" and letter not in _FLAGS:
        _warn_of(_font_for(letter))
    if category in _INVISIBLE or category == "Sk":  # the tone of an emoji's skin
        return ""
    if letter in _FLAGS:
        return chr(ord("A") + _FLAGS.index(letter))
    name = shortened(unicodedata.name(letter, "").lower().replace(" ", "-"))
    return f":{name}:" if category.startswith("S") and name else f"U+{ord(letter):04X}"


def _font_for(letter: str) -> str:
    """The font of the Noto family that has a character."""
    if unicodedata.category(letter) in ("So", "Sk"):
        return "Noto Color Emoji (Debian: fonts-noto-color-emoji)"
    script = unicodedata.name(letter, "").split(" ")[0].split("-")[0].capitalize()
    if script in _CJK:
        return "Noto Sans CJK (Debian: fonts-noto-cjk)"
    return f"Noto Sans {script} (Debian: fonts-noto-core)" if script else "a font of its script"


@cache
def _warn_of(font: str) -> None:
    """Warn once that a font is missing."""
    message = f"No font of this system has some characters, so a picture has their codes: install {font}."
    warnings.warn(message, stacklevel=2)


def _is_leftwards(text: str) -> bool:
    """Whether the first letter with a direction has that from right to left."""
    directions = (unicodedata.bidirectional(letter) for letter in text)
    return next((one in _LEFTWARDS for one in directions if one in ("L", *_LEFTWARDS)), False)


def _side(letters: Sequence[str], place: int, base: bool) -> bool:
    """Whether a letter is in a run from right to left. Spaces and signs are if both neighbours are, or as the text."""

    def side(one: str) -> bool | None:
        direction = unicodedata.bidirectional(one[0])
        return direction in _LEFTWARDS if direction in ("L", "EN", "AN", *_LEFTWARDS) else None

    own = side(letters[place])
    if own is not None:
        return own
    before = next((found for one in letters[:place][::-1] if (found := side(one)) is not None), base)
    after = next((found for one in letters[place + 1 :] if (found := side(one)) is not None), base)
    return before if before == after else base


@cache
def _forms() -> dict[str, dict[str, str]]:
    """The forms of Arabic letters and of lam with alef: "isolated", "initial", "medial" and "final"."""
    found: dict[str, dict[str, str]] = {}
    for code in [*range(0xFB50, 0xFDFE), *range(0xFE70, 0xFEFD)]:
        kind, *letters = unicodedata.decomposition(chr(code)).split() or [""]
        base = "".join(chr(int(one, 16)) for one in letters)
        if base and kind.startswith("<") and (len(base) == 1 or (len(base) == 2 and base[0] == _LAM)):
            found.setdefault(base, {}).setdefault(kind[1:-1], chr(code))
    return found


def _joined(before: str, letter: str, after: str) -> str:
    """The form of an Arabic letter between its neighbours, if a font has it."""
    forms = _forms().get(letter, {})
    from_before = "final" in forms and "initial" in _forms().get(before, {})
    to_after = "initial" in forms and "final" in _forms().get(after, {})
    kind = {(True, True): "medial", (True, False): "final", (False, True): "initial"}.get((from_before, to_after))
    form = forms.get(kind or "isolated", letter)
    return form if _is_in(_default_font(), form) or _family_of(form) is not None else letter


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
        except (OSError, RuntimeError, NotImplementedError):  # a bitmap font, such as a font of coloured emoji
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


Pixels = npt.NDArray[np.uint8]

SPACE: Final = "\u2003"  # as wide as the font is high, which is the room of an emoji
# Emoji of the Basic Multilingual Plane: these are in colour without a variation selector, the others with U+FE0F.
_COLOURED: Final = (
    "\u231a\u231b\u23e9-\u23ec\u23f0\u23f3\u25fd\u25fe\u2614\u2615\u2648-\u2653\u267f\u2693\u26a1\u26aa\u26ab\u26bd"
    "\u26be\u26c4\u26c5\u26ce\u26d4\u26ea\u26f2\u26f3\u26f5\u26fa\u26fd\u2705\u270a\u270b\u2728\u274c\u274e"
    "\u2753-\u2755\u2757\u2795-\u2797\u27b0\u27bf\u2b1b\u2b1c\u2b50\u2b55\U0001f000-\U0001f1e5\U0001f200-\U0001faff"
)
_LETTER: Final = "[\U0001f1e6-\U0001f1ff]"  # two of them are a flag
_TONE: Final = "[\U0001f3fb-\U0001f3ff]?[\U000e0020-\U000e007f]*"
_ONE: Final = f"(?:[{_COLOURED}]\ufe0f?(?!\ufe0e)|[\u00a9-\u3299]\ufe0f){_TONE}"
_EMOJI: Final = re.compile(f"{_LETTER}{{2}}|[0-9#*]\ufe0f?\u20e3|{_ONE}(?:\u200d[\u2190-\U0001faff]\ufe0f?{_TONE})*")
_NAMES: Final = ("coloremoji", "emojicolor", "seguiemj", "twemoji")  # of the files of fonts, in lower case
_SIZES: Final = (109, 160, 128, 136, 96, 64)  # in pixels: Pillow takes only a size that a font of bitmaps has
# Characters that have no picture of their own: joiners and tags.
_JOINING: Final = "\u200d\ufe0f\u20e3" + "".join(map(chr, range(0xE0020, 0xE0080)))


def spaced(text: str) -> tuple[str, list[tuple[str, Pixels]]]:
    """The text with spaces in the places of emoji, and for each emoji the text before it and its picture."""
    written, found, end = "", [], 0
    for match in _EMOJI.finditer(text) if not text.isascii() else ():
        picture = picture_of(match[0])
        if picture is None:
            continue
        written += text[end : match.start()]
        found.append((written, picture))
        written += SPACE * max(1, round(picture.shape[1] / picture.shape[0]))
        end = match.end()
    return written + text[end:], found


@cache
def picture_of(emoji: str) -> Pixels | None:
    """The picture of an emoji, `(height, width, 4)`. None: no font of the system has it."""
    if not all(_is_known(letter) for letter in emoji if not letter.isascii() and letter not in _JOINING):
        return None
    return _drawn(emoji)


@cache
def _is_known(letter: str) -> bool:
    """Whether the font has a picture of its own for a character."""
    picture, missing = _drawn(letter), _drawn("\U0010ffff")  # the last is no character
    return picture is not None and (missing is None or not np.array_equal(picture, missing))


def _drawn(emoji: str) -> Pixels | None:
    from PIL import Image, ImageDraw

    font = _font()
    if font is None:
        return None
    left, top, right, bottom = (round(one) for one in font.getbbox(emoji))
    image = Image.new("RGBA", (right - left, bottom - top))
    ImageDraw.Draw(image).text((-left, -top), emoji, font=font, embedded_color=True)
    return np.array(image) if image.getbbox() else None


class EmojiPictures(Artist):
    """The pictures of the emoji of a text, in the spaces that the text has for them."""

    def __init__(self, text: Text, parts: list[tuple[str, Pixels]], leftwards: bool = False) -> None:
        """Draw over a text with spaces for emoji. Each part is the text before an emoji, and the emoji's picture."""
        super().__init__()
        self._text, self._parts, self._leftwards = text, parts, leftwards
        self.set_zorder(text.get_zorder() + 1)
        self.set_in_layout(False)

    def draw(self, renderer: Any) -> None:
        """Draw each picture at the place that the text has now."""
        text = self._text
        if not (self.get_visible() and text.get_visible() and text.get_text()):
            return
        box, side = text.get_window_extent(renderer), renderer.points_to_pixels(text.get_fontsize())
        is_upright = round(text.get_rotation() / 90) % 2 == 1
        length = box.height if is_upright else box.width
        # Browsers do not smooth an image that matplotlib has scaled in SVG.
        canvas: Any = root_figure(self.get_figure()).canvas
        smooth = canvas.get_default_filetype() == "svg"
        graphics = renderer.new_gc()
        graphics.set_alpha(text.get_alpha())
        for before, picture in self._parts:
            width = side * max(1, round(picture.shape[1] / picture.shape[0]))
            start, _, _ = renderer.get_text_width_height_descent(before, text.get_fontproperties(), False)
            start = length - start - width if self._leftwards else start
            if is_upright:
                place = (box.x0 + box.x1 - side) / 2, box.y0 + start, side, width
                _draw(renderer, graphics, np.rot90(picture), place, smooth)
            else:
                place = box.x0 + start, (box.y0 + box.y1 - side) / 2, width, side
                _draw(renderer, graphics, picture, place, smooth)
        graphics.restore()


def _draw(
    renderer: Any, graphics: Any, picture: Pixels, place: tuple[float, float, float, float], smooth: bool
) -> None:
    """Draw a picture at left, bottom, width and height in pixels, with as many pixels as the file has there."""
    left, bottom, width, height = place
    if renderer.option_scale_image() and not smooth:  # a vector file keeps all pixels
        upwards = np.ascontiguousarray(picture[::-1])
        renderer.draw_image(graphics, left, bottom, upwards, Affine2D().scale(width, height))
        return
    from PIL import Image

    finer = renderer.get_image_magnification()
    size = max(1, round(width * finer)), max(1, round(height * finer))
    small = np.array(Image.fromarray(picture[::-1]).resize(size, Image.Resampling.LANCZOS))
    renderer.draw_image(graphics, round(left * finer) / finer, round(bottom * finer) / finer, small)


@cache
def _font() -> Any:
    """The font of coloured emoji. None: the system has none that Pillow can draw."""
    from PIL import ImageFont

    for path in sorted(font_manager.findSystemFonts()):
        name = re.sub("[^a-z]", "", Path(path).stem.lower())
        for size in _SIZES if any(part in name for part in _NAMES) else ():
            try:
                return ImageFont.truetype(path, size)
            except OSError:
                continue
    return None
