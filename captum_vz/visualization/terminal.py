"""Tokens as readable text, and text for a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import one_example, position_of

# Backgrounds from white to dark blue, in the palette of 256 colours. Text is black on light and white on dark ones.
SHADES = (231, 189, 153, 111, 68, 25, 18)
FIRST_DARK = 5
BLACK, WHITE = 16, 231

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a part of a character is decoded as
MOST_PARTS = 16  # tokens of bytes whose characters are shown together
SPACE = "\N{OPEN BOX}"
BAR = 24  # characters of a full bar
# Joiners in Arabic and Indian scripts and in emoji, and the tags of flags.
_JOINERS = "\u200c\u200d" + "".join(map(chr, range(0xE0020, 0xE0080)))

EIGHTHS = " ▏▎▍▌▋▊▉"


def terminal_text(
    tokens: Sequence[str],
    scores: torch.Tensor,
    token: int | None = None,
    color: bool = True,
    full: float | None = None,
) -> str:
    """Text with one line for each token: its position, the token, its score and a bar.

    Bars are drawn in eighths of a character. The numbers are the scores before scaling.

    Args:
        tokens: The words to write. Control characters are written as escapes.
        scores: One score for each token, not negative: `(tokens,)`, or `(1, tokens)` as `attribute` returns it for one
            sentence and one token.
        token: The position of the token that the scores explain. This token is marked. Negative positions count from
            the end.
        color: Whether to colour the tokens. If False, the text holds no escape sequence.
        full: The score of a full bar and of the darkest colour, such as 1 for shares. The bars of two texts can then be
            compared. None: the largest score.

    Returns:
        Lines of text. The last line has no line break.

    Raises:
        ArgumentError: Scores do not fit the tokens, are negative or not finite; `token` is out of range; or `full` is
            not positive.

    >>> print(terminal_text(["pictures", "of", "[MASK]"], torch.tensor([0.5, 0.25, 0.25]), token=2, color=False))
      0  pictures  0.5000  ████████████████████████
      1  of        0.2500  ████████████
    > 2  [MASK]    0.2500  ████████████
    >>> print(terminal_text(["pictures", "of"], torch.tensor([0.5, 0.02]), color=False, full=1))
      0  pictures  0.5000  ████████████
      1  of        0.0200  ▌
    """
    scores = one_example(scores, tokens, dimensions=1).double()
    if (scores < 0).any():
        raise ArgumentError(f"The lowest score is {scores.min():.3g}, but bars begin at 0: pass scores without a sign.")
    if full is not None and not full > 0:
        raise ArgumentError(f"full is {full!r}: pass the positive score of a full bar, or None.")
    marked = position_of(token, tokens)
    words = [printable(word) for word in tokens]
    width = max(map(columns_of, words), default=0)
    highest = full or (scores.max().item() if scores.any() else 1.0)
    shares = (scores / highest).clamp(max=1).tolist()
    lines = []
    for position, (word, score, share) in enumerate(zip(words, score_texts(scores.tolist()), shares, strict=True)):
        mark = ">" if position == marked else " "
        padded = word + " " * (width - columns_of(word))
        shaded = _shaded(padded, share) if color else padded
        line = f"{mark} {position:>{len(str(len(words) - 1))}}  {shaded}  {score}  {bar(share)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def score_texts(scores: Sequence[float], signed: bool = False) -> list[str]:
    """The scores of one row, with four decimals, or with two digits if all of them are small.

    >>> score_texts([0.5, -0.25], signed=True), score_texts([0.00031, 0.0])
    (['+0.5000', '-0.2500'], ['3.1e-04', '0.0e+00'])
    """
    largest = max(map(abs, scores), default=0.0)
    form = ("+" if signed else "") + (".1e" if 0 < largest < 0.001 else ".4f")
    return [format(score, form) for score in scores]


def bar(share: float, width: int = BAR) -> str:
    """A bar of block characters, `width` characters long for a share of 1, in eighths of a character.

    >>> bar(0.5, 4), bar(0.3, 4), bar(0, 4)
    ('██', '█▎', '')
    """
    whole, rest = divmod(round(8 * width * share), 8)
    return "█" * whole + EIGHTHS[rest].strip()


def shade(share: float) -> tuple[int, int]:
    """The background and the ink for a share from 0 to 1, in the palette of 256 colours."""
    step = round(share * (len(SHADES) - 1))
    return SHADES[step], WHITE if step >= FIRST_DARK else BLACK


def columns_of(text: str) -> int:
    """The columns that a text takes in a terminal: two for wide characters, none for combining ones.

    >>> columns_of("hat"), columns_of("猫")
    (3, 2)
    """
    combining = sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)
    return len(text) - combining + sum(unicodedata.east_asian_width(c) in "WF" for c in text)


def _shaded(word: str, share: float) -> str:
    background, ink = shade(share)
    return f"\x1b[48;5;{background};38;5;{ink}m {word} \x1b[0m"


def printable(token: str) -> str:
    r"""The token with escapes for control characters. Joiners of letters and emoji are kept.

    >>> printable("a\n"), printable("a\u200d"), printable("\u05d0\u200d") == "\u05d0\u200d"
    ('a\\n', 'a\\u200d', True)
    """
    kept = _JOINERS if any(not c.isascii() and c not in _JOINERS for c in token) else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in token)


def readable_tokens(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    r"""Readable strings of tokens, such as "the" for GPT-2's "\u0120the".

    A character may consist of several tokens of bytes. Each is then written as the character and its number, such as
    "\u65e5\u2081" and "\u65e5\u2082". A part whose other parts are missing keeps its name in the vocabulary. A token
    of spaces is written as "\u2423" for each space.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: The token ids of one sentence, in their order.

    Returns:
        A string for each id, with escapes for control characters.

    >>> from captum_vz.testbed import load_model
    >>> _, tokenizer = load_model()
    >>> readable_tokens(tokenizer, tokenizer("a wug [MASK]")["input_ids"])
    ['[CLS]', 'a', 'w', '##u', '##g', '[MASK]', '[SEP]']
    """
    numbers = [int(index) for index in ids]
    texts = [str(tokenizer.decode([index])) for index in numbers]
    found: list[str] = []
    while len(found) < len(texts):
        start = len(found)
        stop = _end_of_character(tokenizer, numbers, texts, start)
        if stop == start + 1:
            found.append(_readable(tokenizer, numbers[start], texts[start]))
            continue
        whole = printable(tokenizer.decode(numbers[start:stop]).strip())
        found += [f"{whole}{_subscript(part)}" for part in range(1, stop - start + 1)]
    return found


def _end_of_character(tokenizer: Any, numbers: Sequence[int], texts: Sequence[str], start: int) -> int:
    """The end of the shortest run of parts of characters that is a text; the next token, if there is no such run."""
    for stop in range(start + 1, min(start + MOST_PARTS, len(texts)) + 1):
        if not _is_part(tokenizer, numbers[stop - 1], texts[stop - 1]):
            break
        text = tokenizer.decode(list(numbers[start:stop]))
        if text.strip() and UNFINISHED not in text:
            return stop
    return start + 1


def _is_part(tokenizer: Any, index: int, text: str) -> bool:
    """Whether a token is a part of a character. ByT5 decodes a byte alone as nothing, and names it by one letter."""
    name = "" if text else str(tokenizer.convert_ids_to_tokens(index))
    return UNFINISHED in text or (len(name) == 1 and "\x80" <= name <= "\xff")


def _readable(tokenizer: Any, index: int, text: str) -> str:
    if text.strip() and UNFINISHED not in text:
        return printable(text.strip())
    name = tokenizer.convert_ids_to_tokens(index)
    if name is None:  # a model may know more tokens than its tokenizer
        return f"<{index}>"
    if text and not text.strip():
        return printable(text.replace(" ", SPACE))
    return printable(str(name).replace("\u2581", SPACE))


def _subscript(number: int) -> str:
    return "".join(chr(ord("\u2080") + int(digit)) for digit in str(number))
