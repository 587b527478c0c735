"""Labels of tokens that are safe to show, their words, and their kinds."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from captum_vz.errors import ArgumentError

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

#: The kinds of source tokens, in the order of their codes in the page.
KINDS = ("", "special", "stop", "punctuation")

# A mask stands for a word, so it is not among the special tokens.
_SPECIAL = re.compile(r"\[(?:CLS|SEP|PAD|UNK|BOS|EOS)\]|</?s>|<(?:pad|unk|bos|eos|cls|sep)>|<\|[^|<>]+\|>|<0x0A>")
_MARKS = ("\u0120", "\u2581", "\u010a")  # of a space or a line break, in byte-level and SentencePiece vocabularies
# How byte-level vocabularies write bytes: printable characters of Latin-1 as they are, the others from U+0100.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [one for one in range(256) if one not in _PLAIN]
_BYTES = {chr(one): one for one in _PLAIN} | {chr(256 + place): one for place, one in enumerate(_OTHERS)}
# These characters are not seen, break lines, or reverse the text that follows.
_ESCAPED = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
# Joiners inside letters and emoji, and the tags of flags.
_JOINERS = {"\u200c", "\u200d", *map(chr, range(0xE0020, 0xE0080))}


@dataclass(frozen=True)
class Labels:
    """The tokens along one side of a map.

    Attributes:
        tokens: The text of each token.
        groups: The number of each token's word, from 0 in the order of the text.
        words: The text of each word.
        kinds: The kind of each token, its index in :data:`KINDS`.
        word_kinds: The kind of each word.
    """

    tokens: list[str]
    groups: list[int]
    words: list[str]
    kinds: list[int]
    word_kinds: list[int]


def read_labels(tokens: Any, words: Any, special: Any, name: str) -> Labels:
    """The labels of one side. `words` and `special` may be None; `name` is the argument's name, for errors."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not all(isinstance(one, str) for one in tokens):
        raise ArgumentError(f"{name} is {_short(tokens)}: pass a list of strings, one for each token.")
    if not tokens:
        raise ArgumentError(f"{name} is empty: pass a string for each token of the maps.")
    read = _reader(tokens)
    shown = [visible(read(token)) for token in tokens]
    groups = _guessed(tokens) if words is None else _given(words, len(tokens), name)
    members = [[i for i, group in enumerate(groups) if group == word] for word in range(max(groups) + 1)]
    named = [visible(read("".join(_letters(tokens[i]) for i in one)) or tokens[one[0]]) for one in members]
    marked = _marked(special, shown, name)
    plain = [_kind(_letters(text), mark) for text, mark in zip(shown, marked, strict=True)]
    whole = [_kind(text, all(marked[i] for i in one)) for text, one in zip(named, members, strict=True)]
    # A piece of a word is no stop word or punctuation by itself.
    kinds = [kind if len(members[group]) == 1 or kind < 2 else 0 for kind, group in zip(plain, groups, strict=True)]
    return Labels(shown, groups, named, kinds, whole)


def visible(token: str) -> str:
    r"""The token on one line, with escapes for control characters and for marks of direction.

    Joiners of emoji and of Persian or Indic letters are kept, because they belong to the character that is shown.

    >>> visible("a" + chr(0) + chr(10) + chr(0x202E)), visible("  "), visible("")
    ('a\\x00\\n\\u202e', '␣␣', '∅')
    """
    joiners = _JOINERS if set(token) - _JOINERS else set()
    shown = "".join(
        one.encode("unicode_escape", "surrogatepass").decode()
        if unicodedata.category(one) in _ESCAPED and one not in joiners
        else one
        for one in token
    )
    return shown if shown.strip() else "␣" * len(shown) or "∅"


def _letters(token: str) -> str:
    """The letters of a piece of WordPiece, without its mark."""
    return token[2:] if token.startswith("##") and len(token) > 2 else token


def _reader(tokens: Sequence[str]) -> Callable[[str], str]:
    """What reads the tokens of this vocabulary: their characters, without the space before a word."""
    if any(token[:1] in ("\u0120", "\u010a") for token in tokens):
        return _from_bytes
    if sum(token[:1] == "\u2581" for token in tokens) > 1:
        return lambda token: _spaceless(token.replace("\u2581", " "))
    return lambda token: token


def _from_bytes(token: str) -> str:
    """A token of a byte-level vocabulary as text. A part of a character, or another text, stays as it is."""
    if not set(token) <= _BYTES.keys():
        return token
    try:
        return _spaceless(bytes(_BYTES[one] for one in token).decode())
    except UnicodeDecodeError:
        return token


def _spaceless(text: str) -> str:
    """The text without its first space, unless it is nothing else."""
    return text[1:] if text[:1] == " " and text.strip(" ") else text


def _guessed(tokens: Sequence[str]) -> list[int]:
    """The words that the marks of WordPiece, of byte-level BPE or of SentencePiece show."""
    pieces = [token.startswith("##") and len(token) > 2 for token in tokens]
    if any(pieces):
        continues = pieces
    else:
        begins = [token[:1] in _MARKS for token in tokens]
        many = sum(begins) > 1
        continues = [
            many and index > 0 and not begin and bool(re.match(r"\w", token)) and bool(re.search(r"\w$", before))
            for index, (begin, token, before) in enumerate(zip(begins, tokens, ["", *tokens[:-1]], strict=True))
        ]
    groups, number = [], -1
    for index, piece in enumerate(continues):
        number += not piece or index == 0
        groups.append(number)
    return groups


def _given(words: Any, count: int, name: str) -> list[int]:
    """The numbers of the words, from 0 in the order of the text. None marks a token that is a word by itself."""
    side = "words" if name == "tokens" else f"{name[:-1]}_words"
    listed = list(words) if isinstance(words, Sequence) and not isinstance(words, str) else None
    if listed is None or not all(one is None or isinstance(one, int) for one in listed):
        raise ArgumentError(f"{side} is {_short(words)}: pass the number of each token's word, or None, in a list.")
    if len(listed) != count:
        raise ArgumentError(f"{side} has {len(listed)} entries for {count} tokens: pass one for each token.")
    keys = [("alone", index) if one is None else ("word", one) for index, one in enumerate(listed)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _marked(special: Any, shown: Sequence[str], name: str) -> list[bool]:
    """Which tokens are special tokens."""
    if special is None:
        return [bool(_SPECIAL.fullmatch(token)) for token in shown]
    flags = torch.as_tensor(special).flatten().tolist()
    if len(flags) != len(shown) or not all(flag in (0, 1) for flag in flags):
        raise ArgumentError(
            f"special is {_short(special)} for the {len(shown)} {name}: pass True or False for each token, such as the "
            "special_tokens_mask of the tokenizer."
        )
    return [bool(flag) for flag in flags]


def _kind(text: str, special: bool) -> int:
    if special:
        return 1
    text = text.strip().lower()
    return 2 if text in STOP_WORDS else 0 if re.search(r"[^\W_]", text) or not _is_punctuation(text) else 3


def _is_punctuation(text: Collection[str]) -> bool:
    return all(unicodedata.category(one)[0] in "PZ" for one in text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
