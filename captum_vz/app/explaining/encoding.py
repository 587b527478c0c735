"""The tokens of one text or two, and what each of them is."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from transformers import BatchEncoding


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
    added = tokenizer("a", verbose=False)["input_ids"]
    begin, end = _typed(tokenizer, "cls", "bos"), _typed(tokenizer, "sep", "eos")
    typed: list[str] = []
    for place, one in enumerate(filled):
        kept = one
        for mark in begin:
            if added[:1] == [mark[0]] and kept.lstrip().startswith(mark[1]):
                kept = kept.lstrip()[len(mark[1]) :].lstrip()
                typed.append(mark[1])
        for mark in end:
            if added[-1:] == [mark[0]] and kept.rstrip().endswith(mark[1]):
                kept = kept.rstrip()[: -len(mark[1])].rstrip()
                typed.append(mark[1])
        filled[place] = kept
    if typed:
        marks = list(dict.fromkeys(typed))
        verb = "is" if len(marks) == 1 else "are"
        told = f"{' and '.join(marks)} of the text {verb} not doubled: the tokenizer adds its special tokens."
        warnings.warn(told, stacklevel=4)
    return tokenizer(*filled, return_tensors="pt", verbose=False)


def _typed(tokenizer: Any, *names: str) -> list[tuple[int, str]]:
    """Ids and texts of special tokens, each once."""
    found = {getattr(tokenizer, f"{name}_token_id", None): getattr(tokenizer, f"{name}_token", None) for name in names}
    return [(number, mark) for number, mark in found.items() if number is not None and mark]


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


def fixed_tokens(special: Sequence[bool], second: Sequence[bool]) -> list[bool]:
    """The tokens that every window has: special tokens at the ends, and the first of two texts."""
    count = len(special)
    start = next((i for i, one in enumerate(special) if not one), count)
    stop = next((i + 1 for i in reversed(range(count)) if not special[i]), 0)
    if any(second):
        start = second.index(True)
    return [not start <= place < stop for place in range(count)]
