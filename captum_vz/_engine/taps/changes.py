"""What a pass changes outside of itself, and how each change is undone.

An interruption (Ctrl-C) may come at any line, also while hooks, names and modes are set or undone. Each change is noted
before it is made. Undoing a change that was not made has no effect. A pass undoes its changes twice, and the next pass
undoes what an interruption left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as module_of_torch
from torch.overrides import TorchFunctionMode

from captum_vz._private import (
    OWN_ATTRIBUTES,
    eager_stance,
    function_mode_state,
    function_modes,
    pop_function_mode,
    push_function_mode,
    restore_function_mode_state,
)

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
    """The changes that a `with` block needs. Its end takes them back, or else the end of the pass around it.

    Attributes:
        over: Whether the block is over.
        undo: What else to call at the end, the last first, perhaps twice.
    """

    def __init__(self) -> None:
        self.over = False
        self.undo: list[Action] = []
        self._inner: list[Changes] = []
        self._keys: list[Hashable] = []  # of shared changes

    def __enter__(self) -> Changes:
        outer = current_pass.get()
        if outer is not None:
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

    def new_context(self) -> Context:
        """A context that knows of these changes, and of no other variable."""
        context = Context()
        context.run(current_pass.set, self)
        return context

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
                return
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
    if getattr(owner, name, None) is not value:  # the user has replaced it since
        return
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
        before = torch.is_autocast_enabled(device.type)
        changes.undo.append(partial(torch.set_autocast_enabled, device.type, before))
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
