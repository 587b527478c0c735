"""Several methods on one text, and what blanking out each token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from captum_vz.app.models import Loaded
from captum_vz.errors import ArgumentError
from captum_vz.study import Table, compare
from captum_vz.study.examples.text import prepare_text, word_id

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
) -> Table:
    """:func:`~captum_vz.study.compare` for a model that was loaded by its name.

    Raises:
        ArgumentError: A method is unknown; there is no such token, layer or target; or the text is empty or too long.
    """
    model, tokenizer, layers = loaded
    try:
        return compare(
            model,
            tokenizer,
            text,
            methods,
            target,
            foil=foil,
            layer=layer,
            layers=layers,
            token=token,
            advance=advance,
        )
    except ValueError as error:
        raise ArgumentError(str(error)) from error


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
