"""The memory that the maps take. It must not grow with the number of layers."""

from __future__ import annotations

import multiprocessing

import torch

from captum_vz import ValueZeroing
from tests.benchmarks.measure import peak_bytes
from tests.benchmarks.models import SIZES, build, token_ids


def memory_by_depth(name: str, tokens: int, dtype: torch.dtype, device: str, threads: int) -> None:
    """Print the peak memory of the maps of 3, 6 and 12 layers. Only the maps themselves may add to it."""
    peaks = []
    for depth in (3, 6, 12):
        # In a process of its own, because memory that an earlier run freed may be used again.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(memory, (name, tokens, dtype, device, threads, depth))
        peaks.append(f"{depth} layers " + ("unknown" if peak is None else f"{peak / 1e6:.0f} MB"))
    print(f"peak memory at {tokens} tokens, beyond that of a forward pass: " + ", ".join(peaks), flush=True)


def memory(name: str, tokens: int, dtype: torch.dtype, device: str, threads: int, depth: int) -> int | None:
    """Peak bytes of the maps of `depth` layers, beyond the memory in use after a forward pass."""
    torch.set_num_threads(threads)
    model = build(SIZES[name], dtype, device, depth)
    explain = ValueZeroing(model, SIZES[name].layers(model))
    ids = token_ids(tokens, device)
    with torch.no_grad():
        model(ids)
    return peak_bytes(lambda: explain.attribute(ids), device)
