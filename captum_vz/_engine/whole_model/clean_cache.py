"""TODO."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from captum_vz._engine.numerics.tensors import clone_tensor, repeat_examples
from captum_vz._engine.structure.modules import matrix

# Where more rows than that have changed, picking them out costs more than it saves.
MOST_CHANGED = 0.8
# The two hooks of all modules, since which model a function runs is not known; and how many passes need them. Counted,
# because several threads may be in a clean pass, and each is to be told once.
_handles: list[RemovableHandle] = []
_fillings = 0
_lock = threading.Lock()
# Modules whose forward is ours now: id -> how many passes need it. Counted, because two threads may explain one model
# at the same time; a thread that has no answers runs the module's own.
_standing: dict[int, int] = {}


# The memory that is being filled in this thread, and that which answers here.
_filling: ContextVar[CleanCache | None] = ContextVar("captum_vz_filling", default=None)


_answering: ContextVar[CacheReader | None] = ContextVar("captum_vz_answering", default=None)


class CleanCache:
    """Outputs of a clean pass.

    Attributes:
        outermost: The modules that ran inside of no other.
        largest: Bytes of the largest output of any module.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.outermost: list[nn.Module] = []
        self.largest = 0
        self._layers = {id(layer) for layer in layers}
        self._reached = False  # one of the layers has begun
        self._running: list[tuple[nn.Module, int]] = []  # and how many outputs were kept when it began
        self._whole: list[tuple[nn.Module, Any]] = []
        self._linear: list[tuple[nn.Module, Tensor, Tensor]] = []

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Note what this thread's modules return, for the length of a `with` block."""
        token = _filling.set(self)
        try:
            with warnings.catch_warnings(), _all_modules_telling():
                if "torch._dynamo" in sys.modules:  # which warns that such hooks see a compiled module twice: no matter
                    warnings.filterwarnings("ignore", "Using `torch.compile.* when there are global hooks")
                yield
        finally:
            _filling.reset(token)

    @contextmanager
    def answering(self, copies: int, batch: int, whole: bool) -> Iterator[None]:
        """Let modules answer from here where they can, on `copies` of the clean inputs one behind the other.

        Outputs that have an entry for each of the `batch` examples are repeated. Modules as a whole only if `whole`.
        """
        # Layers that ran in threads of their own, as replicas do, were not seen: what ran before them is not known.
        kept = self._whole if whole and self._reached else []
        token = _answering.set(CacheReader(copies, batch, kept, self._linear))
        try:
            with ExitStack() as stack:
                modules = [*(module for module, _ in kept), *(module for module, _, _ in self._linear)]
                for module in dict.fromkeys(modules):
                    stack.enter_context(_standing_in(module))
                yield
        finally:
            _answering.reset(token)

    def entered(self, module: nn.Module) -> None:
        if not self._running:
            self.outermost.append(module)
        self._reached = self._reached or id(module) in self._layers
        self._running.append((module, len(self._whole)))

    def returned(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> None:
        began, kept = self._running.pop()
        while began is not module:  # left by an error that the model caught
            began, kept = self._running.pop()
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        if isinstance(module, torch.jit.ScriptModule):  # takes no other forward
            return
        if not self._reached:
            # In place of what the modules inside of it returned. Cloned, for a model may go on to write into it.
            self._whole[kept:] = [(module, tree_map(clone_tensor, output))]
        elif inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor) and matrix(module) is not None:
            self._linear.append((module, inputs[0].clone(), output.clone()))


# Plain functions: hooks of all modules are shared by all threads.
def _entered(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    memory = _filling.get()
    if memory is not None:
        memory.entered(module)


def _returned(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    memory = _filling.get()
    if memory is not None:
        memory.returned(module, inputs, output)


@contextmanager
def _all_modules_telling() -> Iterator[None]:
    global _fillings
    with _lock:
        if not _fillings:
            _handles[:] = [register_module_forward_pre_hook(_entered), register_module_forward_hook(_returned)]
        _fillings += 1
    try:
        yield
    finally:
        with _lock:
            _fillings -= 1
            if not _fillings:
                for handle in _handles:
                    handle.remove()


class CacheReader:
    """What modules answer in one run on copies: each its outputs of the clean pass, in the same order."""

    def __init__(
        self,
        copies: int,
        batch: int,
        whole: Sequence[tuple[nn.Module, Any]],
        linear: Sequence[tuple[nn.Module, Tensor, Tensor]],
    ) -> None:
        self.copies = copies
        self.batch = batch
        self.whole: dict[int, deque[Any]] = {}
        self.linear: dict[int, deque[tuple[Tensor, Tensor]]] = {}
        for module, output in whole:
            self.whole.setdefault(id(module), deque()).append(output)
        for module, x, y in linear:
            self.linear.setdefault(id(module), deque()).append((x, y))

    def of(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if outputs := self.whole.get(id(module)):
            return tree_map(self._repeat, outputs.popleft())
        if runs := self.linear.get(id(module)):
            x, y = runs.popleft()
            if args and isinstance(args[0], Tensor) and args[0].shape == (self.copies * len(x), *x.shape[1:]):
                return self._rows(args[0], x, y, forward)
        return forward(*args, **kwargs)

    def _repeat(self, value: Any) -> Any:
        return repeat_examples(value, self.copies, self.batch).clone() if isinstance(value, Tensor) else value

    def _rows(self, x: Tensor, clean: Tensor, answer: Tensor, forward: Callable[..., Any]) -> Any:
        changed = (x.unflatten(0, (self.copies, -1)) != clean.to(x.device)).any(-1).flatten(0, 1)
        if changed.float().mean() > MOST_CHANGED:
            return forward(x)
        answers = answer.repeat(self.copies, *[1] * (answer.dim() - 1))
        if changed.any():
            answers[changed] = forward(x[changed])
        return answers


@contextmanager
def _standing_in(module: nn.Module) -> Iterator[None]:
    """Let a module ask this thread's answers before it runs, for the length of a `with` block."""
    with _lock:
        count = _standing.get(id(module), 0)
        if not count:
            vars(module)["forward"] = CachedForward(module)
        _standing[id(module)] = count + 1
    try:
        yield
    finally:
        with _lock:
            count = _standing.pop(id(module))
            if count > 1:
                _standing[id(module)] = count - 1
            else:
                vars(module)["forward"].leave()


class CachedForward:
    """Stands for the forward of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = module.forward
        self.wrapped = "forward" in vars(module)  # by someone else, as an offloaded module's is

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answers = _answering.get()
        return self.own(*args, **kwargs) if answers is None else answers.of(self.module, self.own, args, kwargs)

    def leave(self) -> None:
        if self.wrapped:
            vars(self.module)["forward"] = self.own
        else:
            del vars(self.module)["forward"]
