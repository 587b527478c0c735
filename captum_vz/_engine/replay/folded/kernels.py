"""TODO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.records import VersionedTensor
from captum_vz._engine.numerics.matmul import OneDnnLinears, Product, padded
from captum_vz._engine.numerics.tolerance import CANCELLATION, TOO_LITTLE_LEFT, CannotReplayError, check_reproduced
from captum_vz._engine.replay.folded.activations import Activation
from captum_vz._engine.replay.folded.plan import PairChunk
from captum_vz._engine.structure.modules import Norm


@dataclass(frozen=True)
class FirstLinear:
    """A first matrix: `W n(p - u) = s(p - u) (base - sum_h a_h W g(f_h)) + constant`."""

    module: nn.Module
    product: Product
    composed: Tensor | None  # the attention's projection and W in one, (head, d_head, features); None: one by one
    base: Tensor  # W g(p) of each target, (target, features)
    constant: Tensor  # W beta, and W's own bias, (1, features)
    result: Tensor  # filled anew by each chunk


@dataclass(frozen=True)
class CleanActivations:
    """What a later matrix is given for each target, unchanged, and what it makes of that."""

    inputs: Tensor  # (target, features)
    outputs: Tensor  # (target, d)
    change: Tensor  # room for what a chunk's inputs differ by


@dataclass(frozen=True)
class LaterLinear:
    """A later matrix."""

    module: nn.Module
    product: Product
    clean: CleanActivations | None  # given: only what changes in its input is multiplied, in bfloat16


class FoldedModules:
    """What the norm, the first and the last matrices give for the chunk that runs now.

    `scale (target, 1)` is the norm's for the clean targets.
    """

    chunk: PairChunk
    shares: Tensor  # how much is added of each vector: minus the attention weights, (row, member * head)
    folded: list[Tensor]  # W g(f_h(j)) of each first matrix, (member * head, features)
    scale: Tensor  # of the norm, (row, 1)
    expected: Tensor | None = None  # what the norm should be given, (row, d), where that is not to be taken on trust
    made: VersionedTensor  # what the norm gave

    def __init__(self, norm: Norm, scale: Tensor, firsts: list[FirstLinear], lasts: list[LaterLinear]) -> None:
        self.norm = norm
        self.largest = CANCELLATION * scale
        self.firsts = firsts
        self.lasts = lasts

    def fold(self, vectors: Tensor, values: Tensor) -> None:
        """Apply first matrices to vectors `(member * head, d)`, or to their values `(member, head, d_head)`."""
        self.folded = []
        for first in self.firsts:
            if first.composed is None:
                direction = self.norm.direction(vectors)
                folded = first.product(direction.to(first.product.weight.dtype)).to(direction.dtype)
            else:
                folded = (values.transpose(0, 1) @ first.composed).transpose(0, 1).flatten(0, 1)
            self.folded.append(folded)

    def normed(self, x: Tensor) -> Tensor:
        """The norm of `x (..., d)`, whose scale the first matrices will need."""
        if self.expected is not None:
            check_reproduced(x.flatten(0, -2), self.expected)
        normed, scale = self.norm.normed_and_scale(x)
        self.made = VersionedTensor(normed)
        self.scale = scale.reshape(-1, 1)
        pairs = self.chunk.pairs
        if (self.scale[:pairs] > self.largest[self.chunk.target[:pairs]]).any():
            raise CannotReplayError(TOO_LITTLE_LEFT)
        return normed

    def first(self, number: int, x: Tensor) -> Tensor:
        """What a first matrix makes of the norm's output `x (..., d)`."""
        first = self.firsts[number]
        if not self._is_normed(x):
            raise CannotReplayError("something becomes of the norm's output before the first matrix")
        if len(self.scale) != len(self.shares):
            raise CannotReplayError("the norm behind the attention saw other positions than it was given")
        result = first.result[: len(self.shares)]
        each = map(self.chunk.by_span, (result, self.scale, self.scale * self.shares))
        for span, rows, scale, shares in zip(self.chunk.spans, *each, strict=True):
            if span.folded:
                torch.addcmul(first.constant, first.base[span.targets], scale, out=rows)
                add_sums(rows, shares, self.folded[number][span.vectors])
        alone = self.chunk.alone
        if alone.start < alone.stop:
            with OneDnnLinears():
                result[alone] = first.module(x.flatten(0, -2)[alone])
        return result.view(*x.shape[:-1], -1)

    def last(self, number: int, x: Tensor) -> Tensor:
        """What a later matrix makes of its input `x (..., features)`."""
        last, room = self.lasts[number], self._room_of(x)
        rows = x.flatten(0, -2)
        if last.clean is None:
            # With what lies behind them, not looked at, lest they be copied to get as many as products come in.
            more = rows if room is None else room[: padded(len(rows))]
            return last.product(more)[: len(rows)].view(*x.shape[:-1], -1)
        change = last.clean.change[: padded(len(rows))]
        # In the place of what no other matrix will ask for, lest as much memory go through the caches.
        changed = rows if room is not None and len(self.lasts) == 1 else torch.empty_like(rows)
        each = map(self.chunk.by_span, (rows, changed, change[: len(rows)]))
        for span, given, of_span, halves in zip(self.chunk.spans, *each, strict=True):
            torch.sub(given, last.clean.inputs[span.targets], out=of_span)
            halves.copy_(of_span)
        result = last.clean.outputs.index_select(0, self.chunk.target)
        return result.add_(last.product(change)[: len(rows)]).view(*x.shape[:-1], -1)

    def activated(self, activation: Activation, x: Tensor) -> Tensor:
        """What an activation makes of `x`: in its place, if that is what a first matrix gave."""
        return activation(x.clone(memory_format=torch.contiguous_format) if self._room_of(x) is None else x)

    def _is_normed(self, x: Tensor) -> bool:
        """Whether `x` is what the norm gave, which clean rows alone would not show."""
        normed = self.made.value
        same = x.data_ptr() == normed.data_ptr() or torch.equal(x.flatten(0, -2), normed.flatten(0, -2))
        return same and self.made.is_unmodified()

    def _room_of(self, x: Tensor) -> Tensor | None:
        """What a first matrix fills, if `x` is what it has filled."""
        rooms = [one.result for one in self.firsts if one.result.data_ptr() == x.data_ptr()]
        return rooms[0] if rooms and x.is_contiguous() and x.shape[-1] == rooms[0].shape[-1] else None


def add_sums(rows: Tensor, shares: Tensor, vectors: Tensor) -> None:
    """Add to the rows that `by_span` gives of a span weighted sums over its vectors `(group * vector, features)`."""
    if rows.dim() == 2:
        torch.addmm(rows, shares[:, : len(vectors)], vectors, out=rows)
        return
    of_groups = vectors.view(len(rows), -1, vectors.shape[-1])
    torch.baddbmm(rows, shares[..., : of_groups.shape[1]], of_groups, out=rows)
