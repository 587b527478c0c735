"""Outputs of modules in a clean pass, which runs on copies of the inputs reuse.

Two kinds of outputs do not change, and are reused:

- The output of a module that returned before the first of these layers began: embeddings, lower layers, an encoder. The
  module does not run again. Its clean output is repeated for each copy.
- The output of a linear module at a position whose input did not change: queries and keys of the first layer, or, in a
  causal model, all positions before the zeroed one. The module runs on the other positions only. Inputs are compared,
  so this is exact in any model, because a linear module treats each row alone. Once most positions have changed, they
  are no longer compared: in an encoder, all change in the first layer.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from captum_vz._engine.numerics import clone_tensor, repeat_examples
from captum_vz._engine.structure.modules import matrix
from captum_vz._engine.taps.changes import Changes, original
from captum_vz._private import tree_leaves, tree_map

MOST_CHANGED = 0.8  # if a larger share of rows has changed, selecting these rows costs more than it saves
# A filter of warnings. warnings.catch_warnings leaves the filters of one thread to another.
HOOKS_SEE_MODULES_TWICE = ("ignore", re.compile("Using `torch.compile.* when there are global hooks"), Warning, None, 0)
# The cache that this thread fills, and the reader that answers in this thread.
_filling: ContextVar[CleanCache | None] = ContextVar("captum_vz_filling", default=None)
_answering: ContextVar[CacheReader | None] = ContextVar("captum_vz_answering", default=None)


class CleanCache:
    """Outputs of modules in a clean pass."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.outermost: list[nn.Module] = []  # the modules that ran inside no other module
        self.largest = 0  # bytes of the largest tensor that a module returned
        self._layers = {id(layer) for layer in layers}
        self._reached = False  # whether one of the layers has begun
        self._running: list[tuple[nn.Module, int]] = []  # with the number of outputs when it began
        self._outputs: list[tuple[nn.Module, Tensor | None, Any]] = []  # with the input of a linear module

    def fill(self, changes: Changes) -> None:
        """Record what modules return in this thread, until the changes are taken back."""
        # torch warns that these hooks may see a compiled module twice. That does no harm here.
        if "torch._dynamo" in sys.modules:
            changes.replace(warnings, "filters", [HOOKS_SEE_MODULES_TWICE, *warnings.filters])
        changes.set(_filling, self)
        # Hooks of all modules, because the model inside a forward function is not known.
        changes.hook(partial(register_module_forward_pre_hook, self.entered))
        changes.hook(partial(register_module_forward_hook, self.returned))

    def answer(self, changes: Changes, copies: int, batch: int, whole: bool, alone: int | None) -> None:
        """Let modules return cached outputs in a run on `copies` copies, until the changes are taken back.

        The copies are concatenated: all `batch` examples, then all of them again. Outputs with one entry for each
        example are repeated, see `repeat_examples`. Without `whole`, only outputs of linear modules are reused. With
        `alone`, the run is on this example only.
        """
        reused = [one for one in self._outputs if one[1] is not None or whole]
        if alone is not None:
            of_example = partial(_of_example, example=alone, batch=batch)
            reused = [(module, of_example(x), tree_map(of_example, y)) for module, x, y in reused]
        changes.set(_answering, CacheReader(copies, batch if alone is None else 1, reused))
        for module in dict.fromkeys(module for module, _, _ in reused):
            forward = partial(_forward_or_cached, module, original(module, "forward"))
            changes.replace(module, "forward", forward)

    def entered(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Record that a module begins, in this thread."""
        if _filling.get() is not self:
            return
        if not self._running:
            self.outermost.append(module)
        self._reached = self._reached or id(module) in self._layers
        self._running.append((module, len(self._outputs)))

    def returned(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Record the output of a module, in this thread."""
        if _filling.get() is not self:
            return
        began, count = self._running.pop()
        while began is not module:  # a module that raised an error, which the model caught, does not return
            began, count = self._running.pop()
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        if isinstance(module, torch.jit.ScriptModule):  # its forward cannot be replaced
            return
        if not self._reached:
            # This replaces the outputs of the modules inside. Cloned, because the model may write to the output later.
            self._outputs[count:] = [(module, None, tree_map(clone_tensor, output))]
        elif inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor) and matrix(module) is not None:
            self._outputs.append((module, inputs[0].clone(), output.clone()))


def _of_example(value: Any, example: int, batch: int) -> Any:
    """The part of one example, of a tensor with one entry for each. Any other value is returned unchanged."""
    of_batch = isinstance(value, Tensor) and value.dim() and len(value) == batch
    return value[example : example + 1] if of_batch else value


class CacheReader:
    """Cached outputs for one run on copies. Each module gets its outputs of the clean pass in the same order."""

    def __init__(self, copies: int, batch: int, outputs: Sequence[tuple[nn.Module, Tensor | None, Any]]) -> None:
        self.copies = copies
        self.repeated = partial(repeat_examples, copies=copies, batch=batch)
        self.outputs: dict[int, deque[tuple[Tensor | None, Any]]] = {}
        # By the shape of inputs, without features, that changed mostly: whether all changed but the last copy's.
        self._changed: dict[torch.Size, bool] = {}
        for module, x, y in outputs:
            self.outputs.setdefault(id(module), deque()).append((x, y))

    def output_of(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of a module, from the cache as far as possible, else by its own `forward`."""
        if outputs := self.outputs.get(id(module)):
            x, y = outputs.popleft()
            if x is None:
                # Cloned because the model may write to it.
                return tree_map(lambda one: clone_tensor(self.repeated(one)), y)
            if args and isinstance(args[0], Tensor) and args[0].shape == (self.copies * len(x), *x.shape[1:]):
                return self._rows(args[0], x, y, forward)
        return forward(*args, **kwargs)

    def _rows(self, x: Tensor, clean: Tensor, clean_output: Tensor, forward: Callable[..., Any]) -> Any:
        """Return a linear module's output for `x`. Its output for the inputs `clean` is `clean_output`."""
        shape, last = x.shape[:-1], len(x) - len(clean)
        if shape not in self._changed:
            changed = (x.unflatten(0, (self.copies, -1)) != clean.to(x.device)).any(-1).flatten(0, 1)
            is_whole = self.copies > 1 and bool(changed[:last].all())
            if not is_whole and changed.float().mean() <= MOST_CHANGED:
                output = clean_output.repeat(self.copies, *[1] * (clean_output.dim() - 1))
                if changed.any():
                    output[changed] = forward(x[changed])
                return output
            self._changed[shape] = is_whole
        if self._changed[shape] and torch.equal(x[last:], clean.to(x.device)):
            return torch.cat([forward(x[:last]), clean_output.to(x.device)])
        return forward(x)


def _forward_or_cached(module: nn.Module, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module whose own forward is `own`. A thread without a reader runs that."""
    reader = _answering.get()
    return own(*args, **kwargs) if reader is None else reader.output_of(module, own, args, kwargs)
