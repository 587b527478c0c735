"""Several methods on one text, and what blanking out each token changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from captum_vz.app.explanation import remarks
from captum_vz.app.models import Loaded
from captum_vz.errors import ArgumentError
from captum_vz.study import Table, compare
from captum_vz.study.examples.text import prepare_text, word_id
from captum_vz.study.methods import check_methods

if TYPE_CHECKING:
    from captum_vz.study.one_text.truth import Truth


def compared(
    text: str,
    loaded: Loaded,
    methods: Sequence[str] | None,
    token: str | None,
    layer: int,
    target: str | None = None,
    foil: str | None = None,
    advance: Callable[[str], object] | None = None,
    option: str = "",
) -> Table:
    """:func:`~captum_vz.study.compare` for a model that was loaded by its name.

    What the user may not have meant is told in warnings, as by :func:`~captum_vz.app.explanation.explain`. `option`
    stands before the names of options in messages, such as "--".

    Raises:
        ArgumentError: A method is unknown; there is no such token, layer or target; or the text is empty or too long.
    """
    model, tokenizer, layers = loaded
    for name, word in (("target", target), ("foil", foil)):
        _check_word(tokenizer, f"{option}{name}", word)
    try:
        names = check_methods(methods)
        for remark in remarks(text, loaded, prepare_text(model, tokenizer, text, token), token, option):
            warnings.warn(remark, stacklevel=2)
        return compare(
            model,
            tokenizer,
            text,
            None if methods is None else names,
            target,
            foil=foil,
            layer=layer,
            layers=layers,
            token=token,
            advance=advance,
        )
    except ValueError as error:
        message = str(error)
        named = message.startswith(("token ", "layer ", "methods "))
        raise ArgumentError(f"{option}{message}" if named else message) from error


def _check_word(tokenizer: Any, name: str, word: str | None) -> None:
    try:
        if word is not None:
            word_id(tokenizer, word)
    except ValueError as error:
        raise ArgumentError(
            f"{name} is {word!r}, which is no single token of the tokenizer: pass another word."
        ) from error


def blanked_out(
    text: str, loaded: Loaded, token: str | None, target: str | None = None, foil: str | None = None
) -> Truth:
    """:func:`~captum_vz.study.one_text.truth.blank_out_text` for a text and words as they are written.

    Raises:
        ArgumentError: A word is not one token, or there is no such token.
        RefusedError: The model predicts no words.
        ModuleNotFoundError: The extra `study` is not installed.
    """
    from captum_vz.study.one_text.truth import blank_out_text

    model, tokenizer, _ = loaded
    try:
        prepared = prepare_text(model, tokenizer, text, token)
        target_ids, foil_ids = ([word_id(tokenizer, word)] if word is not None else None for word in (target, foil))
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    return blank_out_text(model, tokenizer, prepared, target_ids, foil_ids)
