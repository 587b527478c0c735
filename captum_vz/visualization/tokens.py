"""Readable tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from captum_vz.visualization.terminal import printable


def readable_tokens(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """Readable strings of tokens, such as "the" for GPT-2's "Ġthe".

    A token that is only a part of a character keeps its name in the vocabulary.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: The token ids of one sentence.

    Returns:
        A string for each id, with escapes for control characters.

    >>> from captum_vz.testbed import load_agreement_model
    >>> _, tokenizer = load_agreement_model()
    >>> readable_tokens(tokenizer, tokenizer("a wug [MASK]")["input_ids"])
    ['[CLS]', 'a', 'w', '##u', '##g', '[MASK]', '[SEP]']
    """
    return [_readable(tokenizer, int(index)) for index in ids]


def _readable(tokenizer: Any, index: int) -> str:
    text = tokenizer.decode([index]).strip()
    whole = text and "\N{REPLACEMENT CHARACTER}" not in text
    return printable(text if whole else tokenizer.convert_ids_to_tokens(index))
