"""A layer's output at each token as a sum of one vector for each source token, whose norms are the scores."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from captum_vz._engine.numerics import budget_of, for_query_heads, once_a_pass
from captum_vz.errors import UnsupportedLayerError
from captum_vz.functional import contributions, head_vectors
from captum_vz.functional.contributions import length_of_vectors

if TYPE_CHECKING:
    from captum_vz._engine.structure.attention_block import AttentionBlock, FrozenNorm

# The vectors of a long text are read several times. So they are computed in blocks that stay in the cache: of so many
# rows, and so many of them in one chunk.
ROWS, BLOCKS = 16, 24
# What the decomposition includes: the attention, the sum with the residual, the norm after it, the norm at the end.
INCLUDES = ("attention", "residual", "layer_norm", "encoder")


@dataclass(frozen=True)
class Decomposition:
    """A few examples of a layer, with `V_ij = sum_k weights_ijk * vectors_jk` as the vector of source j in row i.

    The sum runs over parts: the heads, and the residual connection as one more head, which sees each token itself with
    weight one. Vectors from and to padding are zero.
    """

    weights: Tensor  # `(batch, row, in, part)`
    vectors: Tensor  # `(batch, in, part, d)`
    whole: Tensor  # the sum of a row's vectors and of all biases, `(batch, row, d)`
    rows: Tensor | None  # The positions of the rows, `(batch, row)`. None: all.
    groups: Tensor | None  # The group of each source, `(batch, in)`. None: each source is its own group.
    group_count: int  # how many groups the whole batch has
    # The residual of a cross-attention, which belongs to no source token, `(batch, row, d)`.
    residual: Tensor | None = None

    def written_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The vectors `(batch, row, group, d)`, summed over each group, and their whole, a few rows at a time.

        The `residual` comes last, as one more group.
        """
        batch, rows, sources, _ = self.weights.shape
        step = budget_of(self.vectors.device).items_in_chunk(self.vectors, batch * sources * self.vectors.shape[-1])
        for start in range(0, rows, step):
            few = slice(start, start + step)
            weights, whole = (self.weights, self.whole) if step >= rows else (self.weights[:, few], self.whole[:, few])
            vectors = contributions(weights, self.vectors)
            if self.groups is not None:
                pooled = vectors.new_zeros(*vectors.shape[:2], self.group_count, vectors.shape[3])
                vectors = pooled.scatter_add(2, self.groups[:, None, :, None].expand_as(vectors), vectors)
            if self.residual is not None:
                vectors = torch.cat([vectors, self.residual[:, few, None]], dim=2)
            yield vectors, whole

    def lengths_without(self, p: Literal[1, 2]) -> Tensor:
        """The norm of order p of `whole` without each vector, `(batch, row, group)`."""
        batch, rows, sources, _ = self.weights.shape
        width, budget = self.vectors.shape[-1], budget_of(self.vectors.device)
        is_short = budget.items_in_chunk(self.vectors, batch * sources * width) >= rows
        if is_short or self.groups is not None or self.residual is not None:
            each = [length_of_vectors(whole.unsqueeze(2) - vectors, p) for vectors, whole in self.written_out()]
            return each[0] if len(each) == 1 else torch.cat(each, dim=1)
        # Rows before the first that sees a source have no weight: half of all pairs in a causal model.
        found = length_of_vectors(self.whole.unsqueeze(1), p).repeat(1, sources, 1)  # (batch, source, row)
        first = (self.weights.amax((0, 3)).ne(0) | self.weights.amin((0, 3)).ne(0)).int().argmax(0).tolist()
        step = max(1, budget.items_in_chunk(self.vectors, BLOCKS * ROWS * width))
        memory = self.vectors.new_empty(step * ROWS * width)  # new memory for each block takes as long as its numbers
        for start, example in product(range(0, sources, step), range(batch)):
            some = slice(start, start + step)
            seen, vectors, lengths = slice(min(first[some]), None), self.vectors[example, some], []
            # A copy of a matrix is transposed in a fraction of the time that other strides take.
            weights = self.weights[example, seen, some].permute(2, 0, 1)  # (part, row, source)
            weights = weights.flatten(0, 1).t().contiguous().unflatten(1, weights.shape[:2]).transpose(1, 2)
            for weight, whole in zip(weights.split(ROWS, 1), self.whole[example, seen].split(ROWS), strict=True):
                left = memory[: weight.shape[0] * weight.shape[1] * width].view(*weight.shape[:2], width)
                torch.bmm(weight, vectors, out=left).sub_(whole)
                lengths.append(left.abs_().sum(-1) if p == 1 else length_of_vectors(left, p))
            found[example, some, seen] = torch.cat(lengths, dim=1)
        return found.mT


def decompositions(
    block: AttentionBlock, include: str | None, rows: Tensor | None, groups: Tensor | None
) -> Iterator[Decomposition]:
    """The decompositions of a layer, a few consecutive examples at a time. `rows` and `groups` are as there.

    `include` is one of `INCLUDES`. None: up to the sum with the residual, and to the norm after it if there is one.
    UnsupportedLayerError: the layer has no such part, or it is not recognised.
    """
    residual, norms, whole = _sum_and_norms(block, include)
    separate, hidden = None, once_a_pass(_padding, block.rows)
    if residual is not None and block.is_second:
        for norm, scale in norms:
            residual = norm.direction(residual) * scale
        separate, residual = _without(residual, hidden), None
    weights = _weights(block, residual is not None, norms)
    whole = _without(whole, hidden)
    if rows is not None:
        weights = weights.gather(1, rows[..., None, None].expand(-1, -1, *weights.shape[2:]))
        wide = rows[..., None].expand(-1, -1, whole.shape[2])
        whole, separate = whole.gather(1, wide), None if separate is None else separate.gather(1, wide)
    count = weights.shape[2] if groups is None else int(groups.max()) + 1
    values = block.attention.values
    at_once = budget_of(values.device).items_in_chunk(
        values, values.shape[2] * weights.shape[3] * block.matrix.shape[1]
    )
    unseen = once_a_pass(_padding, block.sources)
    parts = (weights, values, whole, unseen, residual, rows, groups, separate)
    for weight, value, sums, hidden, own, row, group, other in _split(parts, at_once):
        vectors = head_vectors(value, block.matrix)
        if own is not None:
            vectors = torch.cat([vectors, own[:, :, None]], dim=2)
        for norm, _ in norms:
            vectors = norm.direction(vectors)
        vectors = _without(vectors, None if hidden is None else hidden[..., None])
        yield Decomposition(weight, vectors, sums, row, group, count, other)


def _padding(real: Tensor) -> Tensor | None:
    """Which of the positions `(batch, n)` are padding, `(batch, n, 1)`. None: there is none."""
    return None if real.all() else ~real[..., None]


def _without(x: Tensor, hidden: Tensor | None) -> Tensor:
    return x if hidden is None else x.masked_fill(hidden, 0)


def _split(parts: tuple[Tensor | None, ...], size: int) -> Iterator[tuple[Any, ...]]:
    """A few examples of all tensors at a time. None stays None."""
    batch = len(next(one for one in parts if one is not None))
    if size >= batch:
        return iter([parts])
    counts = -(-batch // size)
    return zip(*([None] * counts if one is None else one.split(size) for one in parts), strict=True)


def projected_vectors(block: AttentionBlock, directions: Tensor, rows: Tensor) -> Tensor:
    """The products of the attention's vectors in `rows (batch, row)` with a direction each, `(batch, row, in)`.

    The vectors themselves are not computed: `directions (batch, row, d)` go back through the output projection.
    """
    heads = block.weights.shape[1]
    values = for_query_heads(block.attention.values, heads)
    back = (directions @ block.matrix.T).unflatten(2, (heads, -1)).transpose(1, 2)
    place = rows[:, None, :, None].expand(-1, heads, -1, values.shape[2])
    sums = (block.weights.to(values.dtype).gather(2, place) * (back @ values.mT)).sum(1)
    hidden, unseen = once_a_pass(_padding, block.rows), once_a_pass(_padding, block.sources)
    sums = _without(sums, None if hidden is None else hidden.gather(1, rows[..., None]))
    return _without(sums, None if unseen is None else unseen.mT)


def _sum_and_norms(block: AttentionBlock, include: str | None) -> tuple[Tensor | None, list[FrozenNorm], Tensor]:
    """The residual that is added, the norms that are applied, and the result with all biases."""
    if include == "attention":
        return None, [], block.projected
    tokens, sources = block.attention.shape[2:]
    if tokens != sources and not block.is_second:
        raise UnsupportedLayerError(
            f"The attention of {block.name} has {sources} sources for {tokens} tokens, so the residual connection "
            "belongs to no source. Pass include='attention', which needs no residual."
        )
    residual = block.residual()
    total = residual + block.projected
    after = None if include == "residual" else block.norm_after()
    if after is None:
        if include not in (None, "residual"):
            raise UnsupportedLayerError(
                f"The layer {block.name} norms the attention's input, not its sum with the residual (pre-norm), so "
                f"include={include!r} is not defined. Pass 'residual' or 'attention'; to ALTI, None."
            )
        return residual, [], total
    norm, normed = after
    if include != "encoder":
        return residual, [norm], normed
    return residual, [norm, block.norm_at_end(normed)], block.output


def _weights(block: AttentionBlock, residual: bool, norms: list[FrozenNorm]) -> Tensor:
    """The weights of the heads, and of the residual connection, times the norms' scales, `(batch, out, in, part)`."""
    weights = block.weights.to(block.attention.values.dtype)
    if residual:
        itself = torch.eye(weights.shape[2], dtype=weights.dtype, device=weights.device)
        weights = torch.cat([weights, itself.expand(len(weights), 1, -1, -1)], dim=1)
    hidden = once_a_pass(_padding, block.rows)  # padding has no vectors
    factors = [scale for _, scale in norms] + ([] if hidden is None else [(~hidden).to(weights)])
    if factors:
        weights = weights * functools.reduce(torch.mul, factors)[:, None]
    return weights.permute(0, 2, 3, 1)
