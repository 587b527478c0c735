"""What a layer keeps between its runs: moving averages, counters, its own caches.

Replays run the layer on artificial inputs, some of them NaN. State that these runs change is restored.
"""

from __future__ import annotations

import inspect
import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from io import IOBase
from itertools import filterfalse
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.tensors import version
from captum_vz._engine.taps.changes import Changes, undoing
from captum_vz._private import BUFFERS, OWN_ATTRIBUTES, modules_of, own_buffers, own_parameters, tree_leaves
from captum_vz.errors import RefusedError

# Attributes that are no state: all of nn.Module's own except buffers (parameters and hooks do not change in a run), and
# an instance's `forward`, which other passes set and remove.
_NOT_STATE = OWN_ATTRIBUTES | {"forward"}
_NOT_ENTERED = _NOT_STATE | {BUFFERS}  # buffers are read by themselves: most modules have none
_STATELESS = (Tensor, nn.Module, FunctionType, MethodType, ModuleType, type, Enum)
_IMMUTABLE = (type(None), str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size)
_PLAIN = {bool, *_IMMUTABLE}  # the types of most attributes, for a fast test
_MUTABLE = (list, dict, set, deque, bytearray, np.ndarray)
_PUT_BACK = (tuple, frozenset, *_MUTABLE, *_STATELESS)  # what is put back, and what has no state
_LIBRARIES = ("torch.", "transformers.")
# In code from elsewhere, tensors up to this number of entries are copied: writes by `data` or numpy leave no trace.
_SMALL = 2**20
# How many objects are followed at most: an attribute may lead to a whole application.
_LARGEST = 10_000


class ModuleState:
    """The state of a layer, of its arguments and of its own code: what these hold, at any depth.

    Create it before the layer's run in the clean pass. Iterators, files, objects with slots and other objects without a
    `__dict__` are not put back: a warning names those that change. Of these, generators of random numbers are refused.
    Global names that code assigns are not put back.
    """

    def __init__(self, layer: nn.Module | None = None, arguments: Any = None) -> None:
        self.modules = [] if layer is None else modules_of(layer)
        self.given = tree_leaves(arguments)
        self.random = torch.get_rng_state()
        # The arguments as they are now. The libraries' layers leave theirs alone.
        self.own_code = layer is not None and not type(layer).__module__.startswith(_LIBRARIES)
        self.packages = {type(one).__module__.partition(".")[0] for one in self.modules} - {"torch", "transformers"}
        self.versions = {id(x): version(x) for _, x in self._reached() if issubclass(type(x), Tensor)}
        self.clean = {id(x): x.clone() for x in self.given if self.own_code and isinstance(x, Tensor)}

    def written_arguments(self) -> dict[int, Tensor]:
        """The tensors among the arguments that the layer wrote into, as they were before, by id."""
        written = [x for x in self.given if id(x) in self.clean and self._is_written(x)]
        return {id(x): self.clean[id(x)] for x in written if not torch.equal(self.clean[id(x)], x)}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state at the end of a `with` block."""
        holders = [*map(vars, self.modules), *map(own_buffers, self.modules)]
        held = [holder.copy() for holder in holders]
        reached = self._reached()
        containers = [(value, value.copy()) for _, value in reached if issubclass(type(value), _MUTABLE)]
        others = [(name, value, _content(value)) for name, value in reached if _cannot_be_put_back(value)]
        # Copy only tensors that the layer's own run wrote to, because quantised weights would be expensive to copy. A
        # batch norm's writes, which happen in train mode only, do not advance torch's version counter.
        trained = {id(x) for one in self.modules if one.training for x in own_buffers(one).values()}
        tensors = [x for _, x in reached if issubclass(type(x), Tensor) and not x.is_meta]
        small = {id(x) for x in tensors if self.own_code and x.numel() <= _SMALL}
        written = [(x, x.clone()) for x in tensors if id(x) in trained | small or self._is_written(x)]

        def restore() -> None:
            for holder, values in zip(holders, held, strict=True):
                now = holder.copy()
                if list(now) != list(values) or not all(map(is_, now.values(), values.values())):
                    for name in now.keys() - values.keys() - _NOT_STATE:
                        del holder[name]
                    holder.update({name: values[name] for name in values.keys() - _NOT_STATE})
            for container, content in containers:
                _put_back(container, content)
            for x, clean in written:
                if not torch.equal(x, clean):  # torch counts writes, for gradients
                    x.detach().copy_(clean)

        with Changes() as changes:
            changes.undo.append(restore)
            yield
        changed = [(name, value) for name, value, before in others if _content(value) != before]
        for name, value in sorted(changed, key=lambda one: not _is_random(one[1]))[:1]:
            kept = f"{type(self.modules[0]).__name__} keeps in {name} ({type(value).__name__})"
            if _is_random(value):
                agree = "so no two runs of the layer agree. Switch this off, or pass another layer."
                raise RefusedError(f"Replays drew random numbers from what {kept}, {agree}")
            advice = "Keep state that the output depends on in numbers, tensors, lists or dicts."
            warnings.warn(f"Replays changed what {kept}, which cannot be put back. {advice}", stacklevel=2)

    def _reached(self) -> list[tuple[str, Any]]:
        """All that the attributes and the arguments hold, at any depth, each with the name of its attribute.

        Objects of the libraries are not entered.
        """
        found: dict[int, tuple[str, Any]] = {}
        held = [vars(one).copy() for one in self.modules]
        pairs = ((name, own[name]) for own in held for name in filterfalse(_NOT_ENTERED.__contains__, list(own)))
        named = [pair for pair in pairs if type(pair[1]) not in _PLAIN]
        own = self.modules if self.packages else ()  # library code writes to no parameters, and holds nothing elsewhere
        classes = {cls for one in own for cls in type(one).__mro__ if self._is_own(cls)}
        others: list[Any] = [*map(own_buffers, self.modules), *map(own_parameters, own), *map(vars, classes)]
        waiting = [*(("its arguments", value) for value in self.given), *named]
        waiting += [pair for one in filter(None, others) for pair in one.copy().items()]
        while waiting and len(found) < _LARGEST:
            name, value = waiting.pop()
            kind = type(value)  # configs make isinstance slow
            if id(value) in found or issubclass(kind, _IMMUTABLE):
                continue
            found[id(value)] = name, value
            if issubclass(kind, (list, tuple, set, frozenset, deque)):
                waiting.extend((name, one) for one in value)
            elif issubclass(kind, dict):
                waiting.extend((name, one) for one in value.values())
            elif kind is FunctionType and self._is_own(value):
                with suppress(ValueError):  # a cell is empty
                    seen = inspect.getclosurevars(value)
                    held = [*seen.nonlocals.values(), *seen.globals.values(), *(value.__defaults__ or ())]
                    waiting.extend((value.__qualname__, one) for one in held)
            elif not issubclass(kind, _STATELESS) and not _is_of_libraries(value):
                waiting.append((name, getattr(value, "__dict__", None)))
        return list(found.values())

    def _is_own(self, code: Any) -> bool:
        """Return whether a class or a function comes from a package of the layer's modules, and is no library's."""
        return str(code.__module__).partition(".")[0] in self.packages  # None in code that was executed from a string

    def _is_written(self, x: Tensor) -> bool:
        """Return whether a tensor may have been written to since this was created."""
        now = version(x)
        if now is None:  # torch refuses to write into expanded tensors
            return all(step or size < 2 for step, size in zip(x.stride(), x.shape, strict=True))
        return self.versions.get(id(x)) != now


def random_states() -> tuple[Any, ...]:
    """Return the states of torch's, Python's and numpy's random numbers."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [x.numpy().tobytes() for x in (torch.get_rng_state(), *devices)]
    of_numpy = tree_leaves(np.random.get_state(legacy=False))
    return *states, random.getstate(), *(x.tobytes() if isinstance(x, np.ndarray) else x for x in of_numpy)


def repeated(call: Callable[[], Any]) -> Any:
    """What a call returns that runs the user's model once more. The generators are then as before."""

    def run(changes: Changes) -> Any:
        changes.undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        changes.undo.append(partial(random.setstate, random.getstate()))
        changes.undo.append(partial(np.random.set_state, np.random.get_state()))
        if torch.cuda.is_initialized():
            changes.undo.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
        with torch.no_grad():
            return call()

    return undoing(run)


def _is_of_libraries(value: Any) -> bool:
    # A class with a slot of this name holds no text there. torch's packed weights are of a class of "torch" itself.
    return f"{type(value).__module__}.".startswith(_LIBRARIES)


def _cannot_be_put_back(value: Any) -> bool:
    if issubclass(type(value), _PUT_BACK) or _is_random(value) or _is_of_libraries(value):
        return _is_random(value)
    built_in = isinstance(getattr(value, "__self__", None), ModuleType)  # a function
    return isinstance(value, IOBase) or not (built_in or hasattr(value, "__dict__")) or hasattr(value, "__slots__")


def _is_random(value: Any) -> bool:
    return isinstance(value, (random.Random, torch.Generator)) or str(type(value).__module__).startswith("numpy.random")


def _content(value: Any) -> Any:
    """What shows whether an object has changed."""
    # Files are not pickled, nor are generators. Two pickles of torch's generator of random numbers differ.
    first = (lambda x: x.get_state().tolist()) if isinstance(value, torch.Generator) else pickle.dumps
    shows = first, lambda x: x.tell(), lambda x: repr(x.gi_frame.f_locals), lambda x: repr(x.__reduce_ex__(2))
    for show in shows:
        with suppress(Exception):  # whatever the code of an object's own raises
            return show(value)
    return repr(value)


def _put_back(container: Any, content: Any) -> None:
    """Give a container its content again. An unchanged one is left alone: other threads may be running the layer."""
    if isinstance(container, np.ndarray):
        if container.tobytes() != content.tobytes():
            container[...] = content
        return
    order = sorted if isinstance(container, set) else list
    now, before = (map(id, [*x, *x.values()] if isinstance(x, dict) else x) for x in (container, content))
    if order(now) != order(before):
        container.clear()
        (container.update if isinstance(container, (dict, set)) else container.extend)(content)
