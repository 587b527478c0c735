"""How much is computed at a time, and what pays for its calls: constants that depend on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Budget:
    """The constants of one type of device.

    Attributes:
        chunk_bytes: Bytes of the widest activation of one chunk. On a CPU a chunk should stay in the cache, but each
            chunk costs as much as thirty rows more, in calls whose time does not grow with the rows.
        copies_bytes: Bytes of the largest output of any module on all copies of a model's inputs together. On a CPU,
            twice as many were slower for large batches, and half as many split the tokens of one sentence for a large
            vocabulary.
        neighbours: How many neighbouring groups of sources share their targets, so that one product serves them all. A
            CPU computes no pair whose weight is zero. Elsewhere a few such pairs cost less than a call for each group.
        folding_calls: What the folded replay costs besides its products, in operations that the device could do
            meanwhile, for each first matrix of the feed-forward. These are some hundreds of calls, which read a layer's
            structure and check the result.
    """

    chunk_bytes: int
    copies_bytes: int
    neighbours: int
    folding_calls: float

    def items_in_chunk(self, like: Tensor, numbers: int) -> int:
        """How many items of `numbers` numbers fit in one chunk, at least one. `like` gives the dtype."""
        return max(1, self.chunk_bytes // (numbers * like.element_size()))


SHORT_OF_MEMORY = "memory was too short for a usual chunk, so smaller chunks were computed"
# How torch words its errors where it has no class for them: on a CPU, in cuBLAS, and on other devices.
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")

# By device type. The CPU's constants are measured. Those of other devices are estimates by operation counts.
BUDGETS = {"cpu": Budget(chunk_bytes=12 << 20, copies_bytes=128 << 20, neighbours=1, folding_calls=4.6e8)}
OTHER_DEVICES = Budget(chunk_bytes=256 << 20, copies_bytes=1 << 30, neighbours=16, folding_calls=2e11)


def budget_of(device: torch.device) -> Budget:
    """The budget of a device."""
    return BUDGETS.get(device.type, OTHER_DEVICES)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short. It says nothing of the layer that was run."""
    worded = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return worded or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def keep_freed_memory() -> None:
    """Raise glibc's mmap threshold, so that chunk buffers are reused instead of being mapped for each chunk.

    glibc returns large blocks to the system when they are freed, until a larger block was freed. It does so for blocks
    of up to 32 MiB. Nothing is written into this block, so that it takes no memory.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether the device has units for bfloat16 products, several times as fast as float32 products."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):
        able = torch.cpu.get_capabilities()
        return bool(able.get("amx_bf16") or able.get("avx512_bf16"))
    return False
