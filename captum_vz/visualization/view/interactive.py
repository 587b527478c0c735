"""The function `view` and what it returns."""

from __future__ import annotations

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
        theme: "auto", "light" or "dark".
    """

    title: str
    theme: str

    def html(self) -> str:
        """The whole page, in ASCII, which loads nothing from elsewhere."""
        return page(self._record, self.title, self.theme, static=static_table(self))

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
        return frame(page(self._record, self.title, self.theme), self.title) + static_table(self)

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
    theme: str = "auto",
) -> View:
    """An interactive page of maps, for a notebook, a site or a file.

    Pointing at a token colours its sources and underlines the tokens that draw on it. A slider goes through the layers
    to the rollout. The page needs no network, no server and no kernel.

    Rows that do not sum to 1 are divided by their sums. The page then shows either the shares or the scores themselves,
    such as the distances of ``ValueZeroing(..., normalize=False)``. Maps with negative scores are shown as they are.

    Args:
        maps: A map `(out, in)`; a list of layer maps, or a tensor of them, `(layers, out, in)`; a dict of titles to
            maps; or a dict of names of methods to such lists, tensors or dicts. A map may be `(1, out, in)`, as
            `attribute` returns it for one sentence. Or a result that has `tokens`, and `maps` or `scores`, such as
            :func:`~captum_vz.study.compare` returns it.
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
        token: The row that is chosen at first. Negative positions count from the end.
        layer: The map that is shown at first, negative ones from the end.
        predict: Whether the page begins with questions: the learner clicks the token that they expect, then sees. Or
            the rows to ask about.
        title: The heading of the page.
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
    most = max(len(method.panels) for method in methods)
    if not -most <= layer < most:
        raise ArgumentError(f"layer {layer} is out of range: there are {most} maps, {-most} to {most - 1}.")
    asked = _questions(predict, rows, methods)
    chosen = position_of(token, rows.tokens)
    return View(methods, rows, sources, offset, chosen, layer % most, asked, title, theme)


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


def _questions(predict: Any, rows: Labels, methods: Sequence[Method]) -> tuple[int, ...]:
    """The rows to ask about: the given rows, or at most five rows that are spread over the text."""
    if not isinstance(predict, bool):
        listed = [position_of(int(one), rows.tokens) for one in predict]
        return tuple(one for one in listed if one is not None)
    if not predict:
        return ()
    count = len(rows.tokens)
    possible = [i for i in range(count) if rows.kinds[i] not in (1, 3)] or list(range(count))
    return (
        tuple(possible[round(i * (len(possible) - 1) / 4)] for i in range(5)) if len(possible) > 5 else tuple(possible)
    )
