"""How many kernels a run starts, and how often the host waits for the device. Both are exact, on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.rehearsal.device import NAME, Traffic

aten = torch.ops.aten
# Like views, these start no kernel.
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
}


@dataclass(frozen=True)
class Launches:
    """What one run did on the device.

    Attributes:
        kernels: The operations on its tensors, views included.
        views: Those among them that start no kernel: views and allocations.
        reads: How often the host waited for numbers of the device.
        uploads: How often numbers of the host were copied to the device.
    """

    kernels: float = 0
    views: float = 0
    reads: float = 0
    uploads: float = 0

    def __sub__(self, other: Launches) -> Launches:
        return Launches(*(one - another for one, another in zip(self.numbers, other.numbers, strict=True)))

    def __truediv__(self, parts: int) -> Launches:
        return Launches(*(one / parts for one in self.numbers))

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.kernels, self.views, self.reads, self.uploads


class Counter(TorchDispatchMode):
    """Counts the operations inside a `with` block. After the block, `launches` holds the counts."""

    launches = Launches()

    def __enter__(self) -> Counter:
        self._kernels = self._views = 0
        self._reads, self._uploads = Traffic.reads, Traffic.uploads
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        reads, uploads = Traffic.reads - self._reads, Traffic.uploads - self._uploads
        self.launches = Launches(self._kernels, self._views, reads, uploads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        there = device is not None and torch.device(device).type == NAME
        if there or any(isinstance(x, Tensor) and x.device.type == NAME for x in tree_leaves((args, kwargs))):
            self._kernels += 1
            self._views += func in ALLOCATIONS or any(
                answer.alias_info is not None and not answer.alias_info.is_write for answer in func._schema.returns
            )
        return func(*args, **kwargs)
