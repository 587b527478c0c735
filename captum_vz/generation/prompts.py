"""What is read before a text is generated: prompts in any form, with any tokenizer; and what a model reads of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from numbers import Integral
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.result.words import Section


def completed(tokenizer: Any) -> Any:
    """A tokenizer with what this package calls: itself, or one around Captum's `TokenizerLike`, or around None."""
    if hasattr(tokenizer, "all_special_ids"):
        return tokenizer
    if tokenizer is None:
        return _Ids(None)
    if callable(getattr(tokenizer, "encode", None)) and callable(getattr(tokenizer, "decode", None)):
        return _Completed(tokenizer)
    raise ArgumentError(
        f"tokenizer is of type {type(tokenizer).__name__}: pass one with encode and decode, or None with token ids."
    )


class _Completed:
    """What a tokenizer with `encode` and `decode` lacks. It has no special tokens."""

    all_special_ids: tuple[int, ...] = ()
    pad_token_id = bos_token_id = eos_token_id = None
    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Mapping[str, list[int]]:
        return {"input_ids": self.encode(text, **options)}

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        # One that cannot be told to leave special tokens out has none.
        accepted = signature(self.tokenizer.encode).parameters
        told = "add_special_tokens" in accepted or any(one.kind is one.VAR_KEYWORD for one in accepted.values())
        options = {"add_special_tokens": False} if told and not add_special_tokens else {}
        return [int(index) for index in torch.as_tensor(self.tokenizer.encode(text, **options)).flatten()]

    def decode(self, ids: Iterable[int], **_: Any) -> str:
        return str(self.tokenizer.decode(torch.tensor(list(ids))))

    def convert_ids_to_tokens(self, index: int) -> str:
        return self.decode([index])

    def convert_tokens_to_ids(self, token: str) -> int:
        ids = self.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise ArgumentError(f"{token!r} is {len(ids)} tokens of {type(self.tokenizer).__name__}: pass token ids.")
        return ids[0]

    def apply_chat_template(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("the tokenizer has no chat template. Pass a text, or token ids.")


class _Ids(_Completed):
    """No tokenizer: tokens are shown by their ids."""

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> NoReturn:
        raise ArgumentError(f"tokenizer is None, but {text!r} is a text. Pass token ids, or a tokenizer.")

    def decode(self, ids: Iterable[int], **_: Any) -> str:
        return " ".join(str(int(index)) for index in ids)


Ids = tuple[int, ...]
FORMS = (
    "a text, chat messages (a list of dicts with 'role' and 'content'), token ids (a list or tensor of ints), a "
    "tokenizer's output, what `generate` returned (with prompt_length), or a list of texts, of chats or of lists of ids"
)


@dataclass(frozen=True)
class Prompt:
    """The token ids of one prompt, without padding, and those of its continuation."""

    ids: Ids  # the prompt; in a model with an encoder, the tokens of the encoder
    sections: tuple[Section, ...] = ()  # the named parts of the prompt, such as the messages of a chat
    text: str | None = None  # what was converted to the ids; None: they were given, or made by a chat template
    rest: Ids | None = None  # the tokens after `prompt_length`; None: it was not given
    read: Mapping[str, Tensor] = field(default_factory=dict)  # further inputs by name, such as the pixels of an image
    names: tuple[str, ...] = ()  # of the states of an encoder that reads an image or sound; all ids are then -1
    start: Ids = ()  # the tokens with which the decoder of a model with an encoder starts
    generated: Ids = ()  # the tokens of the continuation; empty until the text is finished

    @property
    def conditions(self) -> Ids:
        """The tokens that were given: the prompt, and the tokens with which a decoder starts."""
        return self.ids + self.start

    @property
    def all_sections(self) -> tuple[Section, ...]:
        """The sections, and the decoder's start as a section of its own."""
        if not self.start:
            return self.sections
        source = len(self.ids)
        return (*(self.sections or (("source", 0, source),)), ("decoder", source, len(self.conditions)))

    @property
    def first(self) -> int:
        """The position whose row belongs to the first new token. Position i predicts the token at i + 1."""
        return len(self.start or self.ids) - 1

    def inputs(self, device: Any) -> dict[str, Tensor]:
        """The inputs of the model from which the new tokens are predicted. The last new token is no input."""
        prompt, before = self.ids, self.generated[:-1]
        ids = torch.tensor([prompt if self.start else prompt + before], device=device)
        inputs = {} if self.names else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name, one in self.read.items():
            # One number for each token, such as its type: new tokens have that of the last one, as in `generate`.
            longer = one.shape == (1, len(prompt)) and one.shape != ids.shape
            inputs[name] = (torch.cat([one, one[:, -1:].repeat(1, len(before))], 1) if longer else one).to(device)
        if self.start:
            inputs["decoder_input_ids"] = torch.tensor([self.start + before], device=device)
        return inputs


def read_prompts(
    tokenizer: Any, prompt: Any, attention_mask: Tensor | None = None, prompt_length: Any = None
) -> tuple[list[Prompt], bool]:
    """The prompts, and whether `prompt` is a batch of them. See :func:`~captum_vz.generation.attribute_generation`."""
    named = prompt if isinstance(prompt, Mapping) else {}
    if "input_ids" in named:
        mask = named.get("attention_mask") if attention_mask is None else attention_mask
        return read_prompts(tokenizer, named["input_ids"], mask, prompt_length)
    if "sequences" not in named and any(isinstance(one, Tensor) for one in named.values()):
        raise ArgumentError(f"prompt has {', '.join(prompt)}, but no input_ids, which this model reads: pass them too.")
    prompt = getattr(prompt, "sequences", prompt)
    if isinstance(prompt, (Tensor, np.ndarray)):
        rows = torch.as_tensor(prompt)
        rows = rows[None] if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.is_floating_point() or not rows.numel():
            raise ArgumentError(f"prompt is a tensor {tuple(prompt.shape)} of {prompt.dtype}: pass {FORMS}.")
        return _from_ids(tokenizer, rows.tolist(), attention_mask, prompt_length), len(rows) > 1
    several = isinstance(prompt, (list, tuple)) and bool(prompt) and not (_are_ids(prompt) or _is_chat(prompt))
    each = list(prompt) if several else [prompt]
    if all(map(_are_ids, each)):
        return _from_ids(tokenizer, [[int(i) for i in one] for one in each], attention_mask, prompt_length), several
    if prompt_length is not None or attention_mask is not None:
        raise ArgumentError("prompt_length and attention_mask describe token ids: leave them out for a text or a chat.")
    return [_from_text(tokenizer, one) for one in each], several


def _from_text(tokenizer: Any, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        ids = tuple(tokenizer(prompt)["input_ids"])
        if not ids:
            raise ArgumentError(f"The prompt {prompt!r} has no tokens: pass a text with at least one token.")
        return Prompt(ids, text=prompt)
    if not _is_chat(prompt):
        shown = (
            repr(prompt) if isinstance(prompt, (list, tuple, dict, int, float)) else f"of type {type(prompt).__name__}"
        )
        raise ArgumentError(f"prompt is {shown}: pass {FORMS}.")
    opened = prompt[-1].get("role") == "assistant"  # a message that the model continues
    ids = _templated(tokenizer, prompt, **{"continue_final_message" if opened else "add_generation_prompt": True})
    return Prompt(ids, _messages(tokenizer, prompt, ids, opened))


def _templated(tokenizer: Any, messages: Sequence[Any], **options: Any) -> tuple[int, ...]:
    try:
        found = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **options)
    except ValueError as error:  # the tokenizer has no template
        raise ArgumentError(f"The messages cannot be made a prompt: {error}") from error
    return tuple(found["input_ids"])


def _messages(tokenizer: Any, messages: Sequence[Any], ids: tuple[int, ...], opened: bool) -> tuple[Section, ...]:
    """The section of each message, by templates of fewer messages. None if these do not begin like the whole."""
    sections, names, start = list[Section](), Counter[str](), 0
    for count, message in enumerate(messages, 1):
        try:
            head = ids if opened and count == len(messages) else _templated(tokenizer, messages[:count])
        except Exception:  # a template may demand an answer to each question
            return ()
        if ids[: len(head)] != head or len(head) <= start:
            return ()
        role = str(message["role"])
        names[role] += 1
        sections.append((role if names[role] == 1 else f"{role} {names[role]}", start, len(head)))
        start = len(head)
    return (*sections, ("answer", start, len(ids))) if start < len(ids) else tuple(sections)


def _from_ids(tokenizer: Any, rows: list[list[int]], mask: Tensor | None, prompt_length: Any) -> list[Prompt]:
    lengths = prompt_length if isinstance(prompt_length, (list, tuple, Tensor)) else [prompt_length] * len(rows)
    if len(lengths) != len(rows):
        raise ArgumentError(f"prompt_length has {len(lengths)} entries for {len(rows)} prompts: pass one for each.")
    prompts = []
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length is not None and not 0 < length <= len(row):
            raise ArgumentError(f"prompt_length is {length}, but there are {len(row)} tokens: pass 1 to {len(row)}.")
        rest = None if length is None else tuple(row[length:])
        prompts.append(Prompt(tuple(_without_padding(tokenizer, row[:length], index, mask, len(rows))), rest=rest))
    return prompts


def _without_padding(tokenizer: Any, ids: list[int], index: int, mask: Tensor | None, batch: int) -> list[int]:
    """The ids that are no padding, by the mask. Without a mask, ids that look like padding are refused."""
    if mask is None:
        pad = getattr(tokenizer, "pad_token_id", None)
        allowed = 1 if pad in (tokenizer.bos_token_id, tokenizer.eos_token_id) else 0
        for where, row in (("begins", ids), ("ends", ids[::-1])):
            same = next((i for i, token in enumerate(row) if token != pad), len(row))
            if same > allowed:
                raise ArgumentError(
                    f"Prompt {index} {where} with {same} tokens of padding ({pad}): pass attention_mask."
                )
        return ids
    mask = torch.atleast_2d(torch.as_tensor(mask))
    if mask.ndim != 2 or len(mask) != batch or mask.shape[1] < len(ids):
        raise ArgumentError(
            f"attention_mask is {tuple(mask.shape)}: pass 1 for tokens and 0 for padding, ({batch}, {len(ids)})."
        )
    kept = mask[index, : len(ids)].nonzero()[:, 0].tolist()
    if not kept or kept[-1] - kept[0] >= len(kept):
        raise ArgumentError(
            f"attention_mask hides {'all tokens' if not kept else 'tokens inside'} of prompt {index}: pass a mask "
            "that hides padding before or after the prompt only."
        )
    return ids[kept[0] : kept[-1] + 1]


def _is_chat(prompt: Any) -> bool:
    return _is_list_of(prompt, lambda one: isinstance(one, Mapping) and "role" in one)


def _are_ids(prompt: Any) -> bool:
    if isinstance(prompt, (Tensor, np.ndarray)):
        return prompt.ndim == 1 and not torch.as_tensor(prompt).is_floating_point() and len(prompt) > 0
    return _is_list_of(prompt, lambda one: isinstance(one, Integral))


def _is_list_of(prompt: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(map(is_one, prompt))
