"""Which pairs the folded replay runs together: chunks of pairs, ordered by the group of sources that is zeroed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from captum_vz._engine.numerics import budget_of, first_tensor, for_query_heads
from captum_vz._engine.replay import ReplayProblem

VECTORS = 1024  # how many (source, head) vectors are folded at a time: enough that the product pays for its call
SAMPLED_TARGETS = 8  # how many clean targets run to read a layer's structure
# Share of the packed replay's products that folding must save: a margin, because sums may take longer than products.
LEAST_SHARE = 0.1
# How many times as many calls a norm of the attention's output takes. Measured: it pays from 34 tokens on at width 768.
NORMED_CALLS = 2


def active_pairs(problem: ReplayProblem) -> Tensor:
    """The active pairs, extended to all groups with members in a block of neighbours if one of them is active."""
    active, count = problem.active, budget_of(problem.output.device).neighbours
    if count > 1:
        blocks = functional.pad(active, (0, -active.shape[1] % count)).unflatten(1, (-1, count))
        held = (problem.targets.members[problem.targets.batch] >= 0).any(-1)
        active = blocks.any(-1).repeat_interleave(count, -1)[:, : active.shape[1]] & held
    return active


def products_saved(problem: ReplayProblem, active: Tensor) -> tuple[float, bool]:
    """How many products of numbers folding saves beyond the least share, and whether it should compose two matrices.

    The packed replay multiplies each pair and each target with the attention's projection and the first matrices.
    Folding multiplies each (source, head) vector, or the pairs of its group if they are fewer, and sums vectors for
    each pair. To compose is to multiply the projection with the first matrices, once: a row for each feature of each
    head. A vector then costs `depth / width` of a row. Targets are projected twice more, and some run, to check them.
    """
    width, depth = problem.output.shape[-1], problem.site.attention.values.shape[-1]  # features of a vector, of a head
    heads, members, targets = int(problem.heads.sum()), problem.targets.members, len(problem.targets)
    last, count = feed_forward(problem)
    firsts = last * count
    counts = torch.zeros(members.shape[:2], dtype=torch.float64, device=members.device)  # pairs of each group
    counts.index_add_(0, problem.targets.batch, active.to(counts))
    vectors = ((members >= 0).sum(-1) * heads * counts.ne(0)).to(counts)
    fewer = torch.minimum(vectors, counts)
    sums = vectors * counts
    numbers = counts.sum(), vectors.sum(), fewer.sum(), sums.sum(), sums[vectors <= counts].sum()
    total, all_vectors, folded, all_sums, folded_sums = torch.stack(numbers).tolist()
    projection = problem.site.shape.heads * depth * width
    saved = (total + targets) * (firsts + projection) - 2 * targets * projection
    saved -= (min(targets, SAMPLED_TARGETS) + 2 + LEAST_SHARE * (total + targets)) * (firsts + last + projection)
    saved -= all_vectors * depth * width + all_sums * width
    composed = firsts * (heads * depth + all_vectors * depth / width + all_sums / width)
    single = firsts * (folded + folded_sums / width)
    return saved - min(composed, single), composed < single


def feed_forward(problem: ReplayProblem) -> tuple[int, int]:
    """The numbers in its last matrix, and how many first matrices it has: all are of one size, and one is last."""
    sizes = [x.numel() for x in problem.site.layer.parameters if x.dim() == 2] or [1]
    last = max(sizes)
    return last, max(1, sizes.count(last) - 1)


def output_goes_into_vectors(problem: ReplayProblem) -> bool:
    """Whether a module without a matrix, which is a norm or a layer scale, takes the attention's output."""
    layer, output = problem.site.layer, first_tensor(problem.site.attention.output)
    takes = [m for m in layer.modules if id(m) in layer.module_io and layer.module_io[id(m)][0].value is output]
    return any(0 < max((x.dim() for x in m.parameters()), default=0) < 2 for m in takes)


@dataclass(frozen=True)
class GroupSpan:
    """The pairs of one group in a chunk, or of several groups with as many members and the same targets."""

    rows: slice  # the rows of the chunk
    groups: int  # how many groups
    vectors: slice  # the (source, head) vectors of the groups, among those of the block
    # The targets of each group's pairs. A slice if they are consecutive, because a slice copies nothing.
    targets: slice | Tensor
    direct: bool  # whether the first matrix multiplies the pairs themselves, because they are fewer than the vectors


@dataclass(frozen=True)
class PairChunk:
    """Pairs that run together, ordered by group, and after them rows whose results are known.

    Two kinds of known rows follow the pairs: clean targets (each target is clean in some chunk), and one target with
    weight one on each member of the first group, which the packed replay has computed.
    """

    target: Tensor  # the target of each row, `(row,)`
    group: Tensor  # the group of each row, `(row,)`
    spans: tuple[GroupSpan, ...]  # The rows by group. The last two spans are the known rows.
    clean: slice  # the targets that run clean
    direct: tuple[slice, ...]  # the rows of the spans that are direct

    @property
    def pairs(self) -> int:
        """How many rows are pairs."""
        return len(self.target) - (self.clean.stop - self.clean.start) - 1

    def by_span(self, rows: Tensor) -> Iterator[Tensor]:
        """The rows of each span, `(target, features)`, or `(group, target, features)` for several groups."""
        shares = rows.split([span.rows.stop - span.rows.start for span in self.spans])
        for span, share in zip(self.spans, shares, strict=True):
            yield share if span.groups == 1 else share.unflatten(0, (span.groups, -1))


@dataclass(frozen=True)
class SourceBlock:
    """Sources whose vectors are computed together, and the chunks that need them."""

    batch: Tensor  # the example of each source, group after group, `(member,)`
    source: Tensor  # the position of each source, `(member,)`
    folded: int  # How many of them the first matrix multiplies. They come first.
    chunks: tuple[PairChunk, ...]

    def head_values(self, values: Tensor, heads: int, members: slice | None = None) -> Tensor:
        """The values of all query heads at the sources, or at some of the members, `(member, head, d_head)`."""
        batch, source = (x if members is None else x[members] for x in (self.batch, self.source))
        return for_query_heads(values.transpose(1, 2)[batch, source], heads)


def plan_chunks(problem: ReplayProblem, active: Tensor, direct: bool) -> list[SourceBlock]:
    """All active pairs, in chunks of about as many rows as fit, and at most as many groups as are asked for.

    `direct`: groups with fewer pairs than vectors are direct.
    """
    return list(_ChunkPlanner(problem, active, direct).blocks(len(problem.targets)))


# Some pairs of a group: its number, its first target if the others follow it one by one, and how many pairs.
GroupSlice: TypeAlias = tuple[int, "int | None", int]


class _ChunkPlanner:
    """Divides the active pairs, ordered by their group, among chunks."""

    def __init__(self, problem: ReplayProblem, active: Tensor, direct: bool) -> None:
        # On the CPU for any device, because each step is small, and most steps wait for the one before. What the chunks
        # hold is cut from a few tensors on the device.
        device, width, self.heads = active.device, problem.targets.members.shape[1], int(problem.heads.sum())
        active, examples, members = (x.cpu() for x in (active, problem.targets.batch, problem.targets.members))
        target, group = active.nonzero(as_tuple=True)
        number, total = examples[target] * width + group, members.shape[:2].numel()  # number: of each pair's group
        counts = number.bincount(minlength=total)
        few = (counts < (members >= 0).sum(-1).flatten() * self.heads) & direct
        order = (number + few[number] * total).argsort(stable=True)  # direct groups come last
        target, group = target[order], group[order]
        used = torch.cat([(counts.bool() & ~few).nonzero(), (counts.bool() & few).nonzero()]).flatten()
        counts, members = counts[used], members[used // width, used % width]  # (group,), (group, member)
        self.folded = int((~few[used]).sum())  # how many groups are not direct
        held = members >= 0
        self.batch = (used // width)[:, None].expand_as(members)[held].to(device)
        self.source = members[held].to(device)
        self.ends = [0, *held.sum(-1).cumsum(0).tolist()]
        self.rows, self.max_groups = problem.chunk_rows, problem.asked.max_groups
        self.target, self.group = target.to(device), group.to(device)
        self.counts = counts.tolist()
        ends = counts.cumsum(0)
        first, last = target[ends - counts], target[ends - 1]
        consecutive = (last - first == counts - 1).tolist()
        self.firsts = [x if one_by_one else None for x, one_by_one in zip(first.tolist(), consecutive, strict=True)]

    def blocks(self, targets: int) -> Iterator[SourceBlock]:
        """All pairs, and each of `targets` clean targets in some chunk."""
        # A chunk has about as many rows as fit, with its known rows.
        count = max(1, round((len(self.target) + targets) / self.rows))
        chunks = list(self._partition(max(1, -(-len(self.target) // count))))
        share = -(-targets // len(chunks))
        clean = cycle(slice(first, min(first + share, targets)) for first in range(0, targets, share))
        begin, end, start, done = 0, 0, 0, list[PairChunk]()
        for parts in chunks:
            first, last = parts[0][0], parts[-1][0]
            if done and (self.ends[last + 1] - begin) * self.heads > max(self.rows, VECTORS):
                yield self._block(begin, end, done)
                begin, done = self.ends[first], []
            end = self.ends[last + 1]
            own = slice(start, start + sum(count for _, _, count in parts))
            spans = tuple(self._spans(parts, begin, self.target[own]))
            done.append(_chunk(spans, self.target[own], self.group[own], next(clean)))
            start = own.stop
        yield self._block(begin, end, done)

    def _block(self, begin: int, end: int, chunks: list[PairChunk]) -> SourceBlock:
        folded = min(max(self.ends[self.folded], begin), end) - begin
        return SourceBlock(self.batch[begin:end], self.source[begin:end], folded, tuple(chunks))

    def _partition(self, rows: int) -> Iterator[list[GroupSlice]]:
        """All pairs, `rows` at a time, of at most `max_groups` groups."""
        parts, room = list[GroupSlice](), rows
        for number, (first, count) in enumerate(zip(self.firsts, self.counts, strict=True)):
            while count:
                if not room or len(parts) == self.max_groups:
                    yield parts
                    parts, room = [], rows
                taken = min(count, room)
                parts.append((number, first, taken))
                first = None if first is None else first + taken
                count, room = count - taken, room - taken
        yield parts

    def _spans(self, parts: list[GroupSlice], begin: int, target: Tensor) -> Iterator[GroupSpan]:
        """The spans of a chunk with these targets, in a block whose members begin at `begin`."""
        row = 0
        for _, alike in groupby(parts, self._product_key):
            same = list(alike)
            number, first, count = same[0]
            rows = slice(row, row + count * len(same))
            vectors = slice(*((self.ends[end] - begin) * self.heads for end in (number, number + len(same))))
            targets = target[rows] if first is None else slice(first, first + count)
            yield GroupSpan(rows, len(same), vectors, targets, number >= self.folded)
            row = rows.stop

    def _product_key(self, part: GroupSlice) -> tuple[int | None, ...]:
        """Key by which neighbouring groups can share one batched product: same targets, same number of members."""
        number, first, count = part
        size = self.ends[number + 1] - self.ends[number]
        return number if first is None else None, first, count, size, number >= self.folded


def _chunk(spans: tuple[GroupSpan, ...], target: Tensor, group: Tensor, clean: slice) -> PairChunk:
    """A chunk of the pairs `(target, group)`, with the known rows after them."""
    end = len(target) + clean.stop - clean.start
    first = spans[0].targets
    begin, size = spans[0].vectors.start, (spans[0].vectors.stop - spans[0].vectors.start) // spans[0].groups
    unchanged = GroupSpan(slice(len(target), end), 1, slice(begin, begin), clean, False)
    one = first[:1] if isinstance(first, Tensor) else slice(first.start, first.start + 1)
    changed = replace(spans[0], rows=slice(end, end + 1), groups=1, vectors=slice(begin, begin + size), targets=one)
    starts = [span.rows.start for span in spans if span.direct]
    direct = [slice(starts[0], len(target))] if starts else []
    direct += [changed.rows] * changed.direct
    targets = torch.cat([target, torch.arange(clean.start, clean.stop, device=target.device), target[:1]])
    groups = torch.cat([group, group[:1].expand(end + 1 - len(target))])
    return PairChunk(targets, groups, (*spans, unchanged, changed), clean, tuple(direct))
