"""What a figure draws: tokens merged to words, left out or dimmed, and maps of them, checked and subtracted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures.axes import writable
from captum_vz.visualization.pictures.files import Content, largest
from captum_vz.visualization.tokens import (
    LONGEST_LABEL,
    is_special,
    one_example,
    position_of,
    shortened,
    without_marks,
    word_texts,
    words_of,
)

#: Numbers of words, one for each token, as `word_ids()` of a tokenizer's output gives them; or True: by their marks.
Words = Sequence[int | None] | bool | None
#: "special", or positions of tokens.
Chosen = str | Collection[int] | None

_PAIR: Final = " / "  # between the tokens of two texts
_LONGEST_SIDE: Final = 14  # characters of each of them


@dataclass(frozen=True)
class Axis:
    """The drawn tokens at one side of a map."""

    labels: list[str]  # of each drawn row or column
    member: Tensor  # for each token its row or column, -1 for tokens that are left out
    dimmed: list[int]  # the rows or columns that are pale

    @property
    def shown(self) -> list[str]:
        """The written labels. A long label of two texts has the beginning of both."""
        return [
            _PAIR.join(shortened(side, _LONGEST_SIDE) for side in one.split(_PAIR))
            if _PAIR in one and len(one) > LONGEST_LABEL
            else shortened(one)
            for one in map(writable, self.labels)  # a code for a letter is longer than the letter
        ]

    @property
    def counted(self) -> list[int]:
        """The rows or columns that are not dimmed."""
        return [i for i in range(len(self.labels)) if i not in self.dimmed]

    def columns(self, scores: Tensor) -> Tensor:
        """Scores `(..., tokens)` as `(..., columns)`: the scores of a word's pieces are added."""
        return scores.to(torch.float64) @ self._ones()

    def rows(self, scores: Tensor) -> Tensor:
        """Scores `(tokens, ...)` as `(rows, ...)`: the row of a word is the mean of its pieces' rows."""
        ones = self._ones()
        return (ones / ones.sum(0)).T @ scores.to(torch.float64)

    def _ones(self) -> Tensor:
        return (self.member[:, None] == torch.arange(len(self.labels))).to(torch.float64)


def make_axis(tokens: Sequence[str], words: Words = None, dim: Chosen = None, drop: Chosen = None) -> Axis:
    """The axis of some tokens, whose marks for spaces are left out; see :func:`draw_maps` for the arguments."""
    gone, pale = _positions(tokens, drop, "drop"), _positions(tokens, dim, "dim")
    kept = [position for position in range(len(tokens)) if position not in gone]
    if not kept:
        raise ArgumentError("drop leaves out all tokens: there is nothing to draw. Keep at least one.")
    if words is None or words is False:
        numbers, texts = list(range(len(tokens))), without_marks(tokens)
        labels = [texts[position] for position in kept]
    else:
        numbers = words_of(tokens, None if words is True else words)
        labels = word_texts([tokens[position] for position in kept], [numbers[position] for position in kept])
    firsts = {numbers[position]: position for position in reversed(kept)}
    places = {number: place for place, number in enumerate(sorted(firsts))}
    member = [-1 if position in gone else places[numbers[position]] for position in range(len(tokens))]
    return Axis(labels, torch.tensor(member), [places[number] for number in places if firsts[number] in pale])


def _positions(tokens: Sequence[str], chosen: Chosen, name: str) -> set[int | None]:
    if chosen == "special":
        return {position for position, token in enumerate(tokens) if is_special(token)}
    if isinstance(chosen, str):
        raise ArgumentError(f"{name} is {chosen!r}: pass 'special', or positions of tokens.")
    return {position_of(one, tokens) for one in chosen or ()}


@dataclass(frozen=True)
class Panels:
    """Maps `(rows, columns)` in float64 by their titles, ready to be drawn."""

    scores: dict[str, Tensor]
    rows: Axis
    columns: Axis
    marked: int | None  # a row
    is_difference: bool = False

    def counted(self, scores: Tensor) -> Tensor:
        """The scores that are not dimmed. If all are dimmed: all."""
        rows, columns = self.rows.counted, self.columns.counted
        return scores[rows][:, columns] if rows and columns else scores

    def content(self, title: str, label: str) -> Content:
        """A map in words and as a table."""
        scores, rows, columns = self.scores[title], self.rows.labels, self.columns.labels

        def table() -> list[tuple[Any, ...]]:
            lines = enumerate(scores.tolist())
            return [(title, i, rows[i], j, columns[j], one) for i, line in lines for j, one in enumerate(line)]

        kind = "difference of two maps" if self.is_difference else "map"
        size = f"{len(rows)} tokens"
        if self.rows is not self.columns:
            size = f"{len(rows)} output tokens by {len(columns)} source tokens"
        if self.marked is not None:
            most = largest(scores[self.marked], columns.__getitem__)
            found = f"the row of {rows[self.marked]} has its largest scores at {most}."
        else:
            most = largest(scores, lambda i: f"{rows[i // len(columns)]} from {columns[i % len(columns)]}")
            found = f"the largest scores are {most}."
        names = ("panel", "out", "output token", "in", "source token", label)
        return Content(f"{title}, {kind} of {size}: {found}", names, table)


def prepare_panels(
    maps: Mapping[str, Tensor] | Sequence[Tensor],
    tokens: Sequence[str],
    token: int | None,
    out_tokens: Sequence[str] | None,
    minus: tuple[Any, ...] | None,
    heads: bool,
    words: Any,
    dim: Chosen,
    drop: Chosen,
) -> Panels:
    """Maps that are ready to be drawn; see :func:`draw_maps`."""
    if out_tokens is None:
        outputs, columns = tokens, make_axis(tokens, words, dim, drop)
        rows = columns
    else:
        if words not in (None, True, False) and not (isinstance(words, tuple) and len(words) == 2):
            raise ArgumentError(
                "words are numbers for one side: with out_tokens pass a pair, (sources, outputs), or True."
            )
        in_words, out_words = words if isinstance(words, tuple) else (words, words)
        outputs, columns = out_tokens, make_axis(tokens, in_words, dim, drop)
        # Positions name source tokens, but special tokens are known at both sides.
        rows = make_axis(outputs, out_words, *(one if isinstance(one, str) else None for one in (dim, drop)))
    scores = _merged(maps, rows, columns, heads)
    position = position_of(token, outputs)
    marked = None if position is None else int(rows.member[position])
    if marked == -1:
        raise ArgumentError(
            f"token {token} ({outputs[position or 0]}) is marked and left out: keep it, or mark another."
        )
    found = Panels(scores, rows, columns, marked)
    if minus is None:
        return found
    if out_tokens is not None or not 2 <= len(minus) <= 3:
        raise ArgumentError(
            "minus needs maps of one text: pass (maps, tokens) or (maps, tokens, words), and no out_tokens."
        )
    other = make_axis(minus[1], minus[2] if len(minus) == 3 else words is True, dim, drop)
    return _difference(found, _merged(minus[0], other, other, heads), other.labels)


def by_title(given: Any, needed: str) -> Mapping[str, Any]:
    """Maps or rows by their titles. `needed` is the error, if there are none."""
    found = given if isinstance(given, Mapping) else {f"layer {index}": one for index, one in enumerate(given)}
    if not found:
        raise ArgumentError(f"{needed}, got none.")
    return found


def _merged(maps: Any, rows: Axis, columns: Axis, heads: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for title, scores in by_title(maps, "draw_maps needs at least one map").items():
        one = one_example(scores, len(rows.member), len(columns.member), heads=heads)
        found |= {f"{title}, head {head}": each for head, each in enumerate(one)} if heads else {title: one}
    return {title: rows.rows(columns.columns(one)) for title, one in found.items()}


def _difference(found: Panels, others: dict[str, Tensor], other: list[str]) -> Panels:
    """The first maps minus the others, of tokens that are aligned by what the two texts share."""
    if found.scores.keys() != others.keys():
        raise ArgumentError(f"minus has the maps {list(others)}: pass the same as maps, {list(found.scores)}.")
    passages = _aligned(found.rows.labels, other)
    labels = [_PAIR.join(dict.fromkeys(map(" ".join, pair))) for pair in passages]
    first, second = ([place for place, pair in enumerate(passages) for _ in pair[side]] for side in (0, 1))
    marked = None if found.marked is None else first[found.marked]
    axis = Axis(labels, torch.tensor(first), sorted({first[i] for i in found.rows.dimmed}))
    minus = Axis(labels, torch.tensor(second), [])
    scores = {
        title: axis.columns(axis.rows(mine)) - minus.columns(minus.rows(others[title]))
        for title, mine in found.scores.items()
    }
    return Panels(scores, axis, axis, marked, is_difference=True)


def _aligned(first: Sequence[str], second: Sequence[str]) -> list[tuple[Sequence[str], Sequence[str]]]:
    """Passages that stand for each other: one by one where as many differ as in the other text, else together."""
    groups: list[tuple[Sequence[str], Sequence[str]]] = []
    for _, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if b - a == d - c:
            groups += [([one], [other]) for one, other in zip(first[a:b], second[c:d], strict=True)]
        elif b > a and d > c:
            groups.append((first[a:b], second[c:d]))
        else:
            raise ArgumentError(
                f"The two texts cannot be aligned: {' '.join(first[a:b] or second[c:d])!r} has no partner. Pass texts "
                "that differ in words, with words=True if only their pieces differ."
            )
    return groups
