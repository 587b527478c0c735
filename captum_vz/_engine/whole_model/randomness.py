"""Whether what layers are given in a pass depends on random numbers, and which module draws these."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from captum_vz._engine.capture.forward_pass import layer_hooks
from captum_vz._engine.capture.layer_runner import LAYER_ERRORS, tokens_in_caches
from captum_vz._engine.capture.records import LayerRecord
from captum_vz._engine.numerics.tensors import is_out_of_memory
from captum_vz._engine.numerics.tolerance import is_reproduced
from captum_vz._engine.taps.changes import Changes, random_states, repeated
from captum_vz._engine.taps.handler import AttentionHandler
from captum_vz._private import is_replica, tree_leaves
from captum_vz.errors import RefusedError

FIX = (
    "pass a forward_func that calls torch.manual_seed(0) before the model (or seeds numpy or random, if these are "
    "drawn from)"
)


# With these, the first numbers of torch, Python and numpy are below 0.05, and above 0.93. A layer that is left out in
# few calls (LayerDrop) is left out with one of them.
SEEDS = 1208, 31164
# By the index of a layer and the number of its run: the tensors that it is given, and the generators when it returns.
Given = dict[tuple[int, int], tuple[list[Tensor], Any]]


class DrawnInputs:
    """What layers were given in a pass in which the generators of random numbers moved.

    A model may draw numbers and not use them, or another thread draws them. So what the pass gave to the layers is
    compared with what further calls of the forward function give them.

    Attributes:
        fixed: Whether the forward function fixes the numbers that are drawn before a layer, known after :meth:`check`.
            The generators of a further call are then as in the first, although they were not when it began.
    """

    fixed = False

    def __init__(self) -> None:
        self._given: Given = {}
        self._filled = False  # whether a layer was given a key-value cache with tokens of earlier calls

    def note(self, record: LayerRecord) -> None:
        """Keep the inputs of a layer that has run."""
        if is_replica(record.layer):
            return
        arguments = record.args, record.kwargs
        self._given[record.index, record.number] = _copied(arguments), random_states()
        own = next((x.shape[1] for x in record.states), 0)
        self._filled |= record.number == 0 and tokens_in_caches(record.layer, arguments) > own

    def check(self, forward: Callable[[], Any], layers: Sequence[nn.Module], output: Any = None) -> None:
        """Raise RefusedError if the inputs of the layers depend on random numbers. `forward` is called again.

        So is the `output` of the pass, if it is used.
        """
        if not self._given and output is None:
            return
        if self._filled:
            raise RefusedError(
                "forward_func draws random numbers and holds a filled key-value cache. So it cannot be called again to "
                "see whether its layers are given other numbers in each call. Call model.eval(), or pass the whole "
                "sequence without a cache."
            )
        for seed in SEEDS:
            if not self.fixed:
                self._compare(forward, layers, output, seed)

    def _compare(self, forward: Callable[[], Any], layers: Sequence[nn.Module], output: Any, seed: int) -> None:
        """Compare what a call with this seed gives to the layers, and its output."""
        try:
            found, again = repeated(lambda: _inputs_and_output(forward, layers, seed))
        except LAYER_ERRORS as error:
            if is_out_of_memory(error):
                raise
            raise RefusedError(
                f"forward_func draws random numbers, and fails if it is called again ({type(error).__name__}: {error})."
                f" So it is unknown whether each call has the same result. Call model.eval(), or {FIX}."
            ) from error
        for (index, number), (given, states) in self._given.items():
            now, states_now = found.get((index, number), ([], None))
            if not _are_same(given, now):
                place = "the explained layer" if len(layers) == 1 else f"layer {index} of the explained layers"
                _refuse(forward, f"gives {place} ({type(layers[index]).__name__}) another input")
            self.fixed |= states == states_now
        if output is not None and not _are_same(_tensors(output), _tensors(again)):
            _refuse(forward, "has another output")


def _refuse(forward: Callable[[], Any], change: str) -> None:
    found = repeated(lambda: _drawing_modules(forward))
    shown, remedy = "forward_func itself draws random numbers", f"Switch this off. Or fix the numbers: {FIX}."
    if found:
        name, module = next((one for one in found if one[1].training), found[0])
        named = f"{name} ({type(module).__name__})" if name else type(module).__name__
        shown = f"{named} draws random numbers {'in train' if module.training else 'also in eval'} mode"
        remedy = f"Call model.eval() first. Or fix the numbers: {FIX}." if module.training else remedy
    raise RefusedError(f"{shown}, so each call of forward_func {change}. {remedy}")


def _inputs_and_output(forward: Callable[[], Any], layers: Sequence[nn.Module], seed: int) -> tuple[Given, Any]:
    """What each layer is given in each run, and what `forward` returns. Its random numbers begin with this seed."""
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(seed)
    given: Given = {}
    count: Counter[int] = Counter()
    runs: dict[AttentionHandler, tuple[tuple[int, int], list[Tensor]]] = {}

    def begin(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionHandler:
        handler = AttentionHandler()
        runs[handler] = (index, count[id(layer)]), _copied((args, kwargs))
        count[id(layer)] += 1
        return handler

    def end(handler: AttentionHandler, *_: Any) -> None:
        run, tensors = runs.pop(handler)
        given[run] = tensors, random_states()

    with layer_hooks(layers, begin, end):
        return given, forward()


def _drawing_modules(forward: Callable[[], Any]) -> list[tuple[str, nn.Module]]:
    """The innermost modules that draw random numbers, in their order, with their names in the outermost module."""
    running: list[tuple[nn.Module, Any, int]] = []  # with the state, and the number of modules found, when they began
    found: list[tuple[str, nn.Module]] = []

    def before(module: nn.Module, inputs: Any) -> None:
        running.append((module, random_states(), len(found)))

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        begun = [place for place, (one, _, _) in enumerate(running) if one is module]
        if not begun:  # of another thread
            return
        _, states, count = running[begun[-1]]
        if len(found) == count and states != random_states():
            names = {id(one): name for name, one in running[0][0].named_modules()}
            found.append((names.get(id(module), ""), module))
        del running[begun[-1] :]

    with Changes() as changes:
        changes.hook(partial(register_module_forward_pre_hook, before), partial(register_module_forward_hook, after))
        forward()
    return found


def _tensors(arguments: Any) -> list[Tensor]:
    return [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.numel()]


def _copied(arguments: Any) -> list[Tensor]:
    return [x.clone() for x in _tensors(arguments)]


def _are_same(given: list[Tensor], found: list[Tensor]) -> bool:
    """Whether two calls gave a layer the same numbers, up to rounding."""
    if [x.shape for x in given] != [x.shape for x in found]:
        return False
    pairs = [(new, old) if old.dim() else (new[None], old[None]) for new, old in zip(found, given, strict=True)]
    return all(is_reproduced(new, old) if old.is_floating_point() else torch.equal(new, old) for new, old in pairs)
