"""The models of a study: on which device they run, and a fingerprint of their weights in the files they made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from captum_vz.metrics.extra import study_extra
from captum_vz.study.storage.shards import reading

with study_extra("captum_vz.study"):
    import pyarrow as pa
    from pyarrow import parquet

# A model and its tokenizer, or a function that loads them. It is called only if there is work left for this model.
Loaded = tuple[Any, Any]
Source = Loaded | Callable[[], Loaded]

_WEIGHTS: Final = b"captum_vz.weights"


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


def check_weights(name: str, weights: str, paths: Sequence[Path]) -> None:
    """Check that finished files were made by a model with these weights.

    Raises:
        ValueError: They were made with other weights.
    """
    finished = next((path for path in paths if path.exists()), None)
    if finished is None:
        return
    with reading(finished):
        before = (parquet.read_schema(finished).metadata or {}).get(_WEIGHTS, b"").decode()
    if before != weights:
        raise ValueError(
            f"{finished} was made with other weights than those of the model {name!r} now: pass that model, or another "
            "folder."
        )


def to_parquet(table: Any, weights: str) -> bytes:
    """A table of pyarrow as a Parquet file, with the fingerprint of the model that made it."""
    buffer = pa.BufferOutputStream()
    parquet.write_table(table.replace_schema_metadata({_WEIGHTS: weights.encode()}), buffer, compression="zstd")
    data: bytes = buffer.getvalue().to_pybytes()
    return data
