"""TODO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# What torch keeps of a module, but for its buffers: parameters and hooks are nobody's state. Nor is a forward of the
# module's own, which other passes put there and take away.
_TORCHS = frozenset(vars(nn.Module())) - {"_buffers"} | {"forward"}
_NO_STATE = (Tensor, nn.Module, FunctionType, MethodType, ModuleType, type, Enum)


class ModuleState:
    """The state of a layer and of the objects among its arguments, noted before the layer's run in the clean pass."""

    def __init__(self, layer: nn.Module | None = None, arguments: Any = None) -> None:
        self.modules = [] if layer is None else list(layer.modules())
        self.objects = [x for x in tree_leaves(arguments) if hasattr(x, "__dict__") and not isinstance(x, _NO_STATE)]
        self.chance = torch.get_rng_state()
        self.versions = {id(x): version(x) for x in self._tensors()}

    def drew_lots_in_training(self) -> bool:
        """Whether the layer is in train mode, and random numbers were drawn since, on the CPU."""
        return any(module.training for module in self.modules) and not torch.equal(self.chance, torch.get_rng_state())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put everything back, at the end of a `with` block, that changed inside of it."""
        holders = [vars(one) for one in (*self.modules, *self.objects)]
        held = [{name: value for name, value in holder.items() if name not in _TORCHS} for holder in holders]
        inside = [(value, value.copy()) for each in held for value in each.values() if isinstance(value, (list, dict))]
        # Only what the layer's own run wrote into: as many bytes as a layer's quantised weights are not to be copied.
        # Batch norms, which write in train mode only, do so past torch's count of versions.
        trained = {id(x) for one in self.modules if one.training for x in one._buffers.values()}
        written = [(x, x.clone()) for x in self._tensors() if id(x) in trained or self._is_written(x)]
        try:
            yield
        finally:
            for holder, values in zip(holders, held, strict=True):
                for name in [name for name in holder if name not in values and name not in _TORCHS]:
                    del holder[name]
                for name, value in values.items():
                    if holder.get(name) is not value:
                        holder[name] = value
            for container, content in inside:
                # Never emptied where nothing changed: other threads may be running the layer.
                if _identities(container) != _identities(content):
                    container.clear()
                    container.extend(content) if isinstance(container, list) else container.update(content)
            for x, clean in written:
                x.copy_(clean)

    def _tensors(self) -> Iterator[Tensor]:
        """The buffers of the modules, and the plain tensors among their attributes."""
        values = (x for one in self.modules for x in (*one._buffers.values(), *vars(one).values()))
        return (x for x in values if isinstance(x, Tensor))

    def _is_written(self, x: Tensor) -> bool:
        now = version(x)
        return now is None or self.versions.get(id(x)) != now


def version(x: Tensor) -> int | None:
    """How often a tensor was written into, or None: of inference tensors torch counts nothing."""
    return None if x.is_inference() else x._version


def _identities(container: list[Any] | dict[Any, Any]) -> list[int]:
    members = container if isinstance(container, list) else [*container, *container.values()]
    return list(map(id, members))
