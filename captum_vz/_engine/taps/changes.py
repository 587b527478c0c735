"""What a pass changes outside of itself, and how each change is undone: hooks, names, modes, and what modules hold.

An error or Ctrl-C may end a pass at any line: each change is noted before it is made, and undoing a change that was not
made has no effect. Replays run a layer on artificial inputs, some of them NaN. So they are given copies of what the
layer keeps between its runs.
"""

from __future__ import annotations

import io
import pickle
import random
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from functools import partial
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch
from torch.overrides import TorchFunctionMode

from captum_vz._engine.numerics import is_out_of_memory, version
from captum_vz._private import (
    BUFFERS,
    OUTPUT_CAPTURING,
    OWN_ATTRIBUTES,
    accelerate_hook,
    eager_stance,
    forward_hooks,
    forward_hooks_with_kwargs,
    forward_pre_hooks,
    function_modes,
    modules_of,
    own_buffers,
    pop_function_mode,
    push_function_mode,
    tree_leaves,
    without_function_modes,
)

T = TypeVar("T")
Action = Callable[[], Any]


class FunctionMode(TorchFunctionMode):
    """Functions of torch that `answer(function, args, kwargs)` answers."""

    def __init__(self, answer: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.answer(func, args, kwargs or {})


# Changes that passes of several threads may need: who needs each, and what takes it back.
_shared: dict[Hashable, tuple[list[Changes], Action | None]] = {}
_lock = threading.RLock()
# Where a module, or torch for all modules, keeps hooks and what it knows of each.
_of_module, _of_all = (
    itemgetter(*[name for name in names if "forward" in name and "_hooks" in name])
    for names in (OWN_ATTRIBUTES, vars(module_of_torch))
)
# The pass that this thread runs.
current_pass: ContextVar[Changes | None] = ContextVar("captum_vz_changes", default=None)


class Changes(ExitStack):
    """The changes that a `with` block needs. Its end takes them back, the last first."""

    def set(self, variable: ContextVar[Any], value: Any) -> None:
        """Set a context variable."""
        self.callback(variable.set, variable.get())
        variable.set(value)

    def answer_functions(self, answer: Callable[[Any, Any, Any], Any]) -> None:
        """Call `answer(function, args, kwargs)` for each function of torch that this thread calls."""
        self.callback(_restore_modes, function_modes())  # torch may have emptied the stack when the block ends
        push_function_mode(FunctionMode(answer))

    def share(self, key: Hashable, begin: Callable[[], tuple[Action, Action]]) -> None:
        """Make a change unless another pass has made it. `begin` returns what makes it, and what takes it back."""
        self.callback(self._release, key)
        with _lock:
            if key in _shared:
                _shared[key][0].append(self)
            else:
                make, undo = begin()
                _shared[key] = [self], undo
                make()

    def _release(self, key: Hashable) -> None:
        """Take back a shared change unless another pass needs it."""
        with _lock:
            users, undo = _shared.get(key, ([], None))
            if self in users:
                users.remove(self)
            if undo is not None and not users:
                undo()
                del _shared[key]

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Let `value` stand in the place of an attribute. See `original`."""

        def begin() -> tuple[Action, Action]:
            undo = partial(_put_back, owner, name, value, name in vars(owner), getattr(owner, name))
            return partial(setattr, owner, name, value), undo

        self.share((id(owner), name), begin)

    def hook(self, *registers: partial[Any]) -> None:
        """Register hooks of one module, or of all modules. Each argument is a register function with its hook."""
        make, undo = _hooking(registers)
        self.callback(undo)
        make()

    def hook_each(self, modules: Sequence[nn.Module], enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        """Register a hook before and a hook after the forward of each module, unless another pass has.

        If the block fails, hooks go that the model's own code added to modules and left there (PEFT's adapters).
        """
        for one in modules:
            registers = partial(one.register_forward_pre_hook, enter), partial(one.register_forward_hook, leave)
            self.share(("hooks", id(one)), partial(_hooking, registers))
        tables = [table for one in modules for table in (forward_pre_hooks(one), forward_hooks(one))]
        before = {id(hook) for table in tables for hook in list(table.values())}

        def remove_left(kind: Any, error: BaseException | None, trace: Any) -> None:
            for table in tables if error is not None else ():
                for number, hook in list(table.items()):
                    if id(hook) not in before and not str(getattr(hook, "__module__", "")).startswith("captum_vz."):
                        table.pop(number, None)

        self.push(remove_left)


def _hooking(registers: Sequence[partial[Any]]) -> tuple[Action, Action]:
    """What registers hooks of one module, or of all modules, and what removes them."""
    owner = getattr(registers[0].func, "__self__", module_of_torch)
    tables = (_of_all if owner is module_of_torch else _of_module)(vars(owner))
    hooks = {id(one.args[0]) for one in registers}

    def make() -> None:
        for register in registers:
            register()

    def undo() -> None:
        filled = [table for table in tables if table]
        for number in {number for table in filled for number, one in list(table.items()) if id(one) in hooks}:
            for table in filled:
                table.pop(number, None)

    return make, undo


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


@contextmanager
def undoing() -> Iterator[Changes]:
    """Run a pass in a `with` block. Its changes and the modes of this thread are as before when it ends."""
    with Changes() as changes:
        changes.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        changes.callback(_restore_modes, function_modes())
        changes.set(current_pass, changes)
        # The original modules of a compiled model run. A compiled layer would be compiled again with our hooks.
        if (stance := eager_stance()) is not None:
            changes.replace(*stance)
        yield changes


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch autocast off inside a `with` block. `torch.autocast` keeps a count, which cannot be put back."""
    with Changes() as changes:
        changes.callback(torch.set_autocast_enabled, device.type, torch.is_autocast_enabled(device.type))
        torch.set_autocast_enabled(device.type, False)
        yield


def _restore_modes(before: list[Any]) -> None:
    if function_modes() != before:
        while function_modes():
            pop_function_mode()
        for mode in before:
            push_function_mode(mode)


def left_out_by_replays(layer: nn.Module) -> str:
    """What the user has put around a layer's own forward, and what to do. Empty: nothing."""
    forward, text = vars(layer).get("forward"), ""
    if forward is not None and accelerate_hook(layer) is None:
        name = f"{getattr(forward, '__qualname__', type(forward).__name__)} in the place of its forward"
        text = f"The layer carries {name}, which replays leave out. Make it part of the layer's class. "
    hooks = [f"the hook {getattr(hook, '__qualname__', type(hook).__name__)}" for hook, _ in output_hooks(layer)]
    same = "which must return the same in each run. "
    return text + (f"The layer's output goes through {' and '.join(hooks)}, {same}" if hooks else "")


def user_hooks(hooks: Mapping[int, Callable[..., Any]], but: str = "captum_vz.") -> list[Callable[..., Any]]:
    """The hooks of the user's among the `hooks` of a module, without those of the package `but`."""
    # Ours are not, nor are those of transformers that collect hidden states, and of torch that count operations.
    ours = ("captum_vz.", but, OUTPUT_CAPTURING, "torch.utils.module_tracker")
    functions = [(hook, hook.func if isinstance(hook, partial) else hook) for hook in list(hooks.values())]
    return [hook for hook, one in functions if not str(getattr(one, "__module__", None) or "").startswith(ours)]


def output_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The user's hooks after a module's forward, in their order, each with whether it takes keyword arguments."""
    with_kwargs = forward_hooks_with_kwargs(module)
    return [(hook, hook in with_kwargs) for hook in user_hooks(forward_hooks(module))]


def is_hooked(module: nn.Module, but: str = "captum_vz.") -> bool:
    """Whether a module calls hooks of the user's. They may change what it does, so they have to be called.

    Hooks of the package `but` do not count.
    """
    return any(user_hooks(hooks, but) for hooks in (forward_pre_hooks(module), forward_hooks(module)))


def is_hooked_by_captum(module: nn.Module) -> bool:
    """Whether a layer method of Captum keeps or replaces what a module takes or returns."""
    tables = forward_pre_hooks(module), forward_hooks(module)
    return any(len(user_hooks(hooks)) > len(user_hooks(hooks, but="captum.")) for hooks in tables)


# Attributes that are no state: all of nn.Module's own (parameters and hooks do not change in a run), and an instance's
# `forward`, which other passes set and remove. Buffers are read by themselves, because most modules have none.
_NOT_STATE = OWN_ATTRIBUTES | {"forward"}
# Types that pickle copies by itself, and what copies share with originals.
_PLAIN = {bool, type(None), str, bytes, int, float, complex}
_CONTAINERS = _PLAIN | {list, tuple, dict, set, frozenset, deque, bytearray, OrderedDict}
_SHARED = (Tensor, nn.Module, FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, Enum, BaseException)
_LIBRARIES = ("torch.", "transformers.", "accelerate.")


class ModuleState:
    """The state of a layer and its arguments before its run in the clean pass, at any depth.

    Replays are given copies. What closures, classes, files, iterators and torch's generators hold is not copied.
    Modules of the libraries write into buffers only, and set attributes. They leave their arguments alone.
    """

    def __init__(self, layer: nn.Module | None = None, arguments: Any = None) -> None:
        self.modules = [] if layer is None else modules_of(layer)
        packages = {type(one).__module__.partition(".")[0] for one in self.modules}
        self.own_code = not packages <= {"torch", "transformers"}  # whether a module comes from elsewhere
        given = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)] if self.own_code else []
        self.given = [(x, x.clone()) for x in given]
        held = self._tensors()
        self.held = set(map(id, held))
        self.versions = {id(x): version(x) for x in (*given, *held)}

    def written_arguments(self) -> dict[int, Tensor]:
        """The tensors among the arguments that the layer wrote into, as they were before, by id."""
        return {id(x): clean for x, clean in self.given if self._is_written(x) and not torch.equal(x, clean)}

    def keeps_tensors(self) -> bool:
        """Whether the modules of own code hold tensors that they did not hold before the layer's run."""
        return self.own_code and not self.held.issuperset(map(id, self._tensors()))

    def copied(self, arguments: T, changes: Changes) -> T:
        """Let the modules hold copies of their state until `changes` are taken back. Return a copy of the arguments."""
        # Copy only tensors that the layer's own run wrote to, because quantised weights would be expensive to copy. A
        # batch norm's writes, which happen in train mode only, do not advance torch's version counter.
        trained = {id(x) for one in self.modules if one.training for x in own_buffers(one).values()}
        written = [x for x in self._tensors() if id(x) in trained or self._is_written(x)]
        given, held = arguments, list[dict[str, Any]]()
        if self.own_code:
            held = [{name: x for name, x in _attributes(one).items() if type(x) not in _PLAIN} for one in self.modules]
            given, held, shared = _copied(arguments, held, type(self.modules[0]).__name__)
            written += [x for x in shared if issubclass(type(x), Tensor) and id(x) not in self.versions]  # inside lists
        clean = [(x, x.clone()) for x in {id(x): x for x in written if not x.is_meta}.values()]
        holders = [*map(vars, self.modules), *filter(None, map(own_buffers, self.modules))]
        before = [holder.copy() for holder in holders]

        def give() -> None:
            for one, copies in zip(self.modules, held, strict=False):
                vars(one).update(copies)

        def restore() -> None:
            for holder, values in zip(holders, before, strict=True):
                now = holder.copy()
                if list(now) != list(values) or not all(map(is_, now.values(), values.values())):
                    for name in now.keys() - values.keys() - _NOT_STATE:
                        del holder[name]
                    holder.update({name: values[name] for name in values.keys() - _NOT_STATE})
            with without_function_modes():
                for x, numbers in clean:
                    if not torch.equal(x, numbers):  # torch counts writes, for gradients
                        x.detach().copy_(numbers)

        changes.share(("state", id(self.modules[0])), lambda: (give, restore))
        return given

    def _tensors(self) -> list[Tensor]:
        """The buffers of the modules, and tensors among the attributes of own code."""
        holders = [*map(own_buffers, self.modules), *(map(_attributes, self.modules) if self.own_code else ())]
        return [x for holder in holders for x in list(holder.values()) if issubclass(type(x), Tensor)]

    def _is_written(self, x: Tensor) -> bool:
        """Return whether a tensor may have been written to since this was created."""
        now = version(x)
        if now is None:  # torch refuses to write into expanded tensors
            return all(step or size < 2 for step, size in zip(x.stride(), x.shape, strict=True))
        return self.versions.get(id(x)) != now


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that may be state."""
    own = vars(module).copy()  # other threads may set attributes meanwhile
    return {name: own[name] for name in own.keys() - _NOT_STATE - {BUFFERS}}


def _copied(arguments: Any, held: list[Any], name: str) -> tuple[Any, list[Any], list[Any]]:
    """Copies of a layer's arguments and of what its modules hold, and what they share with the originals.

    If they cannot be copied, both are returned as they are, with a warning that holds the layer's `name`.
    """
    copier = _Copier(file := io.BytesIO(), protocol=4)
    copier.shared = []
    try:
        copier.dump((arguments, held))
        loader = _Loader(io.BytesIO(file.getvalue()))
        loader.shared = copier.shared
        return *loader.load(), copier.shared
    except Exception as error:  # whatever the code of an object's own raises
        if is_out_of_memory(error):
            raise
        reason = f"which cannot be copied ({type(error).__name__}: {error})"
        advice = "Keep state in numbers, tensors, lists or dicts."
        warnings.warn(f"Replays may change what {name} keeps, {reason}. {advice}", stacklevel=2)
        return arguments, held, []


class _Copier(pickle.Pickler):
    """Pickles containers and objects, and shares all else."""

    shared: list[Any]

    def persistent_id(self, value: Any) -> int | None:
        """The place of a value among those that are shared. None: it is copied."""
        kind = type(value)
        if kind in _CONTAINERS:
            return None
        # torch's packed weights are of a class of "torch" itself. A class with a slot of this name holds no text there.
        of_library = any(f"{one.__module__}.".startswith(_LIBRARIES) for one in kind.__mro__)
        if not (of_library or issubclass(kind, _SHARED) or hasattr(kind, "__next__")):
            with suppress(Exception):  # files, locks, and whatever the code of an object's own raises
                value.__reduce_ex__(4)
                return None
        self.shared.append(value)
        return len(self.shared) - 1


class _Loader(pickle.Unpickler):
    shared: list[Any]

    def persistent_load(self, place: int) -> Any:
        return self.shared[place]


def random_states() -> tuple[Any, ...]:
    """Return the states of torch's, Python's and numpy's random numbers."""
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    of_torch = [x.numpy().tobytes() for x in (torch.get_rng_state(), *of_devices)]
    return *of_torch, random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def repeated(call: Callable[[], Any]) -> Any:
    """What a call returns that runs the user's model once more. The generators are then as before."""
    with undoing() as changes:
        changes.callback(torch.set_rng_state, torch.get_rng_state())
        changes.callback(random.setstate, random.getstate())
        changes.callback(np.random.set_state, np.random.get_state())
        if torch.cuda.is_initialized():
            changes.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        with torch.no_grad():
            return call()
