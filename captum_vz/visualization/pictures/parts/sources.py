"""The tokens of an axis: pieces merged to words, tokens left out, tokens that are dimmed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import position_of

#: Numbers of words, one for each token, as `word_ids()` of a tokenizer's output gives them; or True: by their marks.
Words = Sequence[int | None] | bool | None
#: "special", or positions of tokens.
Chosen = str | Collection[int] | None

# [MASK] and [UNK] stand for words, so they are not among them.
_SPECIAL: Final = re.compile(
    r"\[(CLS|SEP|PAD|BOS|EOS)\]|</?s>|<(pad|bos|eos|cls|sep)>|<\|[^|]*\|>|<(start|end)_of_turn>"
)
_CONTINUED: Final = "##"  # of WordPiece
_BEGINS: Final = ("Ġ", "▁")  # of byte-level BPE and of SentencePiece


@dataclass(frozen=True)
class Axis:
    """The drawn tokens at one side of a map.

    Attributes:
        labels: A label for each drawn row or column.
        member: For each token its row or column, -1 for tokens that are left out.
        dimmed: The rows or columns that are dimmed.
    """

    labels: list[str]
    member: Tensor
    dimmed: list[int]

    def columns(self, scores: Tensor) -> Tensor:
        """Scores `(..., tokens)` as `(..., columns)`: the scores of a word's pieces are added."""
        return scores.to(torch.float64) @ self._ones()

    def rows(self, scores: Tensor) -> Tensor:
        """Scores `(tokens, ...)` as `(rows, ...)`: the row of a word is the mean of its pieces' rows."""
        ones = self._ones()
        return (ones / ones.sum(0)).T @ scores.to(torch.float64)

    def place(self, token: int | None, tokens: Sequence[str]) -> int | None:
        """The row or column of a token."""
        position = position_of(token, tokens)
        if position is None:
            return None
        place = int(self.member[position])
        if place < 0:
            raise ArgumentError(f"token {token} ({tokens[position]}) is marked and left out: keep it, or mark another.")
        return place

    def _ones(self) -> Tensor:
        return (self.member[:, None] == torch.arange(len(self.labels))).to(torch.float64)


def make_axis(tokens: Sequence[str], words: Words = None, dim: Chosen = None, drop: Chosen = None) -> Axis:
    """The axis of some tokens; see :func:`draw_maps` for the arguments."""
    numbers = _numbers(tokens, words)
    gone, pale = _positions(tokens, drop, "drop"), _positions(tokens, dim, "dim")
    labels: list[str] = []
    member, dimmed, places = [], [], dict[int, int]()
    for position, (token, number) in enumerate(zip(tokens, numbers, strict=True)):
        if position in gone:
            member.append(-1)
            continue
        if number not in places:
            places[number] = len(labels)
            labels.append(_bare(token) if words else token)
            if position in pale:
                dimmed.append(places[number])
        else:
            labels[places[number]] += _bare(token)
        member.append(places[number])
    if not labels:
        raise ArgumentError("drop leaves out all tokens: there is nothing to draw. Keep at least one.")
    return Axis(labels, torch.tensor(member), dimmed)


def is_special(token: str) -> bool:
    """Whether a token looks like a special token, such as [CLS] or </s>."""
    return _SPECIAL.fullmatch(token) is not None


def _numbers(tokens: Sequence[str], words: Words) -> list[int]:
    """The number of each token's word. A token without a word is a word of its own."""
    if words is None or words is False:
        return list(range(len(tokens)))
    if words is True:
        return _by_marks(tokens)
    if len(words) != len(tokens):
        raise ArgumentError(
            f"words has {len(words)} entries for {len(tokens)} tokens: pass the number of each token's word, as "
            "word_ids() of a tokenizer's output gives them, or True."
        )
    last, found = -1, []
    for position, word in enumerate(words):
        continues = word is not None and position > 0 and words[position - 1] == word
        last += not continues
        found.append(last)
    return found


def _by_marks(tokens: Sequence[str]) -> list[int]:
    begins = any(token.startswith(_BEGINS) for token in tokens)
    last, found = -1, []
    for position, token in enumerate(tokens):
        continued = token.startswith(_CONTINUED) or (begins and not token.startswith(_BEGINS))
        after_special = position == 0 or is_special(tokens[position - 1])
        last += not (continued and not is_special(token) and not after_special)
        found.append(last)
    return found


def _bare(token: str) -> str:
    """The token without the mark that says whether it begins a word."""
    if token.startswith(_CONTINUED) and len(token) > len(_CONTINUED):
        return token[len(_CONTINUED) :]
    return token[1:] if token.startswith(_BEGINS) and len(token) > 1 else token


def _positions(tokens: Sequence[str], chosen: Chosen, name: str) -> set[int]:
    if chosen is None:
        return set()
    if isinstance(chosen, str):
        if chosen != "special":
            raise ArgumentError(f"{name} is {chosen!r}: pass 'special', or positions of tokens.")
        return {position for position, token in enumerate(tokens) if is_special(token)}
    return {place for one in chosen if (place := position_of(one, tokens)) is not None}
