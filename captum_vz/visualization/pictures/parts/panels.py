"""What a figure draws: tokens merged to words, left out or dimmed, and maps of them, checked and subtracted."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import position_of
from captum_vz.visualization.pictures.description import Content
from captum_vz.visualization.pictures.parts.style import LONGEST_LABEL, shortened

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


_PAIR: Final = " / "  # between the tokens of two texts
_LONGEST_SIDE: Final = 14  # characters of each of them


@dataclass(frozen=True)
class Panels:
    """Maps that are ready to be drawn.

    Attributes:
        scores: From titles to maps `(rows, columns)` in float64.
        row_labels: A label for each row.
        column_labels: A label for each column.
        marked: The marked row. None: none.
        dimmed_rows: Rows that are drawn pale.
        dimmed_columns: Columns that are drawn pale.
        square: Whether rows and columns are the same tokens.
        difference: Whether maps of a second text were subtracted.
    """

    scores: dict[str, Tensor]
    row_labels: list[str]
    column_labels: list[str]
    marked: int | None
    dimmed_rows: list[int]
    dimmed_columns: list[int]
    square: bool
    difference: bool = False

    @property
    def axis_names(self) -> tuple[str, str]:
        """What columns and rows are."""
        return "source token", "output token"

    @property
    def shown(self) -> tuple[list[str], list[str]]:
        """The written labels of rows and columns."""
        return [self._short(one) for one in self.row_labels], [self._short(one) for one in self.column_labels]

    def _short(self, label: str) -> str:
        if not self.difference or len(label) <= LONGEST_LABEL:
            return shortened(label)
        return _PAIR.join(shortened(side, _LONGEST_SIDE) for side in label.split(_PAIR))

    def scale_label(self, label: str) -> str:
        """The label of the colour scale."""
        return f"{label}, first text minus second" if self.difference else label

    def counted(self, scores: Tensor) -> Tensor:
        """The scores that are not dimmed. If all are dimmed: all."""
        rows = [i for i in range(len(self.row_labels)) if i not in self.dimmed_rows]
        columns = [i for i in range(len(self.column_labels)) if i not in self.dimmed_columns]
        return scores[rows][:, columns] if rows and columns else scores


def prepare_panels(
    maps: Mapping[str, Tensor] | Sequence[Tensor],
    tokens: Sequence[str],
    token: int | None,
    out_tokens: Sequence[str] | None,
    minus: tuple[Any, ...] | None,
    heads: bool,
    words: Words | tuple[Words, Words],
    dim: Chosen,
    drop: Chosen,
) -> Panels:
    """Maps that are ready to be drawn; see :func:`draw_maps`."""
    outputs = tokens if out_tokens is None else out_tokens
    in_words, out_words = _words_of(words, out_tokens is not None)
    columns = make_axis(tokens, in_words, dim, drop)
    rows = columns
    if out_tokens is not None:  # positions name source tokens, but special tokens are known at both sides
        rows = make_axis(outputs, out_words, *(one if isinstance(one, str) else None for one in (dim, drop)))
    scores = {
        title: rows.rows(columns.columns(one)) for title, one in _named(maps, len(outputs), len(tokens), heads).items()
    }
    marked = rows.place(token, outputs)
    found = Panels(scores, rows.labels, columns.labels, marked, rows.dimmed, columns.dimmed, out_tokens is None)
    if minus is None:
        return found
    if out_tokens is not None or not 2 <= len(minus) <= 3:
        raise ArgumentError(
            "minus needs maps of one text: pass (maps, tokens) or (maps, tokens, words), and no out_tokens."
        )
    other = make_axis(minus[1], minus[2] if len(minus) == 3 else words is True, dim, drop)
    others = {
        title: other.rows(other.columns(one))
        for title, one in _named(minus[0], len(minus[1]), len(minus[1]), heads).items()
    }
    return _difference(found, others, other)


def _words_of(words: Any, cross: bool) -> tuple[Words, Words]:
    if cross and isinstance(words, tuple) and len(words) == 2:
        return words
    if cross and words not in (None, True, False):
        raise ArgumentError("words are numbers for one side: with out_tokens pass a pair, (sources, outputs), or True.")
    return words, words


def _named(maps: Any, high: int, wide: int, heads: bool) -> dict[str, Tensor]:
    """Titles and maps `(out, in)` on the CPU."""
    if not isinstance(maps, Mapping):
        maps = {f"layer {index}": scores for index, scores in enumerate(maps)}
    if not maps:
        raise ArgumentError("draw_maps needs at least one map, got none.")
    found: dict[str, Tensor] = {}
    for title, scores in maps.items():
        one = _checked(scores, high, wide, heads)
        if heads:
            found |= {f"{title}, head {head}": each for head, each in enumerate(one)}
        else:
            found[title] = one
    return found


def _checked(scores: Any, high: int, wide: int, heads: bool) -> Tensor:
    shape = "heads, out, in" if heads else "out, in"
    kind = f"a map ({shape}) or (1, {shape})"
    dimensions = 3 if heads else 2
    if not isinstance(scores, Tensor):
        raise ArgumentError(f"Expected {kind}, got {type(scores).__name__}.")
    given = tuple(scores.shape)
    if scores.dim() == dimensions + 1 and len(scores) != 1:
        more = "" if heads else ", or heads=True for maps of heads"
        raise ArgumentError(f"Expected {kind}, got a batch {given}: pass one example of it, such as scores[0]{more}.")
    one = scores[0] if scores.dim() == dimensions + 1 else scores
    if one.dim() != dimensions or tuple(one.shape[-2:]) != (high, wide):
        sides = f"the {wide} tokens" if high == wide else f"{high} output tokens and {wide} source tokens"
        raise ArgumentError(f"Expected {kind} for {sides}, got {given}.")
    if not one.isfinite().all():
        raise ArgumentError("Expected finite scores, got NaN or infinity, which cannot be drawn.")
    return one.detach().double().cpu()


def _difference(found: Panels, others: dict[str, Tensor], other: Axis) -> Panels:
    """The first maps minus the others, of tokens that are aligned by what the two texts share."""
    if found.scores.keys() != others.keys():
        raise ArgumentError(f"minus has the maps {list(others)}: pass the same as maps, {list(found.scores)}.")
    groups = _aligned(found.row_labels, other.labels)
    labels = []
    one, two = (
        torch.zeros(count, len(groups), dtype=torch.float64) for count in (len(found.row_labels), len(other.labels))
    )
    for group, (first, second) in enumerate(groups):
        names = [
            " ".join(side[i] for i in places) for side, places in ((found.row_labels, first), (other.labels, second))
        ]
        labels.append(names[0] if names[0] == names[1] else _PAIR.join(names))
        one[list(first), group], two[list(second), group] = 1, 1
    scores = {title: _pooled(mine, one) - _pooled(others[title], two) for title, mine in found.scores.items()}
    marked = None if found.marked is None else int(one[found.marked].argmax())
    dimmed = sorted({int(one[i].argmax()) for i in found.dimmed_rows})
    return Panels(scores, labels, labels, marked, dimmed, dimmed, True, difference=True)


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


def map_content(title: str, panels: Panels, scores: Tensor, label: str) -> Content:
    """A map in words and as a table."""
    rows, columns = panels.row_labels, panels.column_labels

    def table() -> list[tuple[Any, ...]]:
        return [
            (title, i, rows[i], j, columns[j], value)
            for i, line in enumerate(scores.tolist())
            for j, value in enumerate(line)
        ]

    names = ("panel", "out", "output token", "in", "source token", label)
    kind = "difference of two maps" if panels.difference else "map"
    size = f"{len(rows)} tokens" if panels.square else f"{len(rows)} output tokens by {len(columns)} source tokens"
    if panels.marked is not None:
        row = scores[panels.marked]
        best = row.abs().topk(min(3, len(row))).indices.tolist()
        most = ", ".join(f"{columns[j]} {float(row[j]):.2f}" for j in best)
        sentence = f"{title}, {kind} of {size}: the row of {rows[panels.marked]} has its largest scores at {most}."
    else:
        best = scores.abs().flatten().topk(min(3, scores.numel())).indices.tolist()
        places = [divmod(one, len(columns)) for one in best]
        most = ", ".join(f"{rows[i]} from {columns[j]} {float(scores[i, j]):.2f}" for i, j in places)
        sentence = f"{title}, {kind} of {size}: the largest scores are {most}."
    return Content(sentence, names, table)
