"""Several methods on one text, and what blanking out each token changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from captum_vz.app.explanation import check_layer, depth_of, remarks
from captum_vz.app.models import Loaded
from captum_vz.errors import ArgumentError
from captum_vz.study import Table, compare
from captum_vz.study.examples.text import prepare_text, word_id
from captum_vz.study.methods import METHODS, check_methods

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

    Warnings name what the user may not have meant, as in :func:`~captum_vz.app.explanation.explain`. `option`
    stands before the names of options in messages, such as "--".

    Raises:
        ArgumentError: A method is unknown; there is no such token, layer or target; or the text is empty or too long.
    """
    model, tokenizer, layers = loaded
    _check_words(tokenizer, target, foil, option)
    try:
        names = check_methods(methods)
        if any(METHODS[name].layered for name in names):
            check_layer(layer, depth_of(loaded), option)
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
        raise _named(error, option) from error


def _named(error: ValueError, option: str) -> ArgumentError:
    """An error of an argument, with `option` before the name of the argument."""
    named = str(error).startswith(("token ", "layer ", "methods "))
    return ArgumentError(f"{option}{error}" if named else str(error))


def _check_words(tokenizer: Any, target: str | None, foil: str | None, option: str) -> None:
    for name, word in (("target", target), ("foil", foil)):
        try:
            if word is not None:
                word_id(tokenizer, word)
        except ValueError as error:
            raise ArgumentError(
                f"{option}{name} is {word!r}, which is no single token of the tokenizer: pass another word."
            ) from error


def blanked_out(
    text: str,
    loaded: Loaded,
    token: str | None,
    target: str | None = None,
    foil: str | None = None,
    option: str = "",
) -> Truth:
    """:func:`~captum_vz.study.one_text.truth.blank_out_text` for a text and written words.

    Raises:
        ArgumentError: A word is not one token, or there is no such token.
        RefusedError: The model predicts no words.
        ModuleNotFoundError: The extra `study` is not installed.
    """
    from captum_vz.study.one_text.truth import blank_out_text

    model, tokenizer, _ = loaded
    _check_words(tokenizer, target, foil, option)
    try:
        prepared = prepare_text(model, tokenizer, text, token)
    except ValueError as error:
        raise _named(error, option) from error
    target_ids, foil_ids = ([word_id(tokenizer, word)] if word is not None else None for word in (target, foil))
    return blank_out_text(model, tokenizer, prepared, target_ids, foil_ids)
