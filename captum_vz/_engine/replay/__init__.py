"""Ways to run a layer with values zeroed, one file each. The room `folded` can be deleted whole.

Here: what a replay is given, and what it gives: the pairs of a target and a group of sources that is zeroed for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from captum_vz._engine.numerics import budget_of, for_query_heads, once_a_pass, weights_at
from captum_vz._engine.numerics.tolerance import CannotReplayError, Readings
from captum_vz._engine.structure.modules import each_module_runs_once, is_library_code
from captum_vz.functional.interventions import Intervention, ZeroValue

if TYPE_CHECKING:
    from captum_vz._engine.structure import AttentionSite


ZERO = ZeroValue()
# One unused row or more follow all others, up to a multiple of this number. The last rows of another number may be
# rounded in another way than the rest (by MKL if it is no multiple of 4). Unchanged rows would then seem to change.
BLOCK = 8


class PackedChunk(NamedTuple):
    """Pairs that run together, and other rows of the same run. Layers with one mask share it."""

    target: Tensor  # the target of each pair, `(n,)`
    group: Tensor  # the group that is zeroed for it, `(n,)`
    position: tuple[Tensor, Tensor]  # the example and the position of its target, two tensors `(n,)`
    # The sources of the groups, a tensor `(n,)` for each member, and which are there, `(n, 1)`. None: all.
    sources: list[tuple[Tensor, Tensor | None]]
    alone: Tensor | None  # The pairs whose target sees nothing but the group, `(n, 1)`. None: there are none.
    clean_row: Tensor  # the place of each pair's target among the unchanged ones, `(n,)`
    rows: Tensor  # the target of each row of the run, `(row,)`
    signs: Tensor  # by what the context of each row is multiplied, `(row, 1)`
    batch: Tensor  # the example of each row
    out: Tensor  # the position of each row
    checked: Tensor  # the rows that run unchanged: one before the pairs, and the target of each pair after them
    unchanged: Tensor  # the targets of these rows


@dataclass(frozen=True, eq=False)
class Targets:
    """Wanted rows without padding, `(target,)`, and the groups that may be zeroed for them, by masks and sizes alone.

    Layers with one mask share it.
    """

    batch: Tensor  # the example of each target
    row: Tensor  # its row of the map
    out: Tensor  # its position
    place: Tensor  # its position, counted through the batch
    everything: bool  # whether they are all positions of all examples, in order
    members: Tensor  # the sources of each group, `(batch, group, member)`, -1 where a group has fewer members
    grouped: bool  # whether a group may have several sources
    source_mask: Tensor  # which sources are no padding, `(batch, in)`
    visible: Tensor | None  # the sources that the mask lets through. None: all
    causal: bool  # whether no target sees a later source

    def __len__(self) -> int:
        return len(self.batch)

    def of(self, x: Tensor) -> Tensor:
        """The entries of `x (batch, out, ...)` at the targets, `(target, ...)`."""
        return x.flatten(0, 1) if self.everything else x.flatten(0, 1).index_select(0, self.place)

    def any_member(self, seen: Tensor) -> Tensor:
        """Whether any member of a group is seen, `(target, group)`, for `seen (target, in)`."""
        if not self.grouped:
            return seen
        members = self.members[self.batch]
        seen = seen[:, None, :].expand(-1, members.shape[1], -1)
        return (seen.gather(2, members.clamp_min(0)) & (members >= 0)).any(-1)

    @cached_property
    def possible(self) -> Tensor:
        """The pairs that may be active by the masks alone, bool `(target, group)`."""
        return self.any_member(self._seen & self.source_mask[self.batch])

    @cached_property
    def count(self) -> int:
        """How many pairs these are."""
        return int(self.possible.sum())

    @cached_property
    def _seen(self) -> Tensor:
        """The sources that the masks let a target see, `(target, in)`."""
        if self.causal:
            return torch.arange(self.source_mask.shape[1], device=self.out.device) <= self.out[:, None]
        if self.visible is None:
            return self.source_mask[self.batch]
        # A head that sees nothing may have a weight on each source, padding too: the softmax of equal numbers.
        seen = (self.visible | ~self.visible.any(-1, keepdim=True)).any(1)
        seen = seen.expand(len(self.source_mask), -1, self.source_mask.shape[1])
        return seen[self.batch, self.out if seen.shape[1] > 1 else torch.zeros_like(self.out)]

    @cached_property
    def _alone(self) -> Tensor:
        """The targets that see nothing but one group, bool `(target,)`."""
        seen = self._seen
        return (self.possible.sum(-1) == 1) & ((seen & self.source_mask[self.batch]).sum(-1) == seen.sum(-1))

    def chunk(self, target: Tensor, group: Tensor, unchanged: Tensor | None = None) -> PackedChunk:
        """The chunk of the pairs `(target, group)`. Their targets run unchanged too, or else those that are given.

        A layer that mixes positions reproduces its output on the sequence that it knows. So unchanged targets run
        before and after the pairs, together with other contexts. Where positions compete, only this shows it.
        """
        clean_row, batch = target, self.batch[target]
        if unchanged is None:
            unchanged, clean_row = target.unique(return_inverse=True)
        unused = BLOCK - (len(target) + len(unchanged) + 2) % BLOCK
        first, last = unchanged[:1], unchanged[-1:]
        rows = torch.cat([first, target, last, unchanged, last.expand(unused)])  # by example
        signs = self.possible.new_ones(len(rows), 1, dtype=torch.float32)
        signs[len(target) + 1], signs[len(rows) - unused :] = -1, -1
        after = torch.arange(len(unchanged), device=rows.device) + len(target) + 2
        sources = []
        for source in self.members[batch, group].unbind(-1):
            there = (source >= 0) & self.source_mask[batch, source.clamp_min(0)]
            sources.append((source.clamp_min(0), None if there.all() else there[:, None]))
        alone = self._alone[target, None]
        return PackedChunk(
            target,
            group,
            (batch, self.out[target]),
            sources,
            alone if alone.any() else None,
            clean_row,
            rows,
            signs,
            self.batch[rows],
            self.out[rows],
            torch.cat([after[:1] * 0, after]),
            torch.cat([first, unchanged]),
        )

    def chunks(self, rows: int, max_groups: int | None) -> Iterator[PackedChunk]:
        """All possible pairs, at most `rows` pairs of at most `max_groups` groups at a time."""
        start = 0
        for groups in self.possible.split(max_groups or self.possible.shape[1], dim=1):
            target, group = groups.nonzero(as_tuple=True)
            if len(target):
                yield from map(self.chunk, target.split(rows), (group + start).split(rows))
            start += groups.shape[1]

    @cached_property
    def only_chunk(self) -> PackedChunk:
        """All possible pairs."""
        return self.chunk(*self.possible.nonzero(as_tuple=True))


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked of a layer: which values are zeroed, and for which target positions."""

    rows: Tensor | None = None  # The target positions of each example, `(batch, row)`. None: all.
    # The group of each source, `(batch, in)`, counted from 0. None: each source is its own group.
    groups: Tensor | None = None
    # How many groups may be zeroed at a time, Captum's `perturbations_per_eval`. None: as many as fit.
    max_groups: int | None = None
    heads: tuple[int, ...] | None = None  # the query heads to zero. None: all
    intervention: Intervention = ZERO  # what replaces the values
    # Begins a progress bar like tqdm's, in a layer whose pairs are more than a chunk.
    steps: Callable[[int], Any] | None = None


@dataclass(frozen=True, eq=False)
class ReplayProblem:
    """All that a replay is given: what is asked, and the layer."""

    site: AttentionSite
    asked: Request
    intervention: Intervention  # in this run of the layer
    targets: Targets
    heads: Tensor  # which query heads are zeroed, bool `(head,)`
    output: Tensor  # the layer's clean output, `(batch, out, d)`
    chunk_rows: int  # how many positions fit in one chunk
    library: bool  # whether all code of the layer is torch's and transformers', so that it need not be checked
    independent: bool  # whether, moreover, no module of the layer lets positions compete
    # What the checks of a replay wait for. The driver reads it before it uses the map.
    readings: Readings = field(default_factory=Readings)

    @classmethod
    def of(cls, site: AttentionSite, asked: Request) -> ReplayProblem:
        """The problem of one map."""
        attention, output = site.attention, site.output
        intervention = asked.intervention.in_run(site.layer.index, site.layer.number)
        seen = (attention.visible, attention.causal) if intervention.needs_weight else (None, False)
        targets = once_a_pass(_targets, site.target_mask, asked.rows, site.source_mask, asked.groups, *seen)
        zeroed = once_a_pass(zeroed_heads, site.shape.heads, asked.heads, site.attention.values.device)
        chunk_rows, library = site.layer.rows_in_chunk(output), is_library_code(site.layer)
        independent = library and each_module_runs_once(site.layer)
        return cls(site, asked, intervention, targets, zeroed, output, chunk_rows, library, independent)

    @cached_property
    def weights(self) -> Tensor:
        """The weights that are zeroed, `(target, in, head)`, see `_zeroed_weights`."""
        return self._zeroed_weights(self.targets.batch, self.targets.out)

    @cached_property
    def clean_weights(self) -> Tensor:
        """The model's weights at the targets, `(target, head, in)`."""
        weights = self.site.attention.weights
        assert weights is not None  # narrows the type, as below
        return weights_at(weights, self.targets.batch, self.targets.out)

    @cached_property
    def active(self) -> Tensor:
        """The pairs that can change, bool `(target, group)`."""
        return self.targets.any_member(self.reached(self.targets.batch, self.targets.out))

    @cached_property
    def group_of(self) -> Tensor:
        """The group of each source, `(batch, in)`."""
        mask = self.site.source_mask
        each = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        return each if self.asked.groups is None else self.asked.groups

    def reached(self, batch: Tensor, out: Tensor) -> Tensor:
        """Which sources may change the positions `(batch, out)`, bool `(n, in)`."""
        if self.site.attention.weights is None or not self.intervention.needs_weight:  # any source may
            return self.site.source_mask[batch]
        return (self.weights if out is self.targets.out else self._zeroed_weights(batch, out)).ne(0).any(-1)

    def _zeroed_weights(self, batch: Tensor, out: Tensor) -> Tensor:
        """The weights that are zeroed at positions `(batch, out)`, `(n, in, head)`.

        They are 0 for other heads, for padding, and for values that are zero already.
        """
        attention = self.site.attention
        assert attention.weights is not None  # narrows the type: who asks for them has seen that they can be read
        weights = weights_at(attention.weights, batch, out) * self.site.source_mask[batch, None] * self.heads[:, None]
        if isinstance(self.intervention, ZeroValue):
            # Values that are zero already are left out, so that rounding cannot give them a score. The largest entry
            # shows them in a quarter of the time that any() takes.
            moves = for_query_heads(attention.values.abs().amax(-1).ne(0), weights.shape[1])
            weights = weights * moves[batch]
        return weights.transpose(1, 2).contiguous()

    @cached_property
    def clean(self) -> Tensor:
        """The clean output of each target, `(target, d)`."""
        return self.targets.of(self.output)

    @cached_property
    def is_long(self) -> bool:
        """Whether the products of all pairs may take the device longer than the calls of the folded replay."""
        rows = len(self.targets) * (self.targets.members.shape[1] + 1)  # counted without waiting for a device
        numbers = sum(x.numel() for x in self.site.layer.parameters if x.dim() == 2)
        return rows * numbers > budget_of(self.output.device).folding_calls / 2

    @property
    def rows(self) -> int:
        """How many rows of each example the map has."""
        return self.site.shape.out if self.asked.rows is None else self.asked.rows.shape[1]

    def place(self, chunk: ReplayChunk) -> Tensor:
        """Where the pairs of a chunk stand in the map, counted through it, `(n,)`."""
        given = self.targets, self.rows, self.targets.members.shape[1], chunk.target, chunk.group
        return once_a_pass(_places, *given) if chunk.shared else _places(*given)

    def empty_map(self) -> Tensor:
        """A map of zeros, `(batch, row, group)`, in at least float32."""
        values, (batch, groups, _) = self.site.attention.values, self.targets.members.shape
        dtype = torch.promote_types(values.dtype, torch.float32)
        return torch.zeros(batch, self.rows, groups, dtype=dtype, device=values.device)


class ReplayChunk(NamedTuple):
    """Outputs of some pairs."""

    target: Tensor  # the target of each pair, `(n,)`
    group: Tensor  # the group that is zeroed for it, `(n,)`
    output: Tensor  # the target's output then, `(n, d)`
    clean: Tensor  # Clean outputs, `(m, d)`. The same tensor may come with many chunks.
    clean_row: Tensor  # the row of `clean` that each pair is compared with, `(n,)`
    unchanged: Tensor | None = None  # Which pairs change nothing, and so get 0, `(n,)`. None: it is unknown.
    shared: bool = False  # whether other layers have the same pairs, in the same tensors


class Replay(Protocol):
    """A way to run a recorded layer again with values of one attention zeroed.

    A replay runs the layer's own code. It shows that the clean output is reproduced, on each target: what it adds to
    `problem.readings` is checked before the map is used. It shows that what runs side by side is independent, unless
    `problem.independent` says so. Its numbers are the same for any `max_groups` and any `chunk_rows`. No tensor of the
    layer outlives it. A replay with an attribute `only_long` that is True is for problems that are long.
    """

    name: str

    def fits(self, problem: ReplayProblem) -> bool:
        """Whether this replay is for such a layer, and pays. If False, the driver skips it and reports nothing."""

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        """Outputs with values zeroed, some pairs at a time, in any order.

        Each pair that `problem.active` marks comes, unless its target cannot depend on the group. If it comes again,
        the later output counts. Other pairs are marked `unchanged`, or come from layers that mix positions after the
        attention, where they count too. A chunk is used before the next one is asked for. CannotReplayError: this
        replay does not hold for the layer. All its chunks are forgotten.
        """


def run_with_noise(run: Callable[[], Tensor], strength: float) -> Tensor | None:
    """The output of a run with noise of this strength. None: the layer refuses NaN, so the run shows nothing."""
    try:
        return run()
    except CannotReplayError:
        if math.isnan(strength):
            return None
        raise


def _places(targets: Targets, rows: int, groups: int, target: Tensor, group: Tensor) -> Tensor:
    """The places of the pairs `(target, group)` in a map `(batch, rows, groups)`, counted through it."""
    return ((targets.batch * rows + targets.row) * groups)[target] + group


def _targets(
    rows: Tensor, wanted: Tensor | None, mask: Tensor, groups: Tensor | None, visible: Tensor | None, causal: bool
) -> Targets:
    members = once_a_pass(_group_members, mask, groups)
    return Targets(*once_a_pass(_wanted_rows, rows, wanted), members, groups is not None, mask, visible, causal)


def _wanted_rows(rows: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    everything = wanted is None and bool(rows.all())
    if wanted is None:
        wanted = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    batch, row = rows.gather(1, wanted).nonzero(as_tuple=True)
    out = wanted[batch, row]
    return batch, row, out, batch * rows.shape[1] + out, everything


def zeroed_heads(count: int, chosen: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """Which of the query heads are zeroed, bool `(head,)`. `chosen` None: all."""
    if chosen is None:
        return torch.ones(count, dtype=torch.bool, device=device)
    return torch.tensor([number in chosen for number in range(count)], device=device)


def _group_members(source_mask: Tensor, groups: Tensor | None) -> Tensor:
    device = source_mask.device
    if groups is None:
        return torch.arange(source_mask.shape[1], device=device).expand(len(source_mask), -1)[..., None]
    count = int(groups.max()) + 1
    belongs = groups[:, None, :] == torch.arange(count, device=device)[:, None]  # (batch, group, in)
    order = belongs.int().argsort(dim=-1, descending=True, stable=True)
    size = int(belongs.sum(-1).max())
    return torch.where(belongs.gather(-1, order), order, -1)[..., :size]
