"""The pieces in which a text is read: one, or windows of a text that is longer than the model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError

#: The part of a window that the next window repeats, if the user does not say.
OVERLAP = 4


@dataclass(frozen=True)
class Piece:
    """Some tokens of a text, which the model reads alone.

    Attributes:
        inputs: What the model takes, by keyword, for the only example.
        places: The positions of the tokens in the text. None: the number of tokens is known after the model has run.
        window: The tokens `(start, stop)` between the fixed ones, such as [CLS], that all pieces have.
    """

    inputs: dict[str, Tensor]
    places: tuple[int, ...] | None = None
    window: tuple[int, int] = (0, 0)

    def local(self, place: int) -> int:
        """The position in the piece of a position in the text."""
        return place if self.places is None else self.places.index(place)

    def spread(self, scores: Tensor, count: int) -> Tensor:
        """Scores of this piece's tokens `(..., in)` for all tokens of the text. Tokens outside the piece have 0."""
        if self.places is None or len(self.places) == count == scores.shape[-1]:
            return scores
        whole = scores.new_zeros(*scores.shape[:-1], count)
        whole[..., list(self.places)] = scores[..., : len(self.places)]
        return whole


def owner(pieces: Sequence[Piece], place: int) -> int:
    """The number of the piece in which a token has the most context: it is the farthest from an edge of a window.

    A window at an end of the text has its edge only inside. Tokens before all windows, such as [CLS], belong to the
    first piece, and tokens after all windows to the last.
    """
    first, last = pieces[0].window[0], pieces[-1].window[1]
    if len(pieces) == 1 or place < first:
        return 0
    if place >= last:
        return len(pieces) - 1

    def context(number: int) -> int:
        start, stop = pieces[number].window
        before = place - start if start > first else last
        after = stop - 1 - place if stop < last else last
        return min(before, after) if start <= place < stop else -1

    return max(range(len(pieces)), key=context)


def cut(inputs: Mapping[str, Tensor], fixed: Sequence[bool], size: int | None, overlap: int | None) -> list[Piece]:
    """Cut a text into windows of at most `size` tokens.

    Args:
        inputs: What the tokenizer gives, `(1, tokens)` each.
        fixed: Whether each token is in each window: special tokens at the ends, and a question before its text.
        size: The most tokens of a window, fixed tokens included. None: the text stays whole.
        overlap: The tokens that two neighbours share. None: a quarter of a window.

    Raises:
        ArgumentError: The window has no room for a token, or does not move.

    >>> found = cut({"input_ids": torch.arange(8)[None]}, [True] + 6 * [False] + [True], 5, 1)
    >>> [piece.places for piece in found], owner(found, 3), owner(found, 4)
    ([(0, 1, 2, 3, 7), (0, 3, 4, 5, 7), (0, 5, 6, 7)], 0, 1)
    """
    count = len(fixed)
    free = [place for place, stays in enumerate(fixed) if not stays]
    if size is None or count <= size or not free:
        return [Piece(dict(inputs), tuple(range(count)), (0, count))]
    start, stop = free[0], free[-1] + 1
    room = size - (count - (stop - start))
    shared = max(room // OVERLAP, 0) if overlap is None else overlap
    if room < 1 or not 0 <= shared < room:
        less = f"an overlap from 0 to {room - 1}" if room > 0 else "a shorter question"
        raise ArgumentError(
            f"window is {(size, shared)}, but each window has {size - room} fixed tokens, such as [CLS] or a question, "
            f"and room for {max(room, 0)} others: pass a larger window, or {less}.",
            "window",
        )
    pieces: list[Piece] = []
    while not pieces or pieces[-1].window[1] < stop:
        first = start + len(pieces) * (room - shared)
        last = min(first + room, stop)
        places = (*range(start), *range(first, last), *range(stop, count))
        own = {
            name: one[:, list(places)] if one.dim() > 1 and one.shape[1] == count else one
            for name, one in inputs.items()
        }
        pieces.append(Piece(own, places, (first, last)))
    return pieces


def window_size(window: Any, most: int | None, count: int) -> tuple[int | None, int | None]:
    """The size of a window and its overlap; None for a text that stays whole.

    Args:
        window: What the user passes: True, a size, or (size, overlap).
        most: The most tokens that the model takes; None: any number.
        count: The tokens of the text.
    """
    if window is None or window is False:
        if most is not None and count > most:
            raise ArgumentError(
                f"the text is {count} tokens long, but the model takes at most {most}: pass window= to read it "
                "in windows that overlap. No row then looks outside its window."
            )
        return None, None
    pair = tuple(window) if isinstance(window, (list, tuple)) else (window,)
    size, overlap = (*pair, None, None)[:2]
    if len(pair) not in (1, 2) or not all(isinstance(one, int) for one in pair) or isinstance(overlap, bool):
        raise ArgumentError(f"window is {window!r}: pass True, a number of tokens, or (tokens, overlap).", "window")
    size = most if size is True else size
    if size is None:
        raise ArgumentError("window is True, but the model takes texts of any length: pass a number.", "window")
    if most is not None and size > most:
        raise ArgumentError(
            f"window is {size}, but the model takes at most {most} tokens: pass at most {most}.", "window"
        )
    return size, overlap


def joined(numbers: Sequence[Mapping[str, Tensor]], pieces: Sequence[Piece], of_tokens: bool) -> dict[str, Tensor]:
    """The numbers of the whole text: for each token those of its window; without an axis of tokens the mean."""
    if len(numbers) == 1:
        return dict(numbers[0])
    if not of_tokens:
        return {name: torch.stack([one[name] for one in numbers]).mean(0) for name in numbers[0]}
    places = range(max(pieces[-1].places or ()) + 1)
    owners = [(owner(pieces, place), place) for place in places]
    return {name: torch.stack([numbers[k][name][pieces[k].local(place)] for k, place in owners]) for name in numbers[0]}
