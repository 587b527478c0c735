"""Tokens as text: what is written for them, which are special, which form a word; and the checks of their scores."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from torch import Tensor

from captum_vz.errors import ArgumentError

SPACE: Final = "\N{OPEN BOX}"  # a space of a token that holds nothing else
EMPTY: Final = "\N{EMPTY SET}"  # a token without characters
LONGEST_LABEL: Final = 20  # characters

#: English words that say little by themselves: articles, prepositions, pronouns, conjunctions, auxiliaries.
_STOP_WORDS = """
a about above after against all also am an and any are aren't as at be because been before being below between
both but by can can't could couldn't did didn't do does doesn't doing don't down during each either few for from further
had hadn't has hasn't have haven't having he her here hers herself him himself his how i if in into is isn't it its
itself just may me might more most must mustn't my myself neither no nor not of off on once only onto or other our ours
ourselves out over own same shall shan't she should shouldn't so some such than that that's the their theirs them
themselves then there these they this those through to too under until up upon very was wasn't we were weren't what when
where which while who whom whose why will with within without won't would wouldn't you your yours yourself yourselves
s t d ll m re ve
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

# [MASK] and [UNK] stand for words, so they are not among them.
_SPECIAL: Final = re.compile(
    r"\[(CLS|SEP|PAD|BOS|EOS)\]|</?s>|<(pad|bos|eos|cls|sep)>|<\|[^|<>]+\|>|<(start|end)_of_turn>|<0x0A>"
)
_MARKS: Final = ("\u0120", "\u2581", "\u010a")  # of a space or a line break, in byte-level and SentencePiece tokens
# How byte-level vocabularies write bytes: printable characters of Latin-1 as they are, the others from U+0100.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [one for one in range(256) if one not in _PLAIN]
_BYTES = {chr(one): one for one in _PLAIN} | {chr(256 + place): one for place, one in enumerate(_OTHERS)}
# These characters are not seen, break lines, or reverse the text that follows.
_ESCAPED: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
# Joiners in Arabic and Indian scripts and in emoji, and the tags of flags.
_JOINERS: Final = "\u200c\u200d" + "".join(map(chr, range(0xE0020, 0xE0080)))
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"  # what a part of a character is decoded as
_MOST_PARTS: Final = 16  # tokens of bytes whose characters are shown together
_SUBSCRIPTS: Final = str.maketrans("0123456789", "\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089")


def printable(token: str) -> str:
    r"""The token with escapes for control characters and marks of direction. Joiners of letters and emoji are kept.

    >>> printable("a\n"), printable("a\u200d"), printable("\u05d0\u200d") == "\u05d0\u200d"
    ('a\\n', 'a\\u200d', True)
    """
    kept = _JOINERS if any(not c.isascii() and c not in _JOINERS for c in token) else ""
    escaped = {c for c in token if unicodedata.category(c) in _ESCAPED and c not in kept}
    return "".join(c.encode("unicode_escape", "surrogatepass").decode() if c in escaped else c for c in token)


def visible(token: str) -> str:
    r"""The printable token, with signs in the place of spaces that stand alone, and of nothing.

    >>> visible("a" + chr(0) + chr(10)), visible("  "), visible("")
    ('a\\x00\\n', '␣␣', '∅')
    """
    shown = printable(token)
    return shown if shown.strip() else SPACE * len(shown) or EMPTY


def shortened(token: str, longest: int = LONGEST_LABEL) -> str:
    """The visible token, of at most `longest` characters."""
    token = visible(token)
    return token if len(token) <= longest else token[: longest - 1] + "…"


def quoted(token: str) -> str:
    """The token in a title: words have quotation marks, unlike signs and tokens in brackets, such as [MASK]."""
    short = shortened(token)
    return f"“{short}”" if short[:1].isalnum() else short


def is_special(token: str) -> bool:
    """Whether a token looks like a special token, such as [CLS] or </s>."""
    return _SPECIAL.fullmatch(token) is not None


def without_marks(tokens: Sequence[str]) -> list[str]:
    r"""The characters of tokens of a vocabulary, without the marks for spaces. "##" of WordPiece is kept.

    >>> without_marks(["The", "\u0120caf\u00c3\u00a9", "\u010a"]), without_marks(["\u2581a", "\u2581wug"])
    (['The', 'café', '\n'], ['a', 'wug'])
    """
    return list(map(_reader(tokens), tokens))


def words_of(tokens: Sequence[str], words: Any = None, name: str = "words") -> list[int]:
    r"""The number of each token's word, from 0 in the order of the text, by the marks of the vocabulary.

    Or by `words`, the numbers of a user: neighbours with the same number are one word, None is a word by itself.

    >>> words_of(["a", "\u0120w", "ug", ",", "\u0120x"]), words_of(["a", "b", "c"], [None, 0, 0])
    ([0, 1, 1, 2, 3], [0, 1, 1])
    """
    if words is None:
        continues = _continues(tokens)
    elif len(words) != len(tokens):
        raise ArgumentError(
            f"{name} has {len(words)} entries for {len(tokens)} tokens: pass the number of each token's word, as "
            "word_ids() of a tokenizer's output gives them."
        )
    else:
        continues = [False, *(one is not None and one == last for last, one in pairwise(words))]
    return [begun - 1 for begun in accumulate(place == 0 or not one for place, one in enumerate(continues))]


def word_texts(tokens: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """The text of each word: its pieces without their marks."""
    read, words = _reader(tokens), dict[int, list[str]]()
    for token, number in zip(tokens, numbers, strict=True):
        words.setdefault(number, []).append(token)
    return [read("".join(map(without_piece, one))) or one[0] for one in words.values()]


def without_piece(token: str) -> str:
    """A piece of WordPiece without its mark."""
    return token[2:] if token.startswith("##") and len(token) > 2 else token


def _reader(tokens: Sequence[str]) -> Callable[[str], str]:
    if any(token[:1] in ("\u0120", "\u010a") for token in tokens):
        return _from_bytes
    if sum(token[:1] == "\u2581" for token in tokens) > 1:
        return lambda token: _spaceless(token.replace("\u2581", " "))
    return str


def _from_bytes(token: str) -> str:
    """A token of a byte-level vocabulary as text. A part of a character, or another text, stays as it is."""
    try:
        return _spaceless(bytes(_BYTES[one] for one in token).decode())
    except (KeyError, UnicodeDecodeError):
        return token


def _spaceless(text: str) -> str:
    """The text without its first space, unless it is nothing else."""
    return text[1:] if text[:1] == " " and text.strip(" ") else text


def _continues(tokens: Sequence[str]) -> list[bool]:
    """Whether each token belongs to the word before it, by the marks of its vocabulary."""
    pieces = [token != without_piece(token) for token in tokens]
    begins = [token[:1] in _MARKS for token in tokens]
    if any(pieces) or sum(begins) < 2:
        return pieces
    return [
        not begin and bool(re.match(r"\w", token)) and bool(re.search(r"\w$", last))
        for begin, token, last in zip(begins, tokens, ["", *tokens[:-1]], strict=True)
    ]


def readable_tokens(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    r"""Readable strings of tokens, such as "the" for GPT-2's "\u0120the".

    The ids are those of one sentence, in their order. Each has a string, with escapes for control characters. A
    character may consist of several tokens of bytes. Each is then written as the character and its number, such as
    "\u65e5\u2081" and "\u65e5\u2082". A part whose other parts are missing keeps its name in the vocabulary. A token
    of spaces is written as "\u2423" for each space.

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
        found += [whole + str(part).translate(_SUBSCRIPTS) for part in range(1, stop - start + 1)]
    return found


def _end_of_character(tokenizer: Any, numbers: Sequence[int], texts: Sequence[str], start: int) -> int:
    """The end of the shortest run of parts of characters that is a text; the next token, if there is no such run."""
    for stop in range(start + 1, min(start + _MOST_PARTS, len(texts)) + 1):
        # ByT5 decodes a byte alone as nothing, and names it by one letter.
        name = "" if texts[stop - 1] else str(tokenizer.convert_ids_to_tokens(numbers[stop - 1]))
        if _UNFINISHED not in texts[stop - 1] and not (len(name) == 1 and "\x80" <= name <= "\xff"):
            break
        text = tokenizer.decode(list(numbers[start:stop]))
        if text.strip() and _UNFINISHED not in text:
            return stop
    return start + 1


def _readable(tokenizer: Any, index: int, text: str) -> str:
    if text.strip() and _UNFINISHED not in text:
        return printable(text.strip())
    name = tokenizer.convert_ids_to_tokens(index)
    if name is None:  # a model may know more tokens than its tokenizer
        return f"<{index}>"
    return printable((text if text and not text.strip() else str(name).replace("\u2581", " ")).replace(" ", SPACE))


def one_example(scores: Any, *sides: int, heads: bool = False, place: str = "") -> Tensor:
    """Scores of one example on the CPU, without a batch dimension.

    The sides are the number of tokens of a row, or of output tokens and source tokens of a map. `place` begins errors.
    """
    inner = "heads, out, in" if heads else "out, in"
    kind = "scores (tokens,) or (1, tokens)" if len(sides) == 1 else f"a map ({inner}) or (1, {inner})"
    expected = f"{place}Expected {kind}"
    if not isinstance(scores, Tensor):
        raise ArgumentError(f"{expected}, got {type(scores).__name__}.")
    dimensions, given = len(sides) + heads, tuple(scores.shape)
    example = scores[0] if len(given) == dimensions + 1 and given[0] == 1 else scores
    if len(given) == dimensions + 1 and given[0] != 1:
        more = ", or heads=True for maps of heads" if len(sides) == 2 and not (heads or place) else ""
        raise ArgumentError(f"{expected}, got a batch {given}: pass one example of it, such as scores[0]{more}.")
    if example.dim() != dimensions or example.shape[-len(sides) :] != sides:
        several = len(set(sides)) > 1
        tokens = f"{sides[0]} output tokens and {sides[1]} source tokens" if several else f"the {sides[0]} tokens"
        raise ArgumentError(f"{expected} for {tokens}, got {given}.")
    if not example.isfinite().all():
        raise ArgumentError(f"{place}Expected finite scores, got NaN or infinity, which cannot be drawn.")
    return example.detach().cpu()


def position_of(token: int | None, tokens: Sequence[str]) -> int | None:
    """The position of the marked token, counted from the start."""
    count = len(tokens)
    if token is None or -count <= token < count:
        return token if token is None else token % count
    told = f"there are {count} tokens, so pass a position from {-count} to {count - 1}"
    raise ArgumentError(f"token {token} is out of range: {told}.", "token")
