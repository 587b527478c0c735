"""Run a recorded layer again with some of its attention's values zeroed, by the layer's own code.

Two ways, tried in this order. `PackedPairs`: everything after the attention acts on each position alone, so that all
(example, out, source) triples are independent positions of one long sequence whose attention output is known
beforehand. `WholeSequences`: copies of one example, the attention computed again with the values zeroed. A way serves
only if it reproduces the clean output of the layer with nothing zeroed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from captum_vz._engine.interface import Attend, Listener, listening
from captum_vz._engine.precision import without_caches
from captum_vz._engine.recording import AttentionCall, Recording, first_tensor


class NotReproducedError(Exception):
    """This way of replaying does not give back the layer's clean output; the message says how."""


class PackedPairs:
    """Replays single positions: `run(batch, out, context)` answers the layer's output for n of them.

    Where the attention module returned the context or its projection, that module is answered as a whole. Where it
    does more (ALBERT's norm and residual), its own code runs and only the attention function inside is answered.
    """

    def __init__(self, recording: Recording, call: AttentionCall) -> None:
        self.call = call
        self.recording = recording
        self.arguments = without_caches((recording.args, recording.kwargs))
        self.shape = call.context.shape[:2]
        self.answer: _ModuleAnswer | _FunctionAnswer
        if call.answered and call.module is not recording.layer:
            self.answer = _ModuleAnswer(call)
            self.layer = _stand_in(recording.layer, call.module, self.answer)
        else:
            self.layer = _bare(recording.layer)
            self.answer = _FunctionAnswer(call, _counterpart(call.module, recording.layer, self.layer))

    def run(self, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        """The layer's output `(n, d)` at positions `(batch, out)` with attention contexts `(n, head * d_head)`."""
        args, kwargs = tree_map(lambda x: _pack(x, self.shape, batch, out), self.arguments)
        self.answer.put(context[None])
        with listening(self.answer if isinstance(self.answer, Listener) else None):
            output = first_tensor(self.layer.forward(*args, **kwargs))
        self.answer.check_used()
        if output is None or output.shape[:2] != (1, len(batch)):
            raise NotReproducedError(f"on {len(batch)} packed positions it returned {_describe(output)}")
        return output[0]


class WholeSequences:
    """Replays whole sequences: `run(example, zeroed)` answers the layer's output for n copies of one example."""

    def __init__(self, recording: Recording, call: AttentionCall) -> None:
        self.recording = recording
        self.call = call
        self.arguments = without_caches((recording.args, recording.kwargs))
        self.layer = _bare(recording.layer)

    def run(self, example: int, zeroed: Tensor) -> Tensor:
        """The layer's output `(n, out, d)`, values zeroed where `zeroed (n, head, in)` is True."""
        batch = self.call.context.shape[0]
        args, kwargs = tree_map(lambda x: _repeat(x, batch, example, len(zeroed)), self.arguments)
        zeroing = _Zeroing(_counterpart(self.call.module, self.recording.layer, self.layer), zeroed)
        with listening(zeroing):
            output = first_tensor(self.layer.forward(*args, **kwargs))
        if zeroing.times != 1:
            raise NotReproducedError(f"its attention was called {zeroing.times} times in one run")
        if output is None or output.shape[:2] != (len(zeroed), self.call.context.shape[1]):
            raise NotReproducedError(f"on {len(zeroed)} copies of an example it returned {_describe(output)}")
        return output


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


class _ModuleAnswer(nn.Module, _Answer):
    """Stands where the attention module stood, and returns its output for the contexts it was given."""

    def __init__(self, call: AttentionCall) -> None:
        super().__init__()
        # In a tuple, lest it be registered as a submodule of ours.
        self.projection: tuple[Callable[[Tensor], Any], ...] = (call.projection,) if call.projection else ()
        self.others = (None,) * (len(call.answer) - 1) if isinstance(call.answer, (tuple, list)) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = self.take()
        for projection in self.projection:
            output = first_tensor(projection(output))
        return output if self.others is None else (output, *self.others)


class _FunctionAnswer(_Answer, Listener):
    """Answers the attention function of one module; other attentions compute."""

    def __init__(self, call: AttentionCall, module: nn.Module) -> None:
        self.heads = call.context.shape[2:]
        self.module = module

    def attend(
        self, module: nn.Module, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        if module is not self.module:
            return attend(values)
        return self.take().unflatten(-1, self.heads), None


class _Zeroing(Listener):
    """Computes the attention of one module with a different set of values zeroed in each copy."""

    def __init__(self, module: nn.Module, zeroed: Tensor) -> None:
        self.module = module
        self.zeroed = zeroed
        self.times = 0

    def attend(
        self, module: nn.Module, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        context, weights = attend(values)
        if module is not self.module:
            return context, weights
        self.times += 1
        shared_by = weights.shape[1] // values.shape[1]
        lost = (weights * self.zeroed[:, :, None]) @ values.repeat_interleave(shared_by, dim=1)
        return context - lost.transpose(1, 2), weights


def _bare(module: nn.Module) -> nn.Module:
    """A copy of one module that shares everything below it, without hooks and without wrappers of its forward."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_modules"] = dict(module._modules)
    copied.__dict__["_forward_hooks"] = OrderedDict()
    copied.__dict__["_forward_pre_hooks"] = OrderedDict()
    copied.__dict__.pop("forward", None)
    return copied


def _stand_in(layer: nn.Module, module: nn.Module, replacement: nn.Module) -> nn.Module:
    """A copy of `layer` in which `replacement` stands for `module`. The layer itself is not touched."""
    path = next(name for name, submodule in layer.named_modules() if submodule is module).split(".")
    copied = parent = _bare(layer)
    for name in path[:-1]:
        parent._modules[name] = _bare(parent.get_submodule(name))
        parent = parent.get_submodule(name)
    parent._modules[path[-1]] = replacement
    return copied


def _counterpart(module: nn.Module, layer: nn.Module, copied: nn.Module) -> nn.Module:
    """The module of a bare copy that corresponds to `module`: itself, being shared, unless it is the layer."""
    return copied if module is layer else module


def _pack(value: Any, shape: torch.Size, batch: Tensor, out: Tensor) -> Any:
    """Take positions `(batch, out)` of every tensor that has one entry a position: `(1, n, ...)`."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != shape[1]:
        return value
    if value.shape[0] == shape[0]:
        return value[batch, out][None]
    return value[0, out][None] if value.shape[0] == 1 else value


def _repeat(value: Any, batch: int, example: int, copies: int) -> Any:
    """Copy one example of every tensor that has one entry an example."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != batch:
        return value
    return value[example : example + 1].expand(copies, *value.shape[1:])


def _describe(output: Tensor | None) -> str:
    return "no tensor" if output is None else f"a tensor of shape {tuple(output.shape)}"
