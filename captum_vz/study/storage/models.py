"""The models of a study: on which device they run, and a fingerprint of their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# A model and its tokenizer, or a function that loads them. It is called only if there is work left for this model.
Loaded = tuple[Any, Any]
Source = Loaded | Callable[[], Loaded]


@contextmanager
def on_device(source: Source, device: torch.device) -> Iterator[Loaded]:
    """A model on the device of this process inside of the `with` block, and on its own device after it."""
    model, tokenizer = source() if callable(source) else source
    before = model.device
    model.to(device)
    try:
        yield model, tokenizer
    finally:
        model.to(before)


def fingerprint(model: Any, tokenizer: Any) -> str:
    """A digest of 64 numbers from each of a model's parameters, and of the vocabulary's size."""
    digest = hashlib.sha256(f"{type(model).__name__} {len(tokenizer)}".encode())
    for name, values in model.state_dict().items():
        flat = values.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)].double().cpu()
        digest.update(f"{name} {tuple(values.shape)} {values.dtype} {some.tolist()}".encode())
    return digest.hexdigest()
