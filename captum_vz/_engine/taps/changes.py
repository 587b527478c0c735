"""What a pass changes outside of itself, and how each change is undone: hooks, names, modes, and what modules hold.

An interruption (Ctrl-C) may come at any line, also while hooks, names and modes are set or undone. Each change is noted
before it is made. Undoing a change that was not made has no effect. A pass undoes its changes twice, and the next pass
undoes what an interruption left. What a layer keeps between its runs is restored after replays, because these run it on
artificial inputs, some of them NaN.
"""

from __future__ import annotations

import inspect
import pickle
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from functools import partial
from io import IOBase
from itertools import filterfalse
from operator import is_, itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch
from torch.overrides import TorchFunctionMode

from captum_vz._engine.numerics.tensors import version
from captum_vz._private import (
    BUFFERS,
    OWN_ATTRIBUTES,
    eager_stance,
    function_mode_state,
    function_modes,
    modules_of,
    own_buffers,
    own_parameters,
    pop_function_mode,
    push_function_mode,
    restore_function_mode_state,
    tree_leaves,
)
from captum_vz.errors import RefusedError

T = TypeVar("T")
Action = Callable[[], Any]
# Changes that passes of several threads may need: who needs each, and what takes it back.
_shared: dict[Hashable, tuple[list[Changes], Action]] = {}
_lock = threading.RLock()
_PACKAGE = __name__.partition("_engine")[0]
# Where a module, or torch for all modules, keeps hooks and what it knows of each.
_of_module, _of_all = (
    itemgetter(*[name for name in names if "forward" in name and "_hooks" in name])
    for names in (OWN_ATTRIBUTES, vars(module_of_torch))
)
# The pass that this thread runs.
current_pass: ContextVar[Changes | None] = ContextVar("captum_vz_changes", default=None)


class Changes:
    """The changes that a `with` block needs. Its end takes them back, or else the end of the pass around it."""

    def __init__(self) -> None:
        self.over = False  # whether the block is
        self.undo: list[Action] = []  # what else to call at the end, the last first, perhaps twice
        self._inner: list[Changes] = []
        self._keys: list[Hashable] = []  # of shared changes

    def __enter__(self) -> Changes:
        if (outer := current_pass.get()) is not None:
            outer._inner.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Take back all changes that no other pass needs. To do so again does nothing."""
        self.over = True
        for inner in self._inner:
            inner.end()
        for undo in reversed(self.undo):
            undo()
        _take_back(self._keys)
        self.undo.clear()

    def set(self, variable: ContextVar[Any], value: Any) -> None:
        """Set a context variable."""
        self.undo.append(partial(variable.set, variable.get()))
        variable.set(value)

    def enter(self, mode: TorchFunctionMode) -> None:
        """Enter a function mode of this thread."""
        self.undo.append(partial(_restore_modes, function_modes()))
        push_function_mode(mode)

    def share(self, key: Hashable, begin: Callable[[], tuple[Action, Action]]) -> None:
        """Make a change unless another pass has made it. `begin` returns what makes it, and what takes it back."""
        self._keys.append(key)
        with _lock:
            if key in _shared:
                _shared[key][0].append(self)
            else:
                make, undo = begin()
                _shared[key] = [self], undo
                make()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Let `value` stand in the place of an attribute. See `original`."""
        self.wrap(owner, name, lambda before: value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Let what `make` makes of an attribute stand in its place."""

        def begin() -> tuple[Action, Action]:
            before = getattr(owner, name)
            value = make(before)
            put = partial(setattr, owner, name, value)
            return put, partial(_put_back, owner, name, value, name in vars(owner), before)

        self.share((id(owner), name), begin)

    def hook(self, *registers: partial[Any]) -> None:
        """Register hooks of one module, or of all modules. Each argument is a register function with its hook."""
        owner, hooks = getattr(registers[0].func, "__self__", module_of_torch), [one.args[0] for one in registers]
        tables = (_of_all if owner is module_of_torch else _of_module)(vars(owner))
        made = lambda: [register() for register in registers], partial(_remove_hooks, tables, hooks)
        self.share((id(owner), *hooks), lambda: made)


def _put_back(owner: Any, name: str, value: Any, own: bool, before: Any) -> None:
    if getattr(owner, name, None) is value:  # else the user has replaced it since
        if own:
            setattr(owner, name, before)
        else:  # the class holds it
            delattr(owner, name)


def original(owner: Any, name: str) -> Any:
    """An attribute as it is without the passes that run now."""
    _, undo = _shared.get((id(owner), name), (None, None))
    return undo.args[-1] if isinstance(undo, partial) else getattr(owner, name)


def undoing(action: Callable[[Changes], T]) -> T:
    """Run a pass. Whatever happens in it, its changes and the modes of this thread are as before when it ends."""
    changes = Changes()
    _free_lock()
    _take_back(list(_shared))
    if current_pass.get() is None:
        # torch's own code puts a mode back late, if an interruption came in it.
        _restore_modes([mode for mode in function_modes() if not type(mode).__module__.startswith(_PACKAGE)])
    try:
        try:
            changes.undo.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
            changes.undo.append(partial(_restore_modes, function_modes()))
            changes.undo.append(partial(restore_function_mode_state, function_mode_state()))
            with changes:
                changes.set(current_pass, changes)
                # The original modules of a compiled model run. A compiled layer would be compiled again with our hooks.
                if (stance := eager_stance()) is not None:
                    changes.replace(*stance)
                return action(changes)
        finally:
            changes.end()
    finally:
        _free_lock()
        changes.end()  # an interruption may come while the first call runs
        _free_lock()


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch autocast off inside a `with` block. `torch.autocast` keeps a count, which cannot be put back."""
    with Changes() as changes:
        changes.undo.append(partial(torch.set_autocast_enabled, device.type, torch.is_autocast_enabled(device.type)))
        torch.set_autocast_enabled(device.type, False)
        yield


def _free_lock() -> None:
    """Release the lock if this thread still has it, because an interruption came before a block's exit."""
    with suppress(RuntimeError):  # this thread does not have it
        while True:
            _lock.release()


def _take_back(keys: Iterable[Hashable]) -> None:
    """Take back shared changes that no pass needs any more."""
    with _lock:
        for key in keys:
            users, undo = _shared.get(key, ([], None))
            if undo is not None and all(user.over for user in users):
                undo()
                del _shared[key]


def _remove_hooks(tables: tuple[dict[int, Any], ...], hooks: list[Callable[..., Any]]) -> None:
    ours, tables = set(map(id, hooks)), tuple(filter(None, tables))
    for holder in tables:
        for number in [number for number, one in list(holder.items()) if id(one) in ours]:
            # The hook goes last: after an interruption, the next call finds it, and with it the rest.
            for table in (*(other for other in tables if other is not holder), holder):
                table.pop(number, None)


def _restore_modes(before: list[Any]) -> None:
    if function_modes() != before:
        while function_modes():
            pop_function_mode()
        for mode in before:
            push_function_mode(mode)


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
_SMALL = 2**20  # entries of tensors that are copied in code from elsewhere: writes by `data` or numpy leave no trace
_LARGEST = 10_000  # objects that are followed at most: an attribute may lead to a whole application


class ModuleState:
    """The state of a layer, its arguments and its own code before its run in the clean pass, at any depth.

    Iterators, files, objects with slots and other objects without a `__dict__` are not put back: a warning names those
    that change. Of these, generators of random numbers are refused. Global names that code assigns are not put back.
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
                _refill(container, content)
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
        """All that attributes and arguments hold, except in objects of the libraries, with the attributes' names."""
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
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    of_torch = [x.numpy().tobytes() for x in (torch.get_rng_state(), *of_devices)]
    of_numpy = tree_leaves(np.random.get_state(legacy=False))
    return *of_torch, random.getstate(), *(x.tobytes() if isinstance(x, np.ndarray) else x for x in of_numpy)


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


def _refill(container: Any, content: Any) -> None:
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
