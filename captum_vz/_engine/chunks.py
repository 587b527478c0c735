"""What depends on the device: how much is computed at a time, and what is worth its calls."""

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
# What the fast lane takes longer than the general way whatever it saves, in operations that could be done meanwhile:
# some hundreds of calls to learn a layer's shape and to check what comes of it.
CALLS = {"cpu": 5e8}
CALLS_ELSEWHERE = 2e11


def neighbours(like: Tensor) -> int:
    """How many neighbouring groups are given the same targets."""
    return NEIGHBOURS.get(like.device.type, NEIGHBOURS_ELSEWHERE)


def fitting(like: Tensor, numbers: int) -> int:
    """How many times so many numbers fit in a chunk; at least once."""
    return max(1, CHUNK_BYTES.get(like.device.type, CHUNK_BYTES_ELSEWHERE) // (numbers * like.element_size()))


def rows_to_save(like: Tensor, numbers: int) -> int:
    """How many rows of a matrix of so many numbers are to be saved to make up for the calls that it takes."""
    return int(CALLS.get(like.device.type, CALLS_ELSEWHERE) / (2 * max(1, numbers)))
