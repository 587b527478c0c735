"""Tokenizers that have less than those of transformers: Captum's `TokenizerLike`, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any, NoReturn

import torch

from captum_vz.errors import ArgumentError


def completed(tokenizer: Any) -> Any:
    """A tokenizer with what this package calls: itself, or one around it.

    Args:
        tokenizer: A tokenizer of transformers, an object with `encode` and `decode` of Captum's `TokenizerLike`, or
            None.
    """
    if tokenizer is None:
        return _Ids()
    if isinstance(tokenizer, _Completed) or hasattr(tokenizer, "all_special_ids"):
        return tokenizer
    if callable(getattr(tokenizer, "encode", None)) and callable(getattr(tokenizer, "decode", None)):
        return _Completed(tokenizer)
    raise ArgumentError(
        f"tokenizer is of type {type(tokenizer).__name__}: pass a tokenizer of transformers, an object with encode and "
        "decode, or None with token ids."
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
        raise ValueError(f"{type(self.tokenizer).__name__} has no chat template. Pass a text.")


class _Ids(_Completed):
    """No tokenizer: tokens are shown by their ids."""

    def __init__(self) -> None:
        super().__init__(None)

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> NoReturn:
        raise ArgumentError(f"tokenizer is None, but {text!r} is a text. Pass token ids, or a tokenizer.")

    def decode(self, ids: Iterable[int], **_: Any) -> str:
        return " ".join(str(int(index)) for index in ids)

    def convert_tokens_to_ids(self, token: str) -> NoReturn:
        self.encode(token)

    def apply_chat_template(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("tokenizer is None. Pass token ids, or a tokenizer.")
