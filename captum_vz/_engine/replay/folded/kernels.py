"""What follows a layer's attention, and what its norm, linear modules and activations return for a chunk of pairs.

The structure is read from traced runs of packed positions. No layer is known by name. One position of a traced run has
a context of NaN. A module whose input at this position is NaN depends on the context. The first such module must be a
norm of the residual stream, and some linear modules must take the norm's output. A norm of the attention's output may
come before it, and then the linear modules may take the stream itself. Or no module depends on the context, as in
layers whose feed-forward runs in parallel to the attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_vz._engine.capture.interventions import StopRunError
from captum_vz._engine.numerics import VersionedTensor
from captum_vz._engine.numerics.tolerance import (
    CANCELLATION,
    TOO_LITTLE_LEFT,
    CannotReplayError,
    check_reproduced,
    is_same_function,
)
from captum_vz._engine.structure.modules import NoNorm, Norm, matrix, read_norm

if TYPE_CHECKING:
    from captum_vz._engine.capture import AttentionRecord
    from captum_vz._engine.replay.folded.plan import PairChunk
    from captum_vz._engine.replay.packed import PackedPairs

Activation: TypeAlias = Callable[[Tensor], Tensor]
# By how much the scale of a norm of the attention's output may grow in a pair that is folded. In OLMo 2, errors reach
# 2e-7 of the largest score for 8, and 3e-5 for 64. Other pairs are few, and are replayed one by one.
INNER_GROWTH = 8
PIECE = 1 << 18  # number of float32 entries that the cache of one core holds
Run = tuple[nn.Module, Tensor, Tensor]  # a module, its input and its output, `(n, features)`


@dataclass(frozen=True)
class FeedForwardStructure:
    """What follows the attention."""

    projection: nn.Module  # the attention's output projection, a linear module
    weight: Tensor  # its matrix, `(head * d_head, d)`
    # The norm that takes the residual stream. None: no module depends on the attention, and the layer's output is a sum
    # of the attention's output and other terms.
    norm: Norm | None = None
    inner: Norm | None = None  # the norm of the attention's output before it is added to the stream, or None
    firsts: tuple[nn.Module, ...] = ()  # the linear modules that take the norm's output
    # The modules that take the output of the first linear modules and compute a known activation.
    activations: tuple[tuple[nn.Module, Activation], ...] = ()


class Trace:
    """Runs packed positions and records input and output of each innermost module, `(n, features)`."""

    def __init__(self, replay: PackedPairs) -> None:
        self._replay = replay
        self._end: list[nn.Module] = []
        self._runs: list[Run] = []
        modules = [m for m in replay.runner.layer.modules() if m is not replay.answer]
        innermost = [m for m in modules if not any(True for _ in m.children())]
        # A vector of such a module, as a layer scale, is used by its own code. A matrix may hold experts.
        outer = [x for m in modules if m not in innermost for x in m.parameters(recurse=False)]
        if any(x.dim() > 1 for x in outer):
            raise CannotReplayError("a module with submodules has a matrix of its own")
        self._with_parameters = [m for m in innermost if any(True for _ in m.parameters())]
        replay.runner.replace_forwards({m: _recording(m, self._runs, self._end) for m in innermost})

    def run(self, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        """The layer's output at positions `(batch, out)` with contexts `(n, head * d_head)`."""
        self._runs.clear()
        return self._replay.run(batch, out, context)

    def run_until(self, module: nn.Module, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        """The input of a module. The run ends there."""
        self._end.append(module)
        try:
            self.run(batch, out, context)
        except StopRunError as stopped:
            return stopped.args[0]
        finally:
            self._end.clear()
        raise CannotReplayError("a module that ran once did not run again")

    def structure(self, attention: AttentionRecord, context: Tensor) -> FeedForwardStructure:
        """The structure that the last run shows. The context of its last position was NaN.

        CannotReplayError: the structure is not supported.
        """
        # Each module runs once and on each position. So none of them selects positions, as experts do.
        expected = {*map(id, self._with_parameters)}
        ran = [m for m, x, _ in self._runs if id(m) in expected and len(x) == len(context)]
        if len(ran) != len(expected) or {*map(id, ran)} != expected:
            raise CannotReplayError("not each module with parameters ran once, on each position")
        projection = attention.projection
        if projection is None:
            takes_context = [module for module, x, _ in self._runs if _equal(x, context)]
            projection = takes_context[0] if takes_context else None
        weight = None if projection is None else matrix(projection)
        if projection is None or weight is None:
            raise CannotReplayError("the context goes through no plain linear projection")
        runs = [run for run in self._runs if id(run[0]) in expected]
        dependent = [(m, x, y) for m, x, y in runs if m is not projection and x[-1].isnan().any()]
        while dependent and _is_layer_scale(*dependent[0]):
            dependent.pop(0)
        if not dependent:
            return FeedForwardStructure(projection, weight)
        module, x, normed = dependent[0]
        norm, inner = read_norm(module, x[:-1], normed[:-1]), None
        firsts = _linear_modules(dependent, normed)
        if not firsts and len(dependent) > 1:
            inner, (module, x, normed) = norm, dependent[1]
            if matrix(module) is None:
                norm, firsts = read_norm(module, x[:-1], normed[:-1]), _linear_modules(dependent, normed)
            else:
                norm, firsts = NoNorm.before(module, x), _linear_modules(dependent, x)
        if not firsts:
            raise CannotReplayError("no plain linear module takes the output of the norm after the attention")
        first_outputs = [y for m, _, y in dependent if m in firsts]
        after = [(m, x, y) for m, x, y in self._runs if any(_equal(x, output) for output in first_outputs)]
        known = [(m, _activation(m, x, y)) for m, x, y in after]
        activations = tuple((m, f) for m, f in known if f is not None)
        return FeedForwardStructure(projection, weight, norm, inner, firsts, activations)


def _linear_modules(runs: list[Run], given: Tensor) -> tuple[nn.Module, ...]:
    """The plain linear modules that take `given`."""
    return tuple(m for m, x, _ in runs if matrix(m) is not None and _equal(x, given))


def _is_layer_scale(module: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether a module multiplies its input by its only parameter, a vector."""
    parameters = list(module.parameters())
    return len(parameters) == 1 and parameters[0].dim() <= 1 and is_same_function(x * parameters[0], y)


def gelu_by_tanh(x: Tensor) -> Tensor:
    """GELU approximated by tanh, in place: `x * sigmoid(2 * t)`, where `t` is the argument of tanh."""
    if x.device.type != "cpu":
        return torch.ops.aten.gelu_(x, approximate="tanh")
    # Pieces that stay in the cache take two thirds of the time of torch's own kernel.
    for piece in x.view(-1).split(PIECE):
        factor = piece * piece
        torch.addcmul(piece, factor, piece, value=0.044715, out=factor)
        piece.mul_(factor.mul_(math.sqrt(8 / math.pi)).sigmoid_())
    return x


# They overwrite their input, so that a chunk's widest tensor exists only once.
ACTIVATIONS: tuple[Activation, ...] = (torch.ops.aten.gelu_, gelu_by_tanh, torch.ops.aten.silu_, torch.relu_)


def _activation(module: nn.Module, x: Tensor, y: Tensor) -> Activation | None:
    """The known activation that turns `x` into `y`. It is tested on large inputs too, where the module may clamp."""
    contiguous = torch.contiguous_format
    found = next((f for f in ACTIVATIONS if is_same_function(f(x.clone(memory_format=contiguous)), y)), None)
    if found is None:
        return None
    far = torch.linspace(-64, 64, x.shape[-1], dtype=x.dtype, device=x.device).expand(2, -1)
    return found if is_same_function(found(far.clone()), module(far.clone())) else None


def _recording(module: nn.Module, runs: list[Run], end: list[nn.Module]) -> Callable[..., Any]:
    # Given the lists and not the trace. The trace holds the replay, which holds this function, and would outlive it.
    def forward(*args: Any, **kwargs: Any) -> Any:
        if any(module is one for one in end):
            raise StopRunError(_by_position(args[0]))
        output = module(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            runs.append((module, _by_position(args[0]), _by_position(output)))
        return output

    return forward


def _by_position(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Whether two inputs are equal at all positions except the last, whose context was NaN."""
    return found.shape == expected.shape and torch.equal(found[:-1], expected[:-1])


@dataclass(frozen=True)
class FirstLinear:
    """A linear module that takes the norm's output: `W n(p - u) = s(p - u) (base - sum_h a_h W g(f_h)) + constant`.

    Where the attention's output has a norm of its own, with scale t and linear part k, it takes

        s (base + t (inner - sum_h a_h W g(k(f_h)))) + constant
    """

    module: nn.Module
    weight: Tensor  # the transpose of the module's matrix W, `(features, d)`
    # The attention's projection times W, `(head, d_head, features)`. None: they are multiplied one by one.
    composed: Tensor | None
    base: Tensor  # `W g(p)` of each target, `(target, features)`. With an inner norm, p is the stream without `t k(o)`.
    # `W g(k(o))` of each target's attention output o, `(target, features)`. None: there is no inner norm.
    inner: Tensor | None
    constant: Tensor  # `W beta`, plus W's own bias, `(1, features)`
    result: Tensor  # a buffer that each chunk fills


class FoldedModules:
    """What the norm and the linear modules return for the chunk that runs now."""

    chunk: PairChunk
    shares: Tensor  # the factor of each vector, which is minus its attention weight, `(row, member * head)`
    folded: list[Tensor]  # `W g(f_h(j))` for each first module, `(member * head, features)`
    scale: Tensor  # the scale that the norm used, `(row, 1)`
    expected: Tensor | None = None  # the norm's input if it must be checked, `(row, d)`
    inner_scale: Tensor | float = 1.0  # the scale of the norm of the attention's output, `(row, 1)`. 1: there is none
    # The pairs whose attention output has too little left for this norm, bool `(pair,)`. None: it is unknown.
    cancelled: Tensor | None = None
    _normed: VersionedTensor

    def __init__(self, norm: Norm, scale: Tensor, inner: tuple[Norm, Tensor] | None, firsts: list[FirstLinear]) -> None:
        self.norm, self.inner = norm, inner
        self.largest = CANCELLATION * scale
        self.firsts = firsts

    def fold(self, vectors: Tensor, values: Tensor) -> None:
        """Apply the first linear modules to the vectors `(member * head, d)` of values `(member, head, d_head)`."""
        if self.firsts[0].composed is None:
            vectors = self.norm.direction(vectors if self.inner is None else self.inner[0].direction(vectors))
        self.folded = [
            functional.linear(vectors, one.weight)
            if one.composed is None
            else (values.transpose(0, 1) @ one.composed).transpose(0, 1).flatten(0, 1)
            for one in self.firsts
        ]

    def inner_normed(self, x: Tensor) -> Tensor:
        """The output of the norm of the attention's output `x (..., d)`. Its scale is kept."""
        assert self.inner is not None  # narrows the type: only then it is asked
        norm, clean = self.inner
        normed, scale = norm.normed_and_scale(x)
        self.inner_scale, target = scale.reshape(-1, 1), self.chunk.target[: self.chunk.pairs]
        self.cancelled = (self.inner_scale[: len(target)] > INNER_GROWTH * clean[target]).flatten()
        if isinstance(self.norm, NoNorm):
            self.scale = torch.ones_like(self.inner_scale)
        return normed

    def normed(self, x: Tensor) -> Tensor:
        """The norm's output for `x (..., d)`. Its scale is kept for the first linear modules."""
        if self.expected is not None:
            check_reproduced(x.flatten(0, -2), self.expected)
        normed, scale = self.norm.normed_and_scale(x)
        self._normed = VersionedTensor(normed)
        self.scale = scale.reshape(-1, 1)
        pairs = self.chunk.pairs
        if (self.scale[:pairs] > self.largest[self.chunk.target[:pairs]]).any():
            raise CannotReplayError(TOO_LITTLE_LEFT)
        return normed

    def first(self, number: int, x: Tensor) -> Tensor:
        """The output of a first linear module for the norm's output `x (..., d)`."""
        first = self.firsts[number]
        if not isinstance(self.norm, NoNorm):  # clean rows alone would not show it
            normed = self._normed.value
            same = x.data_ptr() == normed.data_ptr() or torch.equal(x.flatten(0, -2), normed.flatten(0, -2))
            if not (same and self._normed.is_unmodified()):
                raise CannotReplayError("the norm's output is changed before the first linear module")
        if len(self.scale) != len(self.shares):
            raise CannotReplayError("the norm after the attention was given other positions than the layer")
        result = first.result[: len(self.shares)]
        of_attention = self.scale * self.inner_scale
        each = map(self.chunk.by_span, (result, self.scale, of_attention, of_attention * self.shares))
        for span, rows, scale, inner, shares in zip(self.chunk.spans, *each, strict=True):
            if not span.direct:
                torch.addcmul(first.constant, first.base[span.targets], scale, out=rows)
                if first.inner is not None:
                    rows.addcmul_(first.inner[span.targets], inner)
                add_sums(rows, shares, self.folded[number][span.vectors])
        for direct in self.chunk.direct:
            result[direct] = first.module(x.flatten(0, -2)[direct])
        return result.view(*x.shape[:-1], -1)

    def activated(self, activation: Activation, x: Tensor) -> Tensor:
        """The output of an activation, in place if `x` is the buffer of a first linear module."""
        buffers = [one.result for one in self.firsts if one.result.data_ptr() == x.data_ptr()]
        is_buffer = buffers and x.is_contiguous() and x.shape[-1] == buffers[0].shape[-1]
        return activation(x if is_buffer else x.clone(memory_format=torch.contiguous_format))


def add_sums(rows: Tensor, shares: Tensor, vectors: Tensor) -> None:
    """Add to the rows of a span the sums of its `vectors (group * vector, features)`, weighted by `shares`.

    Rows and shares are as `PairChunk.by_span` returns them.
    """
    if rows.dim() == 2:
        torch.addmm(rows, shares[:, : len(vectors)], vectors, out=rows)
        return
    by_group = vectors.view(len(rows), -1, vectors.shape[-1])
    torch.baddbmm(rows, shares[..., : by_group.shape[1]], by_group, out=rows)
