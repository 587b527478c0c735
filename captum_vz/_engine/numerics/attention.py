"""Attention as torch documents it: contexts, and weights, which of long texts are computed for wanted rows only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from captum_vz._engine.numerics.tensors import budget_of, for_query_heads, once_a_pass
from captum_vz._engine.numerics.tolerance import same_numbers
from captum_vz.functional import widen


def causal_mask(out: int, sources: int, device: torch.device) -> Tensor:
    """Return the mask that hides what follows a token, bool `(1, 1, out, in)`."""
    return torch.ones(1, 1, out, sources, dtype=torch.bool, device=device).tril()


def all_tokens(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Return the mask of tokens that hides none, bool `(batch, tokens)`."""
    return torch.ones(batch, tokens, dtype=torch.bool, device=device)


@dataclass(frozen=True, eq=False)
class RowWeights:
    """The weights `(batch, head, out, in)` of a long text. Rows are computed when they are asked for."""

    query: Tensor  # (batch, head, out, d_head)
    key: Tensor  # (batch, key-value head, in, d_head)
    mask: Tensor | None  # what is added to the scores, or bool, broadcastable to the weights
    scale: float | None  # by what scores are multiplied. None: by the square root of `1 / d_head`
    causal: bool  # whether no token sees a later one

    @property
    def shape(self) -> torch.Size:
        """Batch, heads, rows and sources."""
        return torch.Size((*self.query.shape[:3], self.key.shape[2]))

    @property
    def dtype(self) -> torch.dtype:
        """That of the queries."""
        return self.query.dtype

    @cached_property
    def at_once(self) -> int:
        """How many rows of all examples fit in one chunk."""
        batch, heads, _, sources = self.shape
        like = self.query if self.query.element_size() >= 4 else self.query.new_empty(0, dtype=torch.float32)
        return budget_of(self.query.device).items_in_chunk(like, max(1, batch * heads * sources))

    @property
    def is_long(self) -> bool:
        """Whether the weights do not fit in one chunk. Gradients need all of them."""
        fits = self.mask is None or torch.broadcast_shapes(self.shape, self.mask.shape) == self.shape
        return fits and self.at_once < self.shape[2] and not torch.is_grad_enabled()

    def kept(self) -> RowWeights:
        """The same, for a layer that writes over its queries or keys later."""
        return replace(self, query=self.query.clone(), key=self.key.clone())

    def parts(self) -> Iterator[Tensor]:
        """All weights, as many rows as fit in one chunk at a time, in at least float32."""
        for start in range(0, self.shape[2], self.at_once):
            yield self.of(slice(start, start + self.at_once))

    def of(self, rows: slice | Tensor, examples: slice = slice(None)) -> Tensor:
        """The weights of these rows, `(batch, head, row, in)`, in at least float32."""
        query, key = self.query[examples][:, :, rows], self.key[examples]
        mask, (out, sources) = self.mask, self.shape[2:]
        if self.causal:
            place = torch.arange(max(out, sources), device=self.query.device)
            mask = (place[:sources] <= place[:out][rows, None])[None, None]
        elif mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask[examples] if len(mask) > 1 else mask
            mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        return _softmax(query, key, None if mask is None else _finite_bias(mask, widen(query).dtype), self.scale)

    def at(self, batch: Tensor, out: Tensor) -> Tensor:
        """The weights at positions `(batch, out)`, `(n, head, in)`."""
        found = self.query.new_empty(len(batch), self.shape[1], self.shape[3])
        for example in batch.unique().tolist():
            for which in (batch == example).nonzero().flatten().split(self.at_once):
                found[which] = self.of(out[which], slice(example, example + 1))[0].transpose(0, 1).to(found)
        return found


Weights: TypeAlias = Tensor | RowWeights


def all_weights(weights: Weights) -> Tensor:
    """The weights as a tensor, `(batch, head, out, in)`."""
    return by_rows(weights, lambda part: part)


def by_rows(weights: Weights, change: Callable[[Tensor], Tensor]) -> Tensor:
    """What `change` makes of weights `(batch, head, out, in)`, `(batch, head, out, ...)`: of a long text by parts."""
    if isinstance(weights, Tensor):
        return change(weights)
    return torch.cat([change(part.to(weights.dtype)) for part in weights.parts()], dim=2)


def weights_at(weights: Weights, batch: Tensor, out: Tensor) -> Tensor:
    """The weights at positions `(batch, out)`, `(n, head, in)`."""
    return weights[batch, :, out] if isinstance(weights, Tensor) else weights.at(batch, out)


def weighted_values(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None, causal: bool, values: Tensor
) -> tuple[Tensor, Weights]:
    """The context `(batch, out, head, d_head)` and the weights `(batch, head, out, in)`, as torch documents them.

    As in torch's own kernels, a row that sees nothing is zero, and half precision is computed in float32. Without
    `mask`, a mask is made where `causal` is True.
    """
    heads, weights = query.shape[1], RowWeights(query, key, mask, scale, causal)
    if weights.is_long:
        shared = for_query_heads(values, heads)
        context = torch.cat([part @ shared.to(part) for part in weights.parts()], dim=2)
        return context.transpose(1, 2).to(values), weights
    if causal:
        mask = once_a_pass(causal_mask, query.shape[2], key.shape[2], query.device)
    bias = None if mask is None else once_a_pass(_finite_bias, mask, widen(query).dtype)
    whole = _softmax(query, key, bias, scale)
    context = whole @ for_query_heads(values.to(whole), heads)
    return context.transpose(1, 2).to(values), whole.to(query.dtype)


def explains(weights: Tensor, values: Tensor, context: Tensor) -> bool:
    """Whether a context `(batch, out, head, d_head)` is the product of weights and values."""
    sums = (weights.to(values.dtype) @ for_query_heads(values, weights.shape[1])).transpose(1, 2)
    return same_numbers(context.flatten(2), sums.flatten(2), torch.finfo(context.dtype).eps ** 0.6)


def weights_by_unit_values(compute: Callable[[Tensor], tuple[Tensor, Weights]], values: Tensor, heads: int) -> Tensor:
    """Weights `(batch, head, out, in)` by contexts of values that are one at one source.

    One call shows as many sources as a value has entries.
    """
    sources, width = values.shape[-2:]
    columns = []
    for start in range(0, sources, width):
        units = torch.eye(sources, dtype=values.dtype, device=values.device)[:, start : start + width]
        context, _ = compute(functional.pad(units, (0, width - units.shape[1])).expand_as(values))
        columns.append(context.unflatten(2, (heads, -1)).flatten(3)[..., : units.shape[1]])
    return torch.cat(columns, dim=-1).transpose(1, 2)


def _softmax(query: Tensor, key: Tensor, bias: tuple[Tensor, Tensor | None] | None, scale: float | None) -> Tensor:
    """Weights in at least float32. For `bias` see `_finite_bias`."""
    query, key = widen(query), widen(for_query_heads(key, query.shape[1]))
    # In place, because these are the largest tensors of a long text.
    scores = (query @ key.transpose(-2, -1)).mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is None:
        return scores.softmax(-1)
    added, nothing = bias
    fits = torch.broadcast_shapes(scores.shape, added.shape) == scores.shape
    same = fits and torch.result_type(scores, added) == scores.dtype
    weights = (scores.add_(added) if same else scores + added).softmax(-1)
    return weights if nothing is None else weights.masked_fill(nothing, 0)


def _finite_bias(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """What a mask adds to the scores, and which rows see nothing. None: each row sees something."""
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    nothing = (bias == -torch.inf).all(-1, keepdim=True)
    # Such a row is made finite: the softmax of nothing but -inf is NaN, and so is its gradient.
    return (bias.masked_fill(nothing, 0), nothing) if nothing.any() else (bias, None)
