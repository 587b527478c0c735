"""Run a recorded layer again with some of its attention's values zeroed, by the layer's own code.

Two ways, tried in this order. `PackedPairs`: everything after the attention acts on each position alone, so that all
(example, out, source) triples are independent positions of one long sequence whose attention output is known
beforehand. `WholeSequences`, in a file of its own: copies of one example, the attention computed again with the values
zeroed. A way serves only if it reproduces the clean output of the layer with nothing zeroed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from captum_vz._engine.interface import Attend, Listener, listening
from captum_vz._engine.precision import LAYER_ERRORS, without_caches
from captum_vz._engine.products import FastProducts
from captum_vz._engine.recording import AttentionCall, Recording, at, first_tensor

# To how small a part a context, or a residual stream, may shrink before what is left of it is not told by a difference.
NEARLY = 64


class NotReproducedError(Exception):
    """This way of replaying does not give back the layer's clean output; the message says how."""


class SameAgainError(NotReproducedError):
    """This way of replaying would do what one before it did."""


class TooFewError(NotReproducedError):
    """This way of replaying gains nothing here, the rows being few."""


# All of which say that a way of replaying does not serve.
FAILURES = (NotReproducedError, *LAYER_ERRORS)


def run_again(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a layer's own code returns for other arguments than those of the clean pass.

    Raises:
        NotReproducedError: It does not take them.
        torch.OutOfMemoryError: It has no memory for them, which is no reason to think so.
    """
    try:
        return layer.forward(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except LAYER_ERRORS as error:
        raise NotReproducedError(str(error)) from error
    except AssertionError as error:  # of the layer about them, and not of a user's misuse
        raise NotReproducedError(f"it asserts something else of its arguments {error}".rstrip()) from error


class PackedPairs:
    """Replays single positions: `run(batch, out, context)` answers the layer's output for n of them.

    Where the attention module returned the context or its projection, that module is answered as a whole, unless
    `by_module` is off. Where it does more (ALBERT's norm and residual), its own code runs and only the attention
    function inside is answered.
    Attentions that ran before the one that is zeroed answer what they answered in the clean pass; those after it really
    run, on the positions of one example at a time.

    Attributes:
        known: Whether what the layer does is written in torch and transformers, and nowhere else, as far as was asked.
        apart: Whether, moreover, nothing in it is known to let positions compete.
    """

    known = False
    apart = False

    def __init__(
        self, recording: Recording, call: AttentionCall, only_first: bool = False, by_module: bool = True
    ) -> None:
        if call.context is None:
            raise NotReproducedError("its attention is computed inline, out of sight")
        if any(one.parts > 1 for one in recording.calls):
            raise NotReproducedError("its attention calls the attention function several times, each for some values")
        site = recording.calls.index(call)
        self.call = call
        self.arguments = without_caches((recording.args, recording.kwargs))
        self.only_first = only_first
        # To ask at each function costs time.
        fast = FastProducts.gain(recording.parameters)
        self.around: Callable[[], AbstractContextManager[Any]] = FastProducts if fast else nullcontext
        self.later = site + 1 < len(recording.calls)
        self.layer = bare(recording.layer)
        self.earlier: list[tuple[ModuleAnswer, Tensor]] = []
        for before in recording.calls[:site]:
            clean = first_tensor(before.answer)
            if not before.answered or clean is None:
                raise NotReproducedError("an attention before the one that is meant cannot be answered")
            answer = ModuleAnswer(before, projected=True)
            self.layer = with_stand_ins(self.layer, {before.module: answer})
            self.earlier.append((answer, before.batch_first(clean)))
        self.answer: ModuleAnswer | _FunctionAnswer
        if by_module and call.answered and call.module is not recording.layer:
            self.answer = ModuleAnswer(call)
            self.layer = with_stand_ins(self.layer, {call.module: self.answer})
        else:
            self.answer = _FunctionAnswer(call)

    def run(self, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        """The layer's output `(n, d)` at positions `(batch, out)` with attention contexts `(n, head * d_head)`."""
        if self.later and len(batch):
            parts = batch.unique_consecutive(return_counts=True)[1].tolist()
            if len(parts) > 1:
                each = zip(batch.split(parts), out.split(parts), context.split(parts), strict=True)
                return torch.cat([self._run(*part) for part in each])
        return self._run(batch, out, context)

    def _run(self, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        packed = _Packing(self.call, batch, out, self.only_first, self.later)
        args, kwargs = tree_map(packed, self.arguments)
        for answer, clean in self.earlier:
            answer.put(at(clean, batch, out)[None])
        self.answer.put(context[None])
        with listening(self.answer if isinstance(self.answer, Listener) else None), self.around():
            output = first_tensor(run_again(self.layer, args, kwargs))
        for asked in (self.answer, *(answer for answer, _ in self.earlier)):
            asked.check_used()
        if output is None or self.call.batch_first(output).shape[:2] != (1, len(batch)):
            raise NotReproducedError(f"on {len(batch)} packed positions it returned {described(output)}")
        return self.call.batch_first(output)[0]


def nearly_all_is_lost(left: Tensor, context: Tensor) -> Tensor:
    """Where what is left of contexts `(..., features)` is so little that the rounding of a difference shows in it.

    A norm behind the attention, or a distance between directions, would make a whole vector of that rounding.
    """
    return left.abs().amax(-1) < context.abs().amax(-1) / NEARLY


def check_reproduced(replayed: Tensor, clean: Tensor) -> None:
    """Raise NotReproducedError unless `replayed` equals `clean` `(n, d)` but for rounding.

    The bound is on each position's largest difference over its largest entry: 7e-5 in float32, 4e-10 in float64,
    a hundred times what another order of summation costs.
    """
    scale = clean.abs().amax(-1)
    error = ((replayed - clean).abs().amax(-1) / scale.clamp_min(torch.finfo(clean.dtype).tiny)).max().item()
    if not error < torch.finfo(clean.dtype).eps ** 0.6:
        raise NotReproducedError(
            f"with nothing zeroed it differs from the layer's own output by {error:.1e} of its size"
        )


def is_reproduced(replayed: Tensor, clean: Tensor) -> bool:
    """Whether `check_reproduced` finds nothing, at those positions that are finite: padding may be of anything."""
    finite = clean.isfinite().all(-1)
    if not finite.any():
        return True
    try:
        check_reproduced(replayed[finite], clean[finite])
    except NotReproducedError:
        return False
    return True


def check_against_changes(off: Tensor, change: Tensor, clean: Tensor) -> None:
    """Raise NotReproducedError where a position is off by much of what zeroing changes at it, if by more than rounding.

    For what a layer adds may be so little beside what it carries on (LayerScale) that `check_reproduced` overlooks all
    of it. Largest differences `(n)`: of the replay with nothing zeroed from `clean (n, d)`, and of those with a value
    zeroed from that replay.
    """
    wrong = (off > 4 * torch.finfo(clean.dtype).eps * clean.abs().amax(-1)) & (off > change / 32)
    if wrong.any():
        raise NotReproducedError(
            f"with nothing zeroed it is off by {(off / change)[wrong].amax():.1e} of what zeroing a value changes"
        )


class _Answer:
    """Holds the context for the next replay and makes sure that the layer asked for it, once."""

    context: Tensor | None = None

    def put(self, context: Tensor) -> None:
        self.context = context

    def take(self) -> Tensor:
        if self.context is None:
            raise NotReproducedError("it asked for its attention more than once in one run")
        context, self.context = self.context, None
        return context

    def check_used(self) -> None:
        if self.context is not None:
            raise NotReproducedError("it never asked for its attention's output")


class ModuleAnswer(nn.Module, _Answer):
    """Stands where the attention module stood, and returns its output for the contexts it was given.

    With `projected`, what it is given is the output itself.
    """

    def __init__(self, call: AttentionCall, projected: bool = False) -> None:
        super().__init__()
        self.call = call
        # In a tuple, lest it be registered as a submodule of ours.
        self.projection: tuple[Callable[[Tensor], Any], ...] = ()
        if call.projection is not None and not projected:
            self.projection = (call.projection,)
        self.others = (None,) * (len(call.answer) - 1) if isinstance(call.answer, (tuple, list)) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = self.take()
        for projection in self.projection:
            output = first_tensor(projection(output))
        output = self.call.batch_first(output)
        return output if self.others is None else (output, *self.others)


class _FunctionAnswer(_Answer, Listener):
    """Answers the first attention function that is called; later ones compute."""

    def __init__(self, call: AttentionCall) -> None:
        assert call.context is not None
        self.heads = call.context.shape[2:]
        self.first = True

    def put(self, context: Tensor) -> None:
        super().put(context)
        self.first = True

    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        if not self.first:
            return attend(values)
        self.first = False
        return self.take().unflatten(-1, self.heads), None


def bare(module: nn.Module) -> nn.Module:
    """A copy of one module that shares everything below it, without hooks and without wrappers of its forward."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_modules"] = dict(module._modules)
    copied.__dict__["_forward_hooks"] = OrderedDict()
    copied.__dict__["_forward_pre_hooks"] = OrderedDict()
    copied.__dict__.pop("forward", None)
    return copied


def with_stand_ins(module: nn.Module, stand_ins: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of a module in which others stand for some that are inside of it. The module itself is not touched."""
    if module in stand_ins:
        return stand_ins[module]
    children = {name: child for name, child in module._modules.items() if child is not None}
    copies = {name: with_stand_ins(child, stand_ins) for name, child in children.items()}
    if all(copies[name] is child for name, child in children.items()):
        return module
    copied = bare(module)
    copied._modules.update(copies)
    return copied


class _Packing:
    """Takes positions `(batch, out)` of every tensor that has one entry a position: `(1, n, ...)`."""

    def __init__(self, call: AttentionCall, batch: Tensor, out: Tensor, only_first: bool, later: bool) -> None:
        self.call = call
        self.batch = batch
        self.out = out
        self.left = 1 if only_first else -1  # how many tensors may still be packed; -1: any number
        self.later = later

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        batch, _, tokens, _ = self.call.size
        there = self.call.batch_first(value)
        if self.left and there.shape[1] == tokens and there.shape[0] in (1, batch):
            self.left -= 1
            position = self.out if there.shape[0] == 1 else self.batch * tokens + self.out
            return self.call.batch_first(there.flatten(0, 1).index_select(0, position)[None])
        if not self.later:
            return value
        # Attentions that really run, on positions of one example: its own sources, and its own rows of a mask.
        if value.dim() == 4 and value.shape[2] == tokens and value.shape[0] in (1, batch):
            own = value[int(self.batch[0]) if value.shape[0] == batch else 0]
            return own[:, self.out][None]
        if batch > 1 and there.shape[0] == batch:
            return self.call.batch_first(there[self.batch[:1]])
        return value


def described(output: Tensor | None) -> str:
    return "no tensor" if output is None else f"a tensor of shape {tuple(output.shape)}"
