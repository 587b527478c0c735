"""The function `view` and what it returns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import position_of
from captum_vz.visualization.view.answers import Score, score_answers
from captum_vz.visualization.view.data import Method, PageData, read_methods
from captum_vz.visualization.view.labels import Labels, read_labels
from captum_vz.visualization.view.page import frame, page, record, static_table

THEMES = ("auto", "light", "dark")


@dataclass(frozen=True)
class View(PageData):
    """A page of maps on which a reader points at tokens. :func:`view` makes it, and a notebook shows it.

    Attributes:
        methods: The methods and their maps.
        rows: The tokens of the rows.
        columns: The source tokens.
        offset: The column of the first row's own token. None: rows and columns are different tokens.
        token: The row that is chosen at first. None: none.
        layer: The map that is shown at first, by its index in the method with the most maps.
        predict: The rows that a learner is asked about at first, or empty.
        title: The heading.
        subtitle: A sentence below the heading; may be empty.
        about: Where the numbers come from, by field.
        theme: "auto", "light" or "dark".
    """

    theme: str

    def html(self) -> str:
        """The whole page, in ASCII, which loads nothing from elsewhere."""
        return page(self._record, self, self.theme, static=static_table(self))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page to one file."""
        Path(path).write_text(self.html(), "ascii")

    def grade(self, result: str) -> Score:
        """The score of a result string that a learner hands in after "Predict", computed again from the answers.

        Args:
            result: The string that the page shows at the end.

        Returns:
            The number of questions, of right answers, and the points, from 0 to 100.

        Raises:
            ArgumentError: The string is of another page, is not complete, or its score does not follow from its
                answers.
        """
        return score_answers(self, result)

    def _repr_html_(self) -> str:
        """The page in a frame, then a table for viewers that leave out frames."""
        return frame(page(self._record, self, self.theme), self.title) + static_table(self)

    @cached_property
    def _record(self) -> dict[str, Any]:
        return record(self)


def view(
    maps: Any,
    tokens: Sequence[str] | None = None,
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
            Or a result that has `tokens`, and `maps` or `scores`, such as :func:`~captum_vz.study.compare` returns it.
        tokens: The tokens of the rows. Only results have tokens of their own.
        columns: The source tokens, if they are others than `tokens`. Examples: the source of a cross-attention; a
            prompt and its continuation, with `offset`.
        rollout: A further map after the layers' maps, or a dict of names of methods to such maps.
        offset: The position of the first output token among the source tokens, if output tokens are sources as well.
        words: The number of each token's word, or None for a token that is a word by itself, such as `word_ids()` of a
            tokenizer's output. None: words are found by the marks of tokenizers ("##", "Ġ", "▁").
        column_words: The same for `columns`.
        special: Whether each source token is a special token, such as a tokenizer's `special_tokens_mask`. None: the
            usual special tokens are known by their text. Masks are not among them.
        token: The row that is chosen at first. Negative positions count from the end. None: the mask, else the last
            token that is not special.
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
        ArgumentError: There is no map. A map does not fit the tokens, is a batch of several examples, or is not finite.
            A position is out of range.

    >>> from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> layers = find_layers(model)
    >>> maps = ValueZeroing(model, layers).attribute(inputs)
    >>> rollout = ValueZeroingRollout(model, layers).attribute(inputs)
    >>> page = view(maps, inputs.tokens(), rollout=rollout, words=inputs.word_ids(), token=6)
    >>> page.html()[:15]
    '<!DOCTYPE html>'
    """
    if tokens is None:
        maps, tokens, columns, offset, rollout, token = _result(maps, rollout, token)
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


def _result(maps: Any, rollout: Any, token: int | None) -> tuple[Any, Any, Any, int | None, Any, int | None]:
    """Maps, tokens, columns, offset, rollout and token of a result that holds its tokens."""
    tokens = getattr(maps, "tokens", None)
    if tokens is None:
        raise ArgumentError(f"tokens is missing: {type(maps).__name__} holds no tokens. Pass the tokens of the rows.")
    names, explained = list(tokens), maps.token
    if getattr(maps, "maps", None):
        joined = maps.rollout if rollout is None else rollout
        return list(maps.maps), names, None, None, joined, explained if token is None else token
    scores = maps.scores if isinstance(maps.scores, Mapping) else {"scores": maps.scores}
    layers = {name: {"scores": column[None]} for name, column in scores.items()}
    return layers, [names[explained]], names, explained, rollout, 0


def _questions(predict: Any, rows: Labels, chosen: int | None) -> tuple[int, ...]:
    """The rows to ask about: the given rows; or at most five, the chosen one first, the others spread over the text."""
    if not isinstance(predict, bool):
        listed = [position_of(int(one), rows.tokens) for one in predict]
        return tuple(one for one in listed if one is not None)
    if not predict:
        return ()
    count = len(rows.tokens)
    possible = [i for i in range(count) if rows.kinds[i] not in (1, 3)] or list(range(count))
    spread = [possible[round(i * (len(possible) - 1) / 4)] for i in range(5)] if len(possible) > 5 else possible
    first = [chosen] if chosen in possible else []
    return tuple(dict.fromkeys([*first, *spread]))[:5]
