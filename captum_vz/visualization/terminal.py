"""Scores in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from captum_vz.visualization._checks import one_example, place_of

# Backgrounds from white to dark blue, in the palette of 256 colours that every terminal has, and the ink to read them.
SHADES = (231, 189, 153, 111, 68, 25, 18)
FIRST_DARK = 5
BLACK, WHITE = 16, 231

BAR = 24  # characters, for the largest score


def terminal_text(tokens: Sequence[str], scores: torch.Tensor, target: int | None = None, color: bool = True) -> str:
    """Writes each token with its position, its score and a bar, one token a line.

    Colours and bars are relative to the largest score; the numbers are the scores as they are.

    Args:
        tokens: The words to write. Characters that a terminal would obey are written as escapes.
        scores: One score for each token, not negative: `(tokens,)`, or `(1, tokens)` as `attribute` returns it for one
            sentence and one target.
        target: The position of the token that the scores explain, which gets a mark; negative ones count from the end.
        color: Whether to colour the tokens. Without it the text holds no escape sequence.

    Returns:
        Lines of text, the last one without a line break.

    Raises:
        AssertionError: Scores that do not fit the tokens, are negative or not finite; a target out of range.

    >>> print(terminal_text(["pictures", "of", "[MASK]"], torch.tensor([0.5, 0.25, 0.25]), target=2, color=False))
      0  pictures  0.5000  ████████████████████████
      1  of        0.2500  ████████████
    > 2  [MASK]    0.2500  ████████████
    """
    scores = one_example(scores, tokens, dimensions=1).double()
    assert (scores >= 0).all(), f"The lowest score is {scores.min():.3g}: expected none below 0."
    place = place_of(target, tokens)
    words = [printable(token) for token in tokens]
    width = max(map(len, words), default=0)
    shares = (scores / scores.max() if scores.any() else scores).tolist()
    lines = []
    for position, (word, score, share) in enumerate(zip(words, scores.tolist(), shares, strict=True)):
        mark = ">" if position == place else " "
        shaded = _shaded(word.ljust(width), share) if color else word.ljust(width)
        line = f"{mark} {position:>{len(str(len(words) - 1))}}  {shaded}  {score:.4f}  {'█' * round(BAR * share)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _shaded(word: str, share: float) -> str:
    shade = round(share * (len(SHADES) - 1))
    ink = WHITE if shade >= FIRST_DARK else BLACK
    return f"\x1b[48;5;{SHADES[shade]};38;5;{ink}m {word} \x1b[0m"


def printable(token: str) -> str:
    """The token with escapes for the characters that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)
