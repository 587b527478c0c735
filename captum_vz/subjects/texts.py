"""A text of a user as a model takes it, and the position of the token to explain."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from transformers import BatchEncoding

from captum_vz._private import input_embeddings
from captum_vz.errors import ArgumentError
from captum_vz.subjects import Subject, heads
from captum_vz.visualization import readable_tokens
from captum_vz.visualization.tokens import position_of

#: Special tokens at the ends of texts, and whether they begin a text.
ENDS: Final = {"cls": True, "bos": True, "sep": False, "eos": False}


@dataclass(frozen=True)
class PreparedText:
    """One text, ready for a model."""

    inputs: dict[str, Tensor]  #: what the tokenizer returned, `(1, tokens)` each, on the model's device
    tokens: tuple[str, ...]  #: the tokens as a person reads them, special tokens included
    token: int  #: the position of the token to explain, not negative


def prepare_text(
    model: Any, tokenizer: Any, text: str | Mapping[str, Any], token: int | str | None = None, any_length: bool = False
) -> PreparedText:
    """Tokenize a text, check its length, and find the token to explain.

    The text may also be what the tokenizer returned for one text. ``[MASK]`` means the tokenizer's own mask token. If
    no token is named, a model with a head for the whole text explains the token that the head reads. An empty text, a
    text that is too long, and the tokenizer of another model, with more tokens, are refused.

    >>> from captum_vz.testbed import load_model
    >>> prepared = prepare_text(*load_model(), "some hat [MASK] small.")
    >>> prepared.tokens[prepared.token], prepared.token
    ('[MASK]', 3)
    """
    encoding: Any = encode(tokenizer, text) if isinstance(text, str) else text
    ids = encoding.get("input_ids") if isinstance(encoding, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1:
        shape = f"input_ids {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"of type {type(encoding).__name__}"
        raise ArgumentError(
            f"inputs is {shape}: pass one text that is not empty, or what the tokenizer returns for one with "
            "return_tensors='pt', a mapping with input_ids (1, tokens)."
        )
    numbers = ids[0].long().tolist()
    fills = not heads.predicts_next(model)  # a mask token of a causal model has no prediction
    masks = [fills and number == tokenizer.mask_token_id for number in numbers]
    special = [number in tokenizer.all_special_ids for number in numbers]
    if all(special) and not any(masks):
        if tokenizer.unk_token_id in numbers:
            raise ArgumentError(
                "the tokenizer knows no token of the text: pass a text in the model's language and script."
            )
        raise ArgumentError("the text is empty: there is no token to explain. Pass a text with at least one word.")
    most = heads.max_tokens(model, tokenizer)
    if not any_length and most is not None and len(numbers) > most:
        raise ArgumentError(f"the text is {len(numbers)} tokens long, but the model takes at most {most}.")
    known = getattr(input_embeddings(model), "num_embeddings", None)
    if known is not None and not 0 <= min(numbers) <= max(numbers) < known:
        raise ArgumentError(
            f"the tokenizer gives ids from {min(numbers)} to {max(numbers)}, but the model knows 0 to {known - 1}: "
            "pass the model's own tokenizer."
        )
    tokens = tuple(readable_tokens(tokenizer, numbers))
    if token is None and (heads.reads_whole_text(model) or not any(masks)):
        token = _read_token(model, tokenizer, numbers)
    device = heads.device_of(model)
    inputs = {name: value.to(device) for name, value in encoding.items() if isinstance(value, Tensor)}
    return PreparedText(inputs, tokens, find_token(token, tokens, masks, special))


def find_token(
    wanted: int | str | None, tokens: Sequence[str], masks: Sequence[bool] = (), special: Sequence[bool] = ()
) -> int:
    """The position of a token that is given by its position, also as a string of digits, or as it is written.

    Negative positions count from the end. None: the first mask or, without a mask, the last token that is no special
    token. If there is no such token, or if there are several, it is refused.

    >>> tokens = ["[CLS]", "it", "is", "[SEP]"]
    >>> find_token(None, tokens, [False] * 4, [True, False, False, True]), find_token("It", tokens, [], [])
    (2, 1)
    """
    if wanted is None:
        return masks.index(True) if any(masks) else max(i for i, its in enumerate(special) if not its)
    if isinstance(wanted, int) or wanted.lstrip("-").isdecimal():
        return position_of(int(wanted), tokens) or 0
    places = [i for i, token in enumerate(tokens) if token == wanted]
    places = places or [i for i, token in enumerate(tokens) if token.casefold() == wanted.casefold()]
    if not places:
        raise ArgumentError(f"token {wanted!r} is none of the tokens: {' '.join(tokens)}", "token")
    if len(places) > 1:
        where = ", ".join(map(str, places))
        raise ArgumentError(f"token {wanted!r} is at the positions {where}: pass one of them.", "token")
    return places[0]


def content_specials(tokenizer: Any) -> dict[str, int]:
    """The ids of the tokenizer's special tokens that stand for words: "unk" and "mask".

    The unknown token of some decoders also begins or ends each text (GPT-2), or the tokenizer never writes it, so that
    it is free to end documents (SmolLM2). It is left out.

    >>> from captum_vz.testbed import load_model
    >>> content_specials(load_model()[1])
    {'unk': 1, 'mask': 4}
    """
    ends = [_special(tokenizer, name)[0] for name in (*ENDS, "pad")]
    numbers = {name: _special(tokenizer, name)[0] for name in ("unk", "mask")}
    own = getattr(tokenizer, "unk_token", None)
    if getattr(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), "unk_token", own) != own:
        del numbers["unk"]
    return {name: number for name, number in numbers.items() if number is not None and number not in ends}


def _read_token(model: Any, tokenizer: Any, ids: Sequence[int]) -> int | None:
    """The token that a head for labels reads, or that stands for the text in a model without a head, if one does.

    Causal models and encoder-decoders read the last token, the others `[CLS]` or, without it, the first.
    """
    last = any(getattr(module, "is_causal", False) is True for module in model.modules())
    last, number = last or model.config.is_encoder_decoder, getattr(tokenizer, "cls_token_id", None)
    first = next((place for place, one in enumerate(ids) if one == number), None)
    if heads.reads_whole_text(model):
        return len(ids) - 1 if last else first or 0
    return first if heads.task_of(model) == heads.ENCODER and not last else None


def encode(tokenizer: Any, text: str, pair: str | None = None) -> BatchEncoding:
    """The tokenizer's output for a text, with the model's own mask. Typed special tokens at the ends are not doubled.

    >>> from captum_vz.testbed import load_model
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     encode(load_model()[1], "[CLS] the hat [SEP]").tokens()
    ['[CLS]', 'the', 'hat', '[SEP]']
    """
    given = [one for one in (text, pair) if one is not None]
    filled = [one.replace("[MASK]", tokenizer.mask_token) if tokenizer.mask_token else one for one in given]
    added, typed = tokenizer("a", verbose=False)["input_ids"], dict[str, None]()
    ends = dict.fromkeys((kind, *_special(tokenizer, name)) for name, kind in ENDS.items())
    for begins, number, mark in ends:
        if number is None or not mark or (added[:1] if begins else added[-1:]) != [number]:
            continue
        for place, one in enumerate(filled):
            kept = one.lstrip() if begins else one.rstrip()
            rest = kept.removeprefix(mark) if begins else kept.removesuffix(mark)
            if rest != kept:
                filled[place], typed[mark] = rest.lstrip() if begins else rest.rstrip(), None
    if typed:
        verb = "is" if len(typed) == 1 else "are"
        told = f"{' and '.join(typed)} of the text {verb} not doubled: the tokenizer adds its special tokens."
        warnings.warn(told, stacklevel=4)
    return tokenizer(*filled, return_tensors="pt", verbose=False)


def _special(tokenizer: Any, name: str) -> tuple[int | None, str | None]:
    return getattr(tokenizer, f"{name}_token_id", None), getattr(tokenizer, f"{name}_token", None)


def second_text(tokenizer: Any, encoding: Any, pair: str | None) -> list[bool]:
    """Whether each token is of the second text."""
    ids = encoding["input_ids"][0].tolist()
    if pair is None:
        return [False] * len(ids)
    if getattr(encoding, "encodings", None):
        return [number == 1 for number in encoding.sequence_ids()]
    own = tokenizer(pair, add_special_tokens=False, verbose=False)["input_ids"]  # a tokenizer in Python
    start = next((i for i in reversed(range(len(ids) - len(own) + 1)) if ids[i : i + len(own)] == own), len(ids))
    return [start <= place < start + len(own) for place in range(len(ids))]


def warn_of_text(
    text: str, subject: Subject, prepared: PreparedText, token: int | str | None, stacklevel: int = 2
) -> None:
    """Warn of what a user may not have meant: unknown words, a mask that is none, and the token explained instead."""
    model, tokenizer, names = subject.model, subject.tokenizer, prepared.tokens
    mask = None if heads.predicts_next(model) else tokenizer.mask_token
    ids = prepared.inputs["input_ids"][0].tolist()
    masks = [i for i, number in enumerate(ids) if mask is not None and number == tokenizer.mask_token_id]
    unknown = [i for i, number in enumerate(ids) if number == content_specials(tokenizer).get("unk")]
    found = []
    if unknown:
        found.append(f"unknown word at {_listed(unknown)}: the model is given {names[unknown[0]]}.")
    for written in dict.fromkeys(re.findall(r"\[mask\]|<mask>", text, re.IGNORECASE)):
        if tokenizer.mask_token is None:
            found.append(f"{written} is read as text: the model has no mask token.")
        elif mask is None:
            found.append(f"{written} is no mask for a model that predicts the next token: end the text before it.")
        elif written not in ("[MASK]", mask):
            found.append(f"{written} is read as text: write [MASK] for the mask.")
    if token is None and len(masks) > 1:
        found.append(f"the text has {len(masks)} masks, at {_listed(masks)}: token={masks[0]} is explained.")
    if token is None and not masks and heads.task_of(model) not in (heads.CAUSAL, heads.ENCODER):
        why = "the text has no mask: its last token"
        why = f"{names[prepared.token]}, which the head reads," if heads.reads_whole_text(model) else why
        found.append(f"{why} is explained, token={prepared.token}.")
    for remark in found:
        warnings.warn(remark, stacklevel=stacklevel)


def _listed(places: list[int]) -> str:
    return ("position " if len(places) == 1 else "positions ") + ", ".join(map(str, places))


def check_prompt(text: str, subject: Subject, new: int) -> None:
    """Refuse a text that cannot be continued by so many new tokens, and warn of what a user may not have meant."""
    prepared = prepare_text(subject.encoder.model, subject.tokenizer, text)
    warn_of_text(text, subject.encoder, prepared, str(prepared.token))
    if subject.model.config.is_encoder_decoder:  # the new tokens are a text of their own
        room = getattr(subject.model.config, "max_position_embeddings", None) or new
        if new > room:
            raise ArgumentError(f"the model writes at most {room} tokens: ask for at most {room} new tokens.")
        return
    most, count = heads.max_tokens(subject.model, subject.tokenizer), len(subject.tokenizer(text)["input_ids"])
    room = new if most is None else most - count + 1  # the last new token is no input
    if new > room:
        raise ArgumentError(
            f"the text is {count} tokens long, and the model takes at most {most}: ask for at most {room} new tokens."
        )
