"""What a layer's norm, linear modules and activations return in the folded replay, for one chunk of pairs at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_vz._engine.capture.records import VersionedTensor
from captum_vz._engine.numerics.tolerance import CANCELLATION, TOO_LITTLE_LEFT, CannotReplayError, check_reproduced
from captum_vz._engine.replay.folded.plan import PairChunk
from captum_vz._engine.structure.modules import Norm

if TYPE_CHECKING:
    from captum_vz._engine.replay.folded.structure import Activation


@dataclass(frozen=True)
class FirstLinear:
    """A linear module that takes the norm's output: `W n(p - u) = s(p - u) (base - sum_h a_h W g(f_h)) + constant`.

    Attributes:
        weight: The transpose of the module's matrix W, `(features, d)`.
        composed: The attention's projection times W, `(head, d_head, features)`. None: they are multiplied one by one.
        base: `W g(p)` of each target, `(target, features)`.
        constant: `W beta`, plus W's own bias, `(1, features)`.
        result: A buffer that each chunk fills.
    """

    module: nn.Module
    weight: Tensor
    composed: Tensor | None
    base: Tensor
    constant: Tensor
    result: Tensor

    def fold(self, directions: Tensor, values: Tensor) -> Tensor:
        """`W g(f_h(j))` of vectors with `directions (member * head, d)` and `values (member, head, d_head)`."""
        if self.composed is not None:
            return (values.transpose(0, 1) @ self.composed).transpose(0, 1).flatten(0, 1)
        return functional.linear(directions.to(self.weight.dtype), self.weight).to(directions.dtype)


@dataclass(frozen=True)
class LaterLinear:
    """A linear module that runs later, on what changes with the pairs.

    Attributes:
        weight: The transpose of the module's matrix, `(d, features)`.
        bias: The module's own bias. None: it has none, or only changes are multiplied.
        clean: Its input `(target, features)` and output `(target, d)` in the clean pass, and a buffer for a chunk's
            changes of the input. If given, only these changes are multiplied, in bfloat16.
    """

    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    clean: tuple[Tensor, Tensor, Tensor] | None


class FoldedModules:
    """What the norm and the linear modules return for the chunk that runs now.

    Attributes:
        shares: The factor of each vector, which is minus its attention weight, `(row, member * head)`.
        folded: `W g(f_h(j))` for each first module, `(member * head, features)`.
        scale: The scale that the norm used, `(row, 1)`.
        expected: The norm's input if it must be checked, `(row, d)`.
    """

    chunk: PairChunk
    shares: Tensor
    folded: list[Tensor]
    scale: Tensor
    expected: Tensor | None = None
    _normed: VersionedTensor

    def __init__(self, norm: Norm, scale: Tensor, firsts: list[FirstLinear], laters: list[LaterLinear]) -> None:
        self.norm = norm
        self.largest = CANCELLATION * scale
        self.firsts = firsts
        self.laters = laters

    def fold(self, vectors: Tensor, values: Tensor) -> None:
        """Apply the first linear modules to the vectors `(member * head, d)` of values `(member, head, d_head)`."""
        directions = vectors if self.firsts[0].composed is not None else self.norm.direction(vectors)
        self.folded = [first.fold(directions, values) for first in self.firsts]

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
        if not self._is_normed(x):
            raise CannotReplayError("the norm's output is changed before the first linear module")
        if len(self.scale) != len(self.shares):
            raise CannotReplayError("the norm after the attention was given other positions than the layer")
        result = first.result[: len(self.shares)]
        each = map(self.chunk.by_span, (result, self.scale, self.scale * self.shares))
        for span, rows, scale, shares in zip(self.chunk.spans, *each, strict=True):
            torch.addcmul(first.constant, first.base[span.targets], scale, out=rows)
            add_sums(rows, shares, self.folded[number][span.vectors])
        return result.view(*x.shape[:-1], -1)

    def later(self, number: int, x: Tensor) -> Tensor:
        """The output of a later linear module for its input `x (..., features)`."""
        later, buffer = self.laters[number], self._buffer_of(x)
        rows = x.flatten(0, -2)
        if later.clean is None:
            return functional.linear(x, later.weight, later.bias)
        inputs, outputs, buffer_of_changes = later.clean
        change = buffer_of_changes[: len(rows)]
        # In place if no other linear module needs the input, so that less memory goes through the caches.
        changed = rows if buffer is not None and len(self.laters) == 1 else torch.empty_like(rows)
        each = map(self.chunk.by_span, (rows, changed, change))
        for span, given, of_span, halves in zip(self.chunk.spans, *each, strict=True):
            torch.sub(given, inputs[span.targets], out=of_span)
            halves.copy_(of_span)
        result = outputs.index_select(0, self.chunk.target)
        return result.add_(functional.linear(change, later.weight)).view(*x.shape[:-1], -1)

    def activated(self, activation: Activation, x: Tensor) -> Tensor:
        """The output of an activation, in place if `x` is the buffer of a first linear module."""
        return activation(x.clone(memory_format=torch.contiguous_format) if self._buffer_of(x) is None else x)

    def _is_normed(self, x: Tensor) -> bool:
        """Whether `x` is what the norm returned. Clean rows alone would not show it."""
        normed = self._normed.value
        same = x.data_ptr() == normed.data_ptr() or torch.equal(x.flatten(0, -2), normed.flatten(0, -2))
        return same and self._normed.is_unmodified()

    def _buffer_of(self, x: Tensor) -> Tensor | None:
        """The buffer of the first linear module that returned `x`, if one did."""
        buffers = [one.result for one in self.firsts if one.result.data_ptr() == x.data_ptr()]
        return buffers[0] if buffers and x.is_contiguous() and x.shape[-1] == buffers[0].shape[-1] else None


def add_sums(rows: Tensor, shares: Tensor, vectors: Tensor) -> None:
    """Add to the rows of a span the sums of its `vectors (group * vector, features)`, weighted by `shares`.

    Rows and shares are as `PairChunk.by_span` returns them.
    """
    if rows.dim() == 2:
        torch.addmm(rows, shares[:, : len(vectors)], vectors, out=rows)
        return
    by_group = vectors.view(len(rows), -1, vectors.shape[-1])
    torch.baddbmm(rows, shares[..., : by_group.shape[1]], by_group, out=rows)
