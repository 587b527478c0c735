"""What a figure draws: tokens merged to words, left out or dimmed, and maps of them, checked and subtracted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
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
        place = None if position is None else int(self.member[position])
        if position is not None and place == -1:
            raise ArgumentError(f"token {token} ({tokens[position]}) is marked and left out: keep it, or mark another.")
        return place

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
    places: dict[int, int] = {}
    member, dimmed = torch.full((len(tokens),), -1), []
    for position in kept:
        if numbers[position] not in places:
            places[numbers[position]] = len(places)
            dimmed += [len(places) - 1] if position in pale else []
        member[position] = places[numbers[position]]
    return Axis(labels, member, dimmed)


def _positions(tokens: Sequence[str], chosen: Chosen, name: str) -> set[int]:
    if isinstance(chosen, str):
        if chosen != "special":
            raise ArgumentError(f"{name} is {chosen!r}: pass 'special', or positions of tokens.")
        return {position for position, token in enumerate(tokens) if is_special(token)}
    return {place for one in chosen or () if (place := position_of(one, tokens)) is not None}


@dataclass(frozen=True)
class Panels:
    """Maps that are ready to be drawn.

    Attributes:
        scores: From titles to maps `(rows, columns)` in float64.
        rows: A label for each row.
        columns: A label for each column.
        marked: The marked row. None: none.
        dimmed_rows: Rows that are drawn pale.
        dimmed_columns: Columns that are drawn pale.
        is_square: Whether rows and columns are the same tokens.
        is_difference: Whether maps of a second text were subtracted.
    """

    scores: dict[str, Tensor]
    rows: list[str]
    columns: list[str]
    marked: int | None
    dimmed_rows: list[int]
    dimmed_columns: list[int]
    is_square: bool
    is_difference: bool = False

    @property
    def shown(self) -> tuple[list[str], list[str]]:
        """The written labels of rows and columns."""
        return [self._short(one) for one in self.rows], [self._short(one) for one in self.columns]

    def _short(self, label: str) -> str:
        if not self.is_difference or len(label) <= LONGEST_LABEL:
            return shortened(label)
        return _PAIR.join(shortened(side, _LONGEST_SIDE) for side in label.split(_PAIR))

    def counted(self, scores: Tensor) -> Tensor:
        """The scores that are not dimmed. If all are dimmed: all."""
        rows = [i for i in range(len(self.rows)) if i not in self.dimmed_rows]
        columns = [i for i in range(len(self.columns)) if i not in self.dimmed_columns]
        return scores[rows][:, columns] if rows and columns else scores

    def content(self, title: str, label: str) -> Content:
        """A map in words and as a table."""
        scores, rows, columns = self.scores[title], self.rows, self.columns

        def table() -> list[tuple[Any, ...]]:
            return [
                (title, i, rows[i], j, columns[j], value)
                for i, line in enumerate(scores.tolist())
                for j, value in enumerate(line)
            ]

        kind = "difference of two maps" if self.is_difference else "map"
        size = f"{len(rows)} tokens" if self.is_square else f"{len(rows)} output tokens by {len(columns)} source tokens"
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
    marked = rows.place(token, outputs)
    found = Panels(scores, rows.labels, columns.labels, marked, rows.dimmed, columns.dimmed, out_tokens is None)
    if minus is None:
        return found
    if out_tokens is not None or not 2 <= len(minus) <= 3:
        raise ArgumentError(
            "minus needs maps of one text: pass (maps, tokens) or (maps, tokens, words), and no out_tokens."
        )
    other = make_axis(minus[1], minus[2] if len(minus) == 3 else words is True, dim, drop)
    return _difference(found, _merged(minus[0], other, other, heads), other.labels)


def _merged(maps: Any, rows: Axis, columns: Axis, heads: bool) -> dict[str, Tensor]:
    """Titles and maps `(rows, columns)`."""
    if not isinstance(maps, Mapping):
        maps = {f"layer {index}": scores for index, scores in enumerate(maps)}
    if not maps:
        raise ArgumentError("draw_maps needs at least one map, got none.")
    found: dict[str, Tensor] = {}
    for title, scores in maps.items():
        one = one_example(scores, len(rows.member), len(columns.member), heads=heads)
        found |= {f"{title}, head {head}": each for head, each in enumerate(one)} if heads else {title: one}
    return {title: rows.rows(columns.columns(one)) for title, one in found.items()}


def _difference(found: Panels, others: dict[str, Tensor], other: list[str]) -> Panels:
    """The first maps minus the others, of tokens that are aligned by what the two texts share."""
    if found.scores.keys() != others.keys():
        raise ArgumentError(f"minus has the maps {list(others)}: pass the same as maps, {list(found.scores)}.")
    groups = _aligned(found.rows, other)
    labels = []
    one, two = (torch.zeros(len(side), len(groups), dtype=torch.float64) for side in (found.rows, other))
    for group, (first, second) in enumerate(groups):
        names = [" ".join(side[i] for i in places) for side, places in ((found.rows, first), (other, second))]
        labels.append(names[0] if names[0] == names[1] else _PAIR.join(names))
        one[list(first), group], two[list(second), group] = 1, 1
    scores = {title: _pooled(mine, one) - _pooled(others[title], two) for title, mine in found.scores.items()}
    marked = None if found.marked is None else int(one[found.marked].argmax())
    dimmed = sorted({int(one[i].argmax()) for i in found.dimmed_rows})
    return Panels(scores, labels, labels, marked, dimmed, dimmed, True, is_difference=True)


def _pooled(scores: Tensor, ones: Tensor) -> Tensor:
    return (ones / ones.sum(0)).T @ scores @ ones


def _aligned(first: Sequence[str], second: Sequence[str]) -> list[tuple[range, range]]:
    """Passages that stand for each other: equal tokens one by one, others together."""
    groups: list[tuple[range, range]] = []
    for kind, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal" or b - a == d - c:
            groups += [(range(a + i, a + i + 1), range(c + i, c + i + 1)) for i in range(b - a)]
        elif b > a and d > c:
            groups.append((range(a, b), range(c, d)))
        else:
            extra = " ".join(first[a:b] or second[c:d])
            raise ArgumentError(
                f"The two texts cannot be aligned: {extra!r} has no partner. Pass texts that differ in words, "
                "with words=True if only their pieces differ."
            )
    return groups
