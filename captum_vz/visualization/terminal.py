"""Scores of tokens as lines of text for a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Final

import torch

from captum_vz.errors import ArgumentError
from captum_vz.visualization.tokens import one_example, position_of, printable

# Backgrounds from white to dark blue and to dark red, in the palette of 256 colours. Text is black on light and white
# on dark ones.
SHADES: Final = ((231, 189, 153, 111, 68, 25, 18), (231, 224, 217, 210, 167, 124, 88))
FIRST_DARK: Final = 5
BLACK, WHITE = 16, 231
BAR: Final = 24  # characters of a full bar
LEAST_BAR: Final = 4  # narrower bars are left out
EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def terminal_text(
    tokens: Sequence[str],
    scores: torch.Tensor,
    token: int | None = None,
    color: bool = True,
    full: float | None = None,
    *,
    signed: bool | None = None,
    columns: int | None = None,
) -> str:
    """Text with one line for each token: its position, the token, its score and a bar.

    Bars of shares are drawn in eighths of a character. Bars of signed scores go to both sides of a middle line, in
    halves of a character: to the right and blue above zero, to the left and red below. Numbers are not scaled.

    Args:
        tokens: The words to write. Control characters are written as escapes.
        scores: One score for each token, `(tokens,)` or `(1, tokens)`.
        token: The position of the token that the scores explain, which is marked. Negative ones count from the end.
        color: Whether to colour the tokens and signed bars. If False, the text holds no escape sequence.
        full: The score of a full bar and of the darkest colour, such as 1 for shares. None: the largest size.
        signed: Whether scores have a sign, which numbers and bars show. None: if a score is negative.
        columns: The width of the lines, which bars become shorter to fit. None: bars of 24 characters.

    Returns:
        Lines of text. The last line has no line break.

    Raises:
        ArgumentError: Scores do not fit the tokens, are not finite, or are negative without `signed`.

    >>> print(terminal_text(["pictures", "of", "[MASK]"], torch.tensor([0.5, 0.25, 0.25]), token=2, color=False))
      0  pictures  0.5000  ████████████████████████
      1  of        0.2500  ████████████
    > 2  [MASK]    0.2500  ████████████
    >>> print(terminal_text(["pictures", "of"], torch.tensor([0.5, 0.02]), color=False, full=1))
      0  pictures  0.5000  ████████████
      1  of        0.0200  ▌
    >>> print(terminal_text(["pictures", "of"], torch.tensor([0.5, -0.25]), color=False))
      0  pictures  +0.5000              │████████████
      1  of        -0.2500        ██████│
    """
    scores = one_example(scores, len(tokens)).double()
    signed = bool((scores < 0).any()) if signed is None else signed
    if not signed and (scores < 0).any():
        raise ArgumentError(f"The lowest score is {scores.min():.3g}, but bars begin at 0: pass signed=True.")
    marked = position_of(token, tokens)
    words = [printable(word) for word in tokens]
    width = max(map(columns_of, words), default=0)
    highest = full or (scores.abs().max().item() if scores.any() else 1.0)
    parts = (scores / highest).clamp(-1, 1).tolist()
    form = ("+" if signed else "") + (".1e" if 0 < scores.abs().max() < 0.001 else ".4f") if len(scores) else ""
    numbers = [format(score, form) for score in scores.tolist()]
    digits = len(str(len(words) - 1))
    lead = 8 + digits + width + max(map(len, numbers), default=0) + 2 * color
    length = BAR if columns is None else min(BAR, columns - lead - signed)
    lines = []
    for position, (word, number, part) in enumerate(zip(words, numbers, parts, strict=True)):
        padded = word + " " * (width - columns_of(word))
        if color:
            padded = painted(f" {padded} ", part)
        drawn = "" if length < LEAST_BAR else _signed_bar(part, length, color) if signed else bar(part, length)
        mark = ">" if position == marked else " "
        lines.append(f"{mark} {position:>{digits}}  {padded}  {number}  {drawn}".rstrip())
    return "\n".join(lines)


def painted(text: str, share: float) -> str:
    """The text on a background from white to dark blue for a share from 0 to 1, to dark red for one from 0 to -1."""
    step = round(min(abs(share), 1) * (len(SHADES[0]) - 1))
    colors = f"48;5;{SHADES[share < 0][step]};38;5;{WHITE if step >= FIRST_DARK else BLACK}"
    return f"\x1b[{colors}m{text}\x1b[0m"


def bar(share: float, width: int = BAR) -> str:
    """A bar of block characters, `width` characters long for a share of 1, in eighths of a character.

    >>> bar(0.5, 4), bar(0.3, 4), bar(0, 4)
    ('██', '█▎', '')
    """
    whole, rest = divmod(round(8 * width * share), 8)
    return "█" * whole + EIGHTHS[rest].strip()


def _signed_bar(share: float, width: int, color: bool) -> str:
    """A bar from a middle line to the right for a positive share, to the left for a negative one, of -1 to 1."""
    side = width // 2
    whole, rest = divmod(round(2 * side * abs(share)), 2)
    drawn = "▐" * rest + "█" * whole if share < 0 else "█" * whole + "▌" * rest
    shown = f"\x1b[38;5;{SHADES[share < 0][FIRST_DARK]}m{drawn}\x1b[0m" if color and drawn else drawn
    return f"{' ' * (side - len(drawn))}{shown}│" if share < 0 else f"{' ' * side}│{shown}"


def columns_of(text: str) -> int:
    """The columns that a text takes in a terminal: two for wide characters, none for combining ones.

    >>> columns_of("hat"), columns_of("猫")
    (3, 2)
    """
    combining = sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)
    return len(text) - combining + sum(unicodedata.east_asian_width(c) in "WF" for c in text)
