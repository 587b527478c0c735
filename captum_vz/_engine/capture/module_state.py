"""What a layer keeps between its runs: moving averages, counters, its own caches.

Replays run the layer on artificial inputs, some of them NaN. State that these runs change is restored.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from captum_vz._engine.taps.changes import Changes

# Attributes that are no state: all of nn.Module's own except buffers (parameters and hooks do not change in a run), and
# an instance's `forward`, which other passes set and remove.
_NOT_STATE = frozenset(vars(nn.Module())) - {"_buffers"} | {"forward"}
_STATELESS = (Tensor, nn.Module, FunctionType, MethodType, ModuleType, type, Enum)


class ModuleState:
    """The state of a layer and of the objects among its arguments.

    Create it before the layer's run in the clean pass.
    """

    def __init__(self, layer: nn.Module | None = None, arguments: Any = None) -> None:
        self.modules = [] if layer is None else list(layer.modules())
        self.objects = [x for x in tree_leaves(arguments) if hasattr(x, "__dict__") and not isinstance(x, _STATELESS)]
        self.random = random_states()
        self.versions = {id(x): version(x) for x in self._tensors()}

    def drew_random_numbers(self) -> bool:
        """Return whether the layer is in train mode and the CPU's random numbers were used since this was created."""
        return any(module.training for module in self.modules) and self.random[0] != random_states()[0]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state at the end of a `with` block."""
        holders = [vars(one) for one in (*self.modules, *self.objects)]
        held = [{name: value for name, value in holder.items() if name not in _NOT_STATE} for holder in holders]
        attributes = [value for values in held for value in values.values()]
        containers = [(value, value.copy()) for value in attributes if isinstance(value, (list, dict))]
        # Copy only tensors that the layer's own run wrote to, because quantised weights would be expensive to copy. A
        # batch norm's writes, which happen in train mode only, do not advance torch's version counter.
        trained = {id(x) for one in self.modules if one.training for x in one._buffers.values()}
        written = [(x, x.clone()) for x in self._tensors() if id(x) in trained or self._is_written(x)]

        def restore() -> None:
            for holder, values in zip(holders, held, strict=True):
                for name in [name for name in holder if name not in values and name not in _NOT_STATE]:
                    del holder[name]
                for name, value in values.items():
                    if holder.get(name) is not value:
                        holder[name] = value
            for container, content in containers:
                # Leave an unchanged container alone, because other threads may be running the layer.
                if _identities(container) != _identities(content):
                    container.clear()
                    container.extend(content) if isinstance(container, list) else container.update(content)
            for x, clean in written:
                x.copy_(clean)

        with Changes() as changes:
            changes.undo.append(restore)
            yield

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the buffers of the modules and the plain tensors among their attributes."""
        values = (x for one in self.modules for x in (*one._buffers.values(), *vars(one).values()))
        return (x for x in values if isinstance(x, Tensor))

    def _is_written(self, x: Tensor) -> bool:
        """Return whether a tensor may have been written to since this was created."""
        now = version(x)
        return now is None or self.versions.get(id(x)) != now


def random_states() -> tuple[Any, ...]:
    """Return the states of torch's, Python's and numpy's random numbers."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [x.numpy().tobytes() for x in (torch.get_rng_state(), *devices)]
    return *states, random.getstate(), pickle.dumps(numpy.random.get_state())


def version(x: Tensor) -> int | None:
    """Return how often a tensor was written to, or None for inference tensors, which have no version counter."""
    return None if x.is_inference() else x._version


def _identities(container: list[Any] | dict[Any, Any]) -> list[int]:
    """Return the identities of a container's members, which differ if one of them was exchanged."""
    members = container if isinstance(container, list) else [*container, *container.values()]
    return list(map(id, members))
