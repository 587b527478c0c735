"""Text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import one_example, position_of

# Backgrounds from white to dark blue, in the palette of 256 colours. Text is black on light and white on dark ones.
SHADES = (231, 189, 153, 111, 68, 25, 18)
FIRST_DARK = 5
BLACK, WHITE = 16, 231

BAR = 24  # characters of the bar of the largest score


def terminal_text(tokens: Sequence[str], scores: torch.Tensor, token: int | None = None, color: bool = True) -> str:
    """Text with one line for each token: its position, the token, its score and a bar.

    Colours and bars are relative to the largest score. The numbers are the scores before scaling.

    Args:
        tokens: The words to write. Control characters are written as escapes.
        scores: One score for each token, not negative: `(tokens,)`, or `(1, tokens)` as `attribute` returns it for one
            sentence and one token.
        token: The position of the token that the scores explain. This token is marked. Negative positions count from
            the end.
        color: Whether to colour the tokens. If False, the text holds no escape sequence.

    Returns:
        Lines of text. The last line has no line break.

    Raises:
        ArgumentError: Scores do not fit the tokens, are negative or not finite, or `token` is out of range.

    >>> print(terminal_text(["pictures", "of", "[MASK]"], torch.tensor([0.5, 0.25, 0.25]), token=2, color=False))
      0  pictures  0.5000  ████████████████████████
      1  of        0.2500  ████████████
    > 2  [MASK]    0.2500  ████████████
    """
    scores = one_example(scores, tokens, dimensions=1).double()
    if (scores < 0).any():
        raise ArgumentError(f"The lowest score is {scores.min():.3g}, but bars begin at 0: pass scores without a sign.")
    marked = position_of(token, tokens)
    words = [printable(word) for word in tokens]
    width = max(map(len, words), default=0)
    shares = (scores / scores.max() if scores.any() else scores).tolist()
    lines = []
    for position, (word, score, share) in enumerate(zip(words, scores.tolist(), shares, strict=True)):
        mark = ">" if position == marked else " "
        shaded = _shaded(word.ljust(width), share) if color else word.ljust(width)
        line = f"{mark} {position:>{len(str(len(words) - 1))}}  {shaded}  {score:.4f}  {'█' * round(BAR * share)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _shaded(word: str, share: float) -> str:
    shade = round(share * (len(SHADES) - 1))
    ink = WHITE if shade >= FIRST_DARK else BLACK
    return f"\x1b[48;5;{SHADES[shade]};38;5;{ink}m {word} \x1b[0m"


def printable(token: str) -> str:
    """The token with escapes for control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)
