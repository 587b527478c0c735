"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.budget import budget_of
from captum_vz._engine.numerics.tensors import for_query_heads
from captum_vz._engine.structure.site import valid_positions


@dataclass(frozen=True)
class OutputDistance:
    """A distance in two steps, so that what one output needs by itself is done once.

    Attributes:
        prepare: What is done to outputs `(..., d)` first.
        between: The distance between two that are prepared, `(..., d), (..., d) -> (...)`.
    """

    prepare: Callable[[Tensor], Tensor]
    between: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Ablation:
    """What is zeroed, for whom, and how the change is measured.

    Attributes:
        measure: The distance between a target's outputs with and without the value.
        rows: The target positions of each example `(batch, row)`, or None for all.
        groups: The group of each source `(batch, in)`, counted from 0, or None: each source is its own.
        heads: The query heads to zero, or None for all.
        at_most: How many groups may be zeroed at a time, or None: as many as fit.
        fast: Whether differences may go through the matrices in bfloat16.
    """

    measure: OutputDistance
    rows: Tensor | None = None
    groups: Tensor | None = None
    heads: tuple[int, ...] | None = None
    at_most: int | None = None
    fast: bool = False


@dataclass
class TargetRows:
    """The rows that are wanted and not padding: flat lists, one entry a row."""

    batch: Tensor
    place: Tensor  # where the row stands in the map
    out: Tensor  # the position in the sequence
    sources: Tensor  # of no row, but of all: which sources are not padding, (batch, in)

    def __len__(self) -> int:
        return len(self.batch)


def wanted_targets(recording: LayerRecord, call: AttentionRecord, zeroing: Ablation) -> TargetRows:
    rows, sources = valid_positions(recording, call)
    wanted = zeroing.rows
    if wanted is None:
        wanted = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    batch, place = rows.gather(1, wanted).nonzero(as_tuple=True)
    return TargetRows(batch, place, wanted[batch, place], sources)


def zeroed_heads(call: AttentionRecord, heads: Sequence[int] | None) -> Tensor:
    """Which query heads lose their values, `(head)`: these, or all."""
    zeroed = torch.ones(call.size[1], dtype=torch.bool, device=call.values.device)
    if heads is None:
        return zeroed
    return torch.zeros_like(zeroed).index_fill(0, torch.tensor(heads, device=zeroed.device), True)


def zeroed_weights(call: AttentionRecord, zeroing: Ablation, sources: Tensor, batch: Tensor, out: Tensor) -> Tensor:
    """The weights of the heads to zero at `(batch, out)`, as `(n, in, head)`: 0 for others and for padded sources."""
    if call.weights is None:  # inline: which sources have weight is not known, all may
        return sources[batch, :, None]
    weights = call.weights[batch, :, out] * sources[batch, None]
    if zeroing.heads is not None:
        weights = weights * zeroed_heads(call, zeroing.heads)[:, None]
    # A value that is zero already moves nothing, and is not to move anything by rounding either.
    # By the largest entry, in a quarter of the time that any() takes.
    moves = for_query_heads(call.values.abs().amax(-1).ne(0), weights.shape[1])
    return (weights * moves[batch]).transpose(1, 2).contiguous()


def group_members(call: AttentionRecord, zeroing: Ablation) -> Tensor:
    """The sources of each group, `(batch, group, member)`, -1 where a group has fewer."""
    batch, _, _, sources = call.size
    device = call.values.device
    if zeroing.groups is None:
        return torch.arange(sources, device=device).expand(batch, sources)[..., None]
    count = int(zeroing.groups.max()) + 1
    belongs = zeroing.groups[:, None, :] == torch.arange(count, device=device)[:, None]  # (batch, group, in)
    order = belongs.int().argsort(dim=-1, descending=True, stable=True)
    size = int(belongs.sum(-1).max())
    return torch.where(belongs.gather(-1, order), order, -1)[..., :size]


def active_groups(weights: Tensor, members: Tensor) -> Tensor:
    """Which groups, of `members (target, group, member)`, may change which targets, `(target, group)`."""
    seen = weights.ne(0).any(-1)  # (target, in)
    return (seen[:, None, :].expand(-1, members.shape[1], -1).gather(2, members.clamp_min(0)) & (members >= 0)).any(-1)


def pairs_at_a_time(active: Tensor, rows: int, at_most: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The active pairs `(target, group)`, so many, and of so many groups, at a time."""
    start = 0
    for groups in active.split(at_most or active.shape[1], dim=1):
        target, group = groups.nonzero(as_tuple=True)
        if len(target):
            yield from zip(target.split(rows), (group + start).split(rows), strict=True)
        start += groups.shape[1]


def fill_neighbours(active: Tensor, members: Tensor, count: int) -> Tensor:
    """Which groups are active for a target, or are one of `count` neighbours of which some is; but for empty ones."""
    if count == 1:
        return active
    blocks = functional.pad(active, (0, -active.shape[1] % count)).unflatten(1, (-1, count))
    return blocks.any(-1).repeat_interleave(count, -1)[:, : active.shape[1]] & (members >= 0).any(-1)


def context_change(
    weights: Tensor, values: Tensor, batch: Tensor, members: Tensor, target: Tensor, group: Tensor
) -> Tensor:
    """What each pair's context loses: the sum over the group's members of weight times value, `(n, head * d_head)`."""
    shared_by = weights.shape[-1] // values.shape[2]
    change: Tensor | None = None
    for source in members[target, group].unbind(-1):
        weight = weights[target, source.clamp_min(0)] * (source >= 0)[:, None]
        value = values[batch[target], source.clamp_min(0)]
        lost = (weight.unflatten(-1, (-1, shared_by))[..., None] * value[:, :, None, :]).flatten(1)
        change = lost if change is None else change + lost
    assert change is not None
    return change


def context_without(call: AttentionRecord, heads: Tensor, batch: Tensor, out: Tensor, members: Tensor) -> Tensor:
    """What is left of contexts at `(batch, out)`, summed over all sources but `members (n, member)`.

    As `(n, head * d_head)`; only of `heads (head)` is something taken.
    """
    assert call.weights is not None
    weights = call.weights[batch, :, out]  # (n, head, in)
    lost = torch.zeros(len(batch), weights.shape[-1] + 1, dtype=torch.bool, device=weights.device)
    lost = lost.scatter(1, members % lost.shape[1], True)[:, None, :-1] & heads[:, None]
    weights = weights.masked_fill(lost, 0).to(call.values.dtype)
    contexts = weights.new_empty(*weights.shape[:2], call.values.shape[-1])
    for example in batch.unique().tolist():
        mine = batch == example
        values = for_query_heads(call.values[example], weights.shape[1], dim=0)
        contexts[mine] = (weights[mine].transpose(0, 1) @ values).transpose(0, 1)
    return contexts.flatten(1)


def empty_map(call: AttentionRecord, zeroing: Ablation, members: Tensor) -> Tensor:
    rows = call.size[2] if zeroing.rows is None else zeroing.rows.shape[1]
    dtype = torch.promote_types(call.values.dtype, torch.float32)
    return torch.zeros(call.size[0], rows, members.shape[1], dtype=dtype, device=call.values.device)


def chunk_rows(recording: LayerRecord, output: Tensor) -> int:
    """How many positions one chunk holds, by its widest activation."""
    shapes = [parameter.shape[-2:] for parameter in recording.parameters if parameter.dim() > 1]
    width = max([output.shape[-1], *(size for shape in shapes for size in shape)])
    return budget_of(output.device).items_in_chunk(output, width)
