"""TODO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from captum_vz._engine.numerics.budget import budget_of
from captum_vz.functional import contributions, frozen_norm, head_vectors

if TYPE_CHECKING:
    from captum_vz._engine.decomposition.attention_block import AttentionBlock, FrozenNorm

# How far a layer is followed: its attention, plus its residual connection, plus the norm after that, plus the last one.
INCLUDES = ("attention", "residual", "layer_norm", "encoder")


@dataclass(frozen=True)
class Decomposition:
    """A few examples of a layer: V_ij = sum over k of weights_ijk * vectors_jk, nothing from or to padding.

    The residual connection is one more head, which sees each token itself with weight one.

    Attributes:
        weights: `(batch, row, in, part)`.
        vectors: `(batch, in, part, d)`.
        whole: What the vectors of a row and all biases add up to, `(batch, row, d)`.
        rows: The positions of the rows, `(batch, row)`.
        groups: The groups of the sources, `(batch, in)`; None: each is its own.
        group_count: How many groups there are in the whole batch.
        beside: What each row gets from no source token but from the residual connection beside a cross-attention,
            `(batch, row, d)`; None: nothing.
    """

    weights: Tensor
    vectors: Tensor
    whole: Tensor
    rows: Tensor
    groups: Tensor | None
    group_count: int
    beside: Tensor | None = None

    def written_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The vectors `(batch, row, group, d)`, added up over each group, and their whole; a few rows at a time.

        What is `beside` the sources stands behind them, as if it were one more.
        """
        batch, rows, sources, _ = self.weights.shape
        step = budget_of(self.vectors.device).items_in_chunk(self.vectors, batch * sources * self.vectors.shape[-1])
        for start in range(0, rows, step):
            few = slice(start, start + step)
            weights, whole = self.weights[:, few], self.whole[:, few]
            vectors = contributions(weights, self.vectors)
            if self.groups is not None:
                pooled = vectors.new_zeros(*vectors.shape[:2], self.group_count, vectors.shape[3])
                vectors = pooled.scatter_add(2, self.groups[:, None, :, None].expand_as(vectors), vectors)
            if self.beside is not None:
                vectors = torch.cat([vectors, self.beside[:, few, None]], dim=2)
            yield vectors, whole


def decompositions(
    parts: AttentionBlock, include: str | None, rows: Tensor | None, groups: Tensor | None
) -> Iterator[Decomposition]:
    """The decompositions of a layer followed as far as `include` says, a few consecutive examples at a time.

    With include None it is followed to where the residual is added, and through the norm after that if there is one.
    Beside a cross-attention, the residual connection is no source token.
    `rows` `(batch, row)` are the positions wanted, None: all; `groups` `(batch, in)` are counted from 0.
    """
    residual, norms, whole = _follow(parts, include)
    beside = None
    if residual is not None and parts.second:
        beside, residual = _normed(residual, norms).masked_fill(~parts.rows[..., None], 0), None
    weights = _weights(parts, residual is not None, norms)
    if rows is None:
        rows = torch.arange(weights.shape[1], device=weights.device).expand(weights.shape[:2])
    weights = weights.gather(1, rows[..., None, None].expand(-1, -1, *weights.shape[2:]))
    wide = rows[..., None].expand(-1, -1, whole.shape[2])
    whole = whole.masked_fill(~parts.rows[..., None], 0).gather(1, wide)
    beside = None if beside is None else beside.gather(1, wide)
    count = weights.shape[2] if groups is None else int(groups.max()) + 1
    values = parts.attention.values
    width = weights.shape[3] * parts.matrix.shape[1]
    for few in torch.arange(len(weights)).split(budget_of(values.device).items_in_chunk(values, values.shape[2] * width)):
        of = slice(int(few[0]), int(few[-1]) + 1)
        vectors = head_vectors(values[of], parts.matrix)
        if residual is not None:
            vectors = torch.cat([vectors, residual[of, :, None]], dim=2)
        for norm in norms:
            vectors = frozen_norm(vectors, norm.norm.gamma, norm.norm.centred)
        vectors = vectors.masked_fill(~parts.sources[of, :, None, None], 0)
        group, own = (None if one is None else one[of] for one in (groups, beside))
        yield Decomposition(weights[of], vectors, whole[of], rows[of], group, count, own)


def _follow(parts: AttentionBlock, include: str | None) -> tuple[Tensor | None, list[FrozenNorm], Tensor]:
    """The residual that is added, the norms that are applied, and what comes out, biases and all."""
    if include == "attention":
        return None, [], parts.projected
    tokens, sources = parts.attention.shape[2:]
    assert tokens == sources or parts.second, (
        f"The attention of {parts.name} has {sources} sources for {tokens} tokens, so that the residual connection "
        "belongs to none of them: include='attention' needs none."
    )
    residual = parts.residual()
    total = residual + parts.projected
    after = None if include == "residual" else parts.norm_after()
    if after is None:
        assert include in (None, "residual"), (
            f"The layer {parts.name} norms what its attention is given and not what comes of it (pre-norm), so that "
            f"include={include!r} is not defined for it: pass 'residual' or 'attention'."
        )
        return residual, [], total
    norm, normed = after
    if include != "encoder":
        return residual, [norm], normed
    return residual, [norm, parts.norm_at_end(normed)], parts.output


def _normed(vectors: Tensor, norms: list[FrozenNorm]) -> Tensor:
    """What the norms make of vectors `(batch, out, d)`, one a row."""
    for norm in norms:
        vectors = frozen_norm(vectors, norm.norm.gamma, norm.norm.centred) * norm.scale
    return vectors


def _weights(parts: AttentionBlock, residual: bool, norms: list[FrozenNorm]) -> Tensor:
    """`(batch, out, in, part)`: those of the heads and of the residual connection, over the norms' deviations."""
    assert parts.attention.weights is not None  # the parts saw to it
    weights = parts.attention.weights.to(parts.attention.values.dtype).permute(0, 2, 3, 1)
    if residual:
        itself = torch.eye(weights.shape[1], dtype=weights.dtype, device=weights.device)
        weights = torch.cat([weights, itself.expand(len(weights), -1, -1)[..., None]], dim=3)
    for norm in norms:
        weights = weights * norm.scale[..., None]
    there = parts.rows[:, :, None] & parts.sources[:, None, :]
    return weights.masked_fill(~there[..., None], 0)
