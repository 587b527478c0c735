"""One interactive page of maps, for notebooks, sites and files, and the score of a learner who predicts on it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from captum_vz._files import write_file
from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures.axes import Axis
from captum_vz.visualization.tokens import position_of
from captum_vz.visualization.view import page as document
from captum_vz.visualization.view.page import Encoded, Labels, Method, read_labels, read_methods, three_steps

__all__ = ["View", "three_steps", "view"]

THEMES = ("auto", "light", "dark")


#: page; method; map; unit; kinds that were left out; row>answer of each question; right answers; points
_RESULT = re.compile(
    r"captum-vz-predict 1; page ([0-9a-f]{8}); method (\d+); map (\d+); (pieces|words); without (\d*|-); "
    r"((?:\d+>\d+)(?:,\d+>\d+)*); (\d+) right; (\d+) points"
)


class Score(NamedTuple):
    """A learner's score: the number of questions, of right answers, and the mean of the points from 0 to 100."""

    questions: int
    right: int
    points: int


@dataclass(frozen=True)
class View:
    """A page of maps on which a reader points at tokens. :func:`view` makes it, and a notebook shows it."""

    methods: tuple[Method, ...]
    rows: Labels
    columns: Labels
    offset: int | None  # the column of the first row's own token; None: rows and columns are different tokens
    token: int | None  # the row that is chosen at first
    layer: int  # the map that is shown at first, by its index in the method with the most maps
    predict: tuple[int, ...]  # the rows that a learner is asked about at first
    title: str
    subtitle: str
    about: dict[str, str]
    theme: str
    leaves_out: bool = False  # special tokens, at first
    continues: bool = True  # rows of the last columns are a generated text, and the columns before them its prompt

    @cached_property
    def encoded(self) -> Encoded:
        """The numbers of the page."""
        return document.encode(self.methods)

    def html(self) -> str:
        """The whole page, in ASCII, which loads nothing from elsewhere."""
        return document.page(self, static=document.static_table(self))

    def frame(self) -> str:
        """The page in a frame of another page."""
        return document.frame(self.html(), self.title)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page to one file."""
        write_file(path, self.html())

    def grade(self, result: str) -> Score:
        """The score of a result string that a learner hands in after "Predict", computed again from the answers.

        `result` is the line that the page shows at the end.

        Raises:
            ArgumentError: The string is of another page, is not complete, or its score does not follow from its
                answers.
        """
        match = _RESULT.fullmatch(result.strip())
        if match is None:
            raise ArgumentError(
                f"{result[:80]!r} is no result string: pass the whole line that the page shows at the end."
            )
        page, method, panel, unit, without, answers, right, points = match.groups()
        if page != (own := document.fingerprint(self)):
            raise ArgumentError(f"The result is of page {page}, and this page is {own}: pass the same maps.")
        words = unit == "words"
        hidden = set() if without == "-" else {int(kind) for kind in without}
        try:
            scores = self.encoded.maps[int(method)][int(panel)]
            if words:  # columns are added, rows are averaged
                rows, columns = (Axis(one.words, torch.tensor(one.groups), []) for one in (self.rows, self.columns))
                scores = rows.rows(columns.columns(scores))
            found = [_points(self, scores, words, hidden, *map(int, one.split(">"))) for one in answers.split(",")]
        except IndexError as error:
            raise ArgumentError(f"The result {result!r} names a map or a token that the page does not have.") from error
        score = Score(len(found), sum(one == 100 for one in found), int(sum(found) / len(found) + 0.5))
        if (score.right, score.points) != (int(right), int(points)):
            raise ArgumentError(
                f"The result says {right} right and {points} points, but its answers have {score.right} right and "
                f"{score.points} points."
            )
        return score

    def _repr_html_(self) -> str:
        """The page in a frame, then a table for viewers that leave out frames."""
        return document.frame(document.page(self), self.title) + document.static_table(self)


def view(
    maps: Any,
    tokens: Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    rollout: Tensor | Mapping[str, Tensor] | None = None,
    offset: int | None = None,
    words: Sequence[int | None] | None = None,
    column_words: Sequence[int | None] | None = None,
    special: Any = None,
    token: int | None = None,
    layer: int = -1,
    predict: bool | Sequence[int] = False,
    title: str = "Which token does each token draw on?",
    subtitle: str = "",
    about: Mapping[str, str] | None = None,
    theme: str = "auto",
) -> View:
    """An interactive page of maps, for a notebook, a site or a file.

    Pointing at a token colours its sources and underlines the tokens that draw on it. Below the text are the row of
    the token in each layer, and the whole map of the layer. The page needs no network, no server and no kernel.

    Rows that do not sum to 1 are divided by their sums. The page then shows either the shares or the scores themselves,
    such as the distances of ``ValueZeroing(..., normalize=False)``. Maps with negative scores are shown as they are.

    Args:
        maps: A map `(out, in)`; a list of layer maps, or a tensor of them, `(layers, out, in)`; a dict of titles to
            maps; or a dict of names of methods to such lists, tensors or dicts. A map may be `(1, out, in)`, as
            `attribute` returns it for one sentence. A layer of a list may have heads, `(1, heads, out, in)`.
            Results of this package have a `view` of their own.
        tokens: The tokens of the rows.
        columns: The source tokens, if they are others than `tokens`. Examples: the source of a cross-attention; a
            prompt and its continuation, with `offset`.
        rollout: A further map after the layers' maps, or a dict of names of methods to such maps.
        offset: The position of the first output token among the source tokens, if output tokens are sources as well.
        words: The number of each token's word, as `word_ids()` of a tokenizer's output. None: by the marks of
            tokenizers ("##", "Ġ", "▁").
        column_words: The same for `columns`.
        special: Whether each source token is special, as a tokenizer's `special_tokens_mask`. None: by their text.
        token: The row that is chosen at first. None: the mask, else the last token that is not special.
        layer: The map that is shown at first. Negative ones count from the last layer, without the rollout.
        predict: Whether the page begins with questions: the learner clicks the token that they expect, then sees. Or
            the rows to ask about.
        title: The heading of the page, such as the text.
        subtitle: A sentence below the heading, such as what the model predicts.
        about: Where the numbers come from, by field: "model", "weights", "command". The page shows it at its end.
        theme: "light", "dark", or "auto": the theme of the notebook or site around the page, or of the system.

    Returns:
        A view. `view.save("page.html")` writes one file, and a notebook shows the view as it is.

    Raises:
        ArgumentError: Maps do not fit the tokens, are a batch, or are not finite. A position is out of range.

    >>> maps = [torch.tensor([[0.75, 0.25], [0.5, 0.5]])]
    >>> view(maps, ["a", "b"], rollout=maps[0], token=1).html()[:15]
    '<!DOCTYPE html>'
    """
    rows = read_labels(tokens, words, special if columns is None else None, "tokens")
    if columns is None:
        sources, offset = rows, 0
    else:
        sources = read_labels(columns, column_words, special, "columns")
    count, width = len(rows.tokens), len(sources.tokens)
    if offset is not None and not 0 <= offset <= width - count:
        raise ArgumentError(f"offset is {offset}: expected 0 to {width - count}, for {count} of {width} source tokens.")
    if theme not in THEMES:
        raise ArgumentError(f"theme is {theme!r}: pass one of {', '.join(THEMES)}.")
    methods = tuple(read_methods(maps, rollout, (count, width)))
    chosen = _first_token(rows) if token is None else position_of(token, rows.tokens)
    asked = _questions(predict, rows, chosen)
    fields = {str(field): str(value) for field, value in (about or {}).items()}
    first = _first_map(methods, layer)
    return View(methods, rows, sources, offset, chosen, first, asked, title, subtitle, fields, theme)


def _first_map(methods: Sequence[Method], layer: int) -> int:
    """The index of the map that is shown at first. Negative layers count from the last one that is no rollout."""
    labels = [panel.label for panel in max(methods, key=lambda method: len(method.panels)).panels]
    layers = sum(not label.startswith("rollout") for label in labels) or len(labels)
    if not -layers <= layer < len(labels):
        count = len(labels)
        raise ArgumentError(f"layer {layer} is out of range: there are {count} maps, {-layers} to {count - 1}.")
    return layer + layers if layer < 0 else layer


def _first_token(rows: Labels) -> int:
    """The mask, else the last token that is not special, else the last one."""
    masks = [place for place, token in enumerate(rows.tokens) if re.fullmatch(r"\[MASK\]|<mask>|<extra_id_0>", token)]
    plain = [place for place, kind in enumerate(rows.kinds) if kind not in (1, 3)]
    return (masks[:1] or plain[-1:] or [len(rows.tokens) - 1])[0]


def _questions(predict: bool | Sequence[int], rows: Labels, chosen: int | None) -> tuple[int, ...]:
    """The rows to ask about: the given rows; or at most five, the chosen one first, the others spread over the text."""
    if not isinstance(predict, bool):
        return tuple(position_of(one, rows.tokens) or 0 for one in predict)
    if not predict:
        return ()
    count = len(rows.tokens)
    possible = [i for i in range(count) if rows.kinds[i] not in (1, 3)] or list(range(count))
    spread = [possible[round(i * (len(possible) - 1) / 4)] for i in range(5)] if len(possible) > 5 else possible
    first = [chosen] if chosen in possible else []
    return tuple(dict.fromkeys([*first, *spread]))[:5]


def _points(data: View, scores: Tensor, words: bool, hidden: set[int], row: int, answer: int) -> int:
    """100 for the strongest source, less in proportion to the score. The token itself is no answer."""
    kinds = data.columns.word_kinds if words else data.columns.kinds
    own = None
    if data.offset is not None:
        own = data.columns.groups[data.rows.groups.index(row) + data.offset] if words else row + data.offset
    allowed = [place for place, kind in enumerate(kinds) if kind not in hidden and place != own]
    if answer not in allowed:
        raise IndexError(answer)
    highest = scores[row, allowed].abs().max().item()
    return int(100 * scores[row, answer].abs().item() / highest + 0.5) if highest else 0
