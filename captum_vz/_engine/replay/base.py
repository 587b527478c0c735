"""What a replay is given and what it gives: the pairs of a target and a group of sources that is zeroed for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from captum_vz._engine.numerics.budget import budget_of
from captum_vz._engine.numerics.tensors import for_query_heads, gather_rows
from captum_vz.functional.interventions import Intervention, ZeroValue

if TYPE_CHECKING:
    from captum_vz._engine.replay.trust import LayerTrust
    from captum_vz._engine.structure.site import AttentionSite


ZERO = ZeroValue()


@dataclass(frozen=True)
class TargetRows:
    """Wanted rows without padding: their examples `batch`, rows of the map `row` and positions `out`, `(target,)`."""

    batch: Tensor
    row: Tensor
    out: Tensor

    def __len__(self) -> int:
        return len(self.batch)


@dataclass(frozen=True, eq=False)
class ReplayProblem:
    """All that a replay is given: which values are zeroed, and for which target positions.

    Attributes:
        trust: What need not be checked of the layer.
        rows: The target positions of each example, `(batch, row)`. None: all.
        groups: The group of each source, `(batch, in)`, counted from 0. None: each source is its own group.
        max_groups: How many groups may be zeroed at a time, Captum's `perturbations_per_eval`. None: as many as fit.
        intervention: What replaces the values.
        bfloat16_changes: Whether changes may be multiplied in bfloat16.
        heads: Which query heads are zeroed, bool `(head,)`.
        members: The sources of each group, `(batch, group, member)`, -1 where a group has fewer members.
        output: The layer's clean output, `(batch, out, d)`.
        chunk_rows: How many positions fit in one chunk.
    """

    site: AttentionSite
    trust: LayerTrust
    rows: Tensor | None
    groups: Tensor | None
    max_groups: int | None
    intervention: Intervention
    bfloat16_changes: bool
    targets: TargetRows
    heads: Tensor
    members: Tensor
    output: Tensor
    chunk_rows: int

    @classmethod
    def of(
        cls,
        site: AttentionSite,
        trust: LayerTrust,
        rows: Tensor | None = None,
        groups: Tensor | None = None,
        heads: tuple[int, ...] | None = None,
        max_groups: int | None = None,
        intervention: Intervention = ZERO,
        bfloat16_changes: bool = False,
    ) -> ReplayProblem:
        """The problem of one map. `heads` are the query heads to zero. None: all."""
        targets, output = _wanted_targets(site, rows), site.output
        asked = rows, groups, max_groups, intervention, bfloat16_changes
        members, zeroed = _group_members(site, groups), zeroed_heads(site, heads)
        return cls(site, trust, *asked, targets, zeroed, members, output, _chunk_rows(site, output))

    @cached_property
    def weights(self) -> Tensor:
        """The weights that are zeroed, `(target, in, head)`, see `zeroed_weights`."""
        return zeroed_weights(self.site, self.heads, self.targets.batch, self.targets.out)

    @cached_property
    def active(self) -> Tensor:
        """The pairs that can change, bool `(target, group)`."""
        seen = self.reached(self.targets.batch, self.targets.out)  # (target, in)
        if self.groups is None:
            return seen
        members = self.members[self.targets.batch]  # (target, group, member)
        seen = seen[:, None, :].expand(-1, members.shape[1], -1)
        return (seen.gather(2, members.clamp_min(0)) & (members >= 0)).any(-1)

    def reached(self, batch: Tensor, out: Tensor) -> Tensor:
        """Which sources may change the positions `(batch, out)`, bool `(n, in)`."""
        site = self.site
        if site.attention.weights is None or not self.intervention.needs_weight:  # any source may
            return site.source_mask[batch]
        if isinstance(self.intervention, ZeroValue):
            own = batch is self.targets.batch and out is self.targets.out
            return (self.weights if own else zeroed_weights(site, self.heads, batch, out)).ne(0).any(-1)
        weights = site.attention.weights[batch, :, out] * self.heads[:, None]
        return weights.ne(0).any(1) & site.source_mask[batch]

    @cached_property
    def clean(self) -> Tensor:
        """The clean output of each target, `(target, d)`."""
        return gather_rows(self.output, self.targets.batch, self.targets.out)

    def empty_map(self) -> Tensor:
        """A map of zeros, `(batch, row, group)`, in at least float32."""
        shape, rows = self.site.shape, self.rows
        values = self.site.attention.values
        dtype = torch.promote_types(values.dtype, torch.float32)
        count = shape.out if rows is None else rows.shape[1]
        return torch.zeros(shape.batch, count, self.members.shape[1], dtype=dtype, device=values.device)


class ReplayChunk(NamedTuple):
    """Outputs of some pairs.

    Attributes:
        target: The target of each pair, `(n,)`.
        group: The group that is zeroed for it, `(n,)`.
        output: The target's output then, `(n, d)`.
        clean: Clean outputs, `(m, d)`. The same tensor may come with many chunks.
        clean_row: The row of `clean` that each pair is compared with, `(n,)`.
    """

    target: Tensor
    group: Tensor
    output: Tensor
    clean: Tensor
    clean_row: Tensor


class Replay(Protocol):
    """A way to run a recorded layer again with values of one attention zeroed.

    A replay runs the layer's own code. Before its last chunk it shows that the clean output is reproduced, on each
    target. It shows that what runs side by side is independent, unless `problem.trust` says so. Its numbers are
    the same for any `max_groups` and any `chunk_rows`. No tensor of the layer outlives it.
    """

    name: str

    def fits(self, problem: ReplayProblem) -> bool:
        """Whether this replay is for such a layer, and pays. If False, the driver skips it and reports nothing."""

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        """Outputs with values zeroed, some pairs at a time, in any order.

        Each pair that `problem.active` marks comes once, unless its target cannot depend on the group. Other pairs come
        only from layers that mix positions after the attention, where they count too. A chunk is used before the next
        one is asked for. CannotReplayError: this replay does not hold for the layer. All its chunks are forgotten.
        """


def zeroed_weights(site: AttentionSite, heads: Tensor, batch: Tensor, out: Tensor) -> Tensor:
    """The weights that are zeroed at positions `(batch, out)`, `(n, in, head)`.

    They are 0 for other heads, for padding, and for values that are zero already. Inline, bool `(n, in, 1)`: which
    sources are no padding.
    """
    attention = site.attention
    if attention.weights is None:  # inline: any source may have weight
        return site.source_mask[batch, :, None]
    weights = attention.weights[batch, :, out] * site.source_mask[batch, None]
    if not heads.all():
        weights = weights * heads[:, None]
    # Values that are zero already are left out, so that rounding cannot give them a score. The largest entry shows
    # them in a quarter of the time that any() takes.
    moves = for_query_heads(attention.values.abs().amax(-1).ne(0), weights.shape[1])
    return (weights * moves[batch]).transpose(1, 2).contiguous()


def pairs_at_a_time(active: Tensor, rows: int, max_groups: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The active pairs `(target, group)`, at most `rows` pairs of at most `max_groups` groups at a time."""
    start = 0
    for groups in active.split(max_groups or active.shape[1], dim=1):
        target, group = groups.nonzero(as_tuple=True)
        if len(target):
            yield from zip(target.split(rows), (group + start).split(rows), strict=True)
        start += groups.shape[1]


def fill_neighbours(active: Tensor, members: Tensor, count: int) -> Tensor:
    """`active`, extended to all groups of a block of `count` neighbours if one of them is active.

    Groups without members stay inactive.
    """
    if count == 1:
        return active
    blocks = functional.pad(active, (0, -active.shape[1] % count)).unflatten(1, (-1, count))
    return blocks.any(-1).repeat_interleave(count, -1)[:, : active.shape[1]] & (members >= 0).any(-1)


def _wanted_targets(site: AttentionSite, wanted: Tensor | None) -> TargetRows:
    rows = site.target_mask
    if wanted is None:
        wanted = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    batch, row = rows.gather(1, wanted).nonzero(as_tuple=True)
    return TargetRows(batch, row, wanted[batch, row])


def zeroed_heads(site: AttentionSite, heads: tuple[int, ...] | None) -> Tensor:
    """Which query heads are zeroed, bool `(head,)`. `heads` None: all."""
    zeroed = torch.ones(site.shape.heads, dtype=torch.bool, device=site.attention.values.device)
    if heads is None:
        return zeroed
    return torch.zeros_like(zeroed).index_fill(0, torch.tensor(heads, device=zeroed.device), True)


def _group_members(site: AttentionSite, groups: Tensor | None) -> Tensor:
    device = site.attention.values.device
    if groups is None:
        return torch.arange(site.shape.sources, device=device).expand(site.shape.batch, -1)[..., None]
    count = int(groups.max()) + 1
    belongs = groups[:, None, :] == torch.arange(count, device=device)[:, None]  # (batch, group, in)
    order = belongs.int().argsort(dim=-1, descending=True, stable=True)
    size = int(belongs.sum(-1).max())
    return torch.where(belongs.gather(-1, order), order, -1)[..., :size]


def _chunk_rows(site: AttentionSite, output: Tensor) -> int:
    """How many positions one chunk holds, by its widest activation."""
    shapes = [parameter.shape[-2:] for parameter in site.layer.parameters if parameter.dim() > 1]
    width = max([output.shape[-1], *(size for shape in shapes for size in shape)])
    return budget_of(output.device).items_in_chunk(output, width)
