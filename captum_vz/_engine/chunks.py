"""How much is computed at a time."""

from __future__ import annotations

from torch import Tensor

# Bytes that the widest activation of one chunk may take: on a CPU it should stay in the cache, though each chunk costs
# as much as thirty rows more, for calls that do not grow with it.
CHUNK_BYTES = {"cpu": 12 << 20}
CHUNK_BYTES_ELSEWHERE = 256 << 20
# How many neighbouring groups of sources are given the same targets, for one product to serve them all: a CPU computes
# no pair that is zero, elsewhere a few of them cost less than a call for each group.
NEIGHBOURS = {"cpu": 1}
NEIGHBOURS_ELSEWHERE = 16


def neighbours(like: Tensor) -> int:
    """How many neighbouring groups are given the same targets."""
    return NEIGHBOURS.get(like.device.type, NEIGHBOURS_ELSEWHERE)


def fitting(like: Tensor, numbers: int) -> int:
    """How many times so many numbers fit in a chunk; at least once."""
    return max(1, CHUNK_BYTES.get(like.device.type, CHUNK_BYTES_ELSEWHERE) // (numbers * like.element_size()))
