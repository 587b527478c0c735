"""Emoji in colour. Matplotlib cannot draw their font, so Pillow draws each emoji, and matplotlib places its picture."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

from captum_vz.visualization.pictures.description import root_figure

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
