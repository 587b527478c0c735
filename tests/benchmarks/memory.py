"""How much memory the maps take, and that it does not grow with depth."""

from __future__ import annotations

import multiprocessing

import torch

from captum_vz import ValueZeroing
from tests.benchmarks.measure import peak_bytes
from tests.benchmarks.models import SIZES, build, token_ids


def memory_by_depth(name: str, tokens: int, dtype: torch.dtype, device: str, threads: int) -> None:
    """Peak memory of the maps of 3, 6 and 12 layers: it should not grow but by the maps themselves."""
    peaks = []
    for depth in (3, 6, 12):
        # In a process of its own: what an earlier run has freed may still be there to be used.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(memory, (name, tokens, dtype, device, threads, depth))
        peaks.append(f"{depth} layers " + ("unknown" if peak is None else f"{peak / 1e6:.0f} MB"))
    print(f"peak memory at {tokens} tokens, beyond that of a forward pass: " + ", ".join(peaks), flush=True)


def memory(name: str, tokens: int, dtype: torch.dtype, device: str, threads: int, depth: int) -> int | None:
    """Bytes that the maps of so many layers take at their highest moment, beyond what a forward pass leaves."""
    torch.set_num_threads(threads)
    model = build(SIZES[name], dtype, device, depth)
    explain = ValueZeroing(model, SIZES[name].layers(model))
    ids = token_ids(tokens, device)
    with torch.no_grad():
        model(ids)
    return peak_bytes(lambda: explain.attribute(ids), device)
