"""TODO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from captum_vz._engine.numerics.matmul import padded

# How many (source, head) vectors are folded at a time: so many that the product is worth its call.
VECTORS = 1024


@dataclass(frozen=True)
class PairTable:
    """The pairs of a target and a group of sources that is zeroed for it.

    Attributes:
        batch: Each target's example, `(target)`.
        out: Each target's position, `(target)`.
        weights: Attention weights of the heads that are zeroed, `(target, in, head)`.
        heads: These heads, `(head)`.
        members: The sources of each group, `(batch, group, member)`, the empty places -1 and last.
        active: Which groups may change which targets, `(target, group)`.
    """

    batch: Tensor
    out: Tensor
    weights: Tensor
    heads: Tensor
    members: Tensor
    active: Tensor


@dataclass(frozen=True)
class GroupSpan:
    """The pairs of one group in a chunk; or of several, of as many members and with the same targets."""

    rows: slice  # of the chunk
    groups: int
    vectors: slice  # the groups' (source, head) vectors in the block
    targets: slice | Tensor  # of each group's pairs; a slice where they follow each other, for it copies nothing
    folded: bool  # whether first matrices act on these vectors, or on these rows

    def to(self, device: torch.device) -> GroupSpan:
        """The same on a device."""
        return replace(self, targets=self.targets.to(device)) if isinstance(self.targets, Tensor) else self


@dataclass(frozen=True)
class PairChunk:
    """Some pairs, ordered by group, and behind them rows of which is known what they give.

    First some targets of which nothing is taken: all targets are among those of some chunk. At last the target of one
    of the first group's pairs, of which the group's whole values are taken, whatever their weights.
    """

    target: Tensor  # (row)
    group: Tensor  # (row)
    spans: tuple[GroupSpan, ...]
    clean: slice  # the targets of which nothing is taken

    def to(self, device: torch.device) -> PairChunk:
        """The same on a device."""
        spans = tuple(span.to(device) for span in self.spans)
        return replace(self, target=self.target.to(device), group=self.group.to(device), spans=spans)

    @property
    def pairs(self) -> int:
        """How many rows are pairs."""
        return len(self.target) - (self.clean.stop - self.clean.start) - 1

    @property
    def alone(self) -> slice:
        """The rows of groups that are not folded: they follow each other, for groups that are come first."""
        rows = [span.rows for span in self.spans if not span.folded]
        return slice(rows[0].start, rows[-1].stop) if rows else slice(0, 0)

    def by_span(self, rows: Tensor) -> Iterator[Tensor]:
        """Each span's share of a chunk's rows: `(target, features)`; of several groups, `(group, target, features)`."""
        shares = rows.split([span.rows.stop - span.rows.start for span in self.spans])
        for span, share in zip(self.spans, shares, strict=True):
            yield share if span.groups == 1 else share.unflatten(0, (span.groups, -1))


@dataclass(frozen=True)
class SourceBlock:
    """Some sources, the members of group after group, and the chunks that need them."""

    batch: Tensor  # (member)
    source: Tensor  # (member)
    chunks: tuple[PairChunk, ...]
    folded: int  # on so many, the first ones, first matrices act; the pairs of the others are fewer than their vectors

    def to(self, device: torch.device) -> SourceBlock:
        """The same on a device."""
        chunks = tuple(chunk.to(device) for chunk in self.chunks)
        return replace(self, batch=self.batch.to(device), source=self.source.to(device), chunks=chunks)


def plan_chunks(
    pairs: PairTable, width: int, depth: int, rows: int, at_most: int | None, least: int = 0
) -> tuple[list[SourceBlock], bool] | None:
    """All active pairs, in chunks of about `rows` rows and of at most `at_most` groups.

    Also whether the attention's projection and a first matrix should be multiplied with each other, for heads of
    `depth` features, rather than a first matrix with the vectors of `width` features.

    Raises:
        TooFewError: There are too few pairs to a group to pay for its vectors, and to save `least` rows beyond that.
    """
    # On the CPU, wherever the pairs are: each step here is small, and most wait for the one before it.
    active, examples, lists = (x.cpu() for x in (pairs.active, pairs.batch, pairs.members))
    target, group = active.nonzero(as_tuple=True)
    number = examples[target] * lists.shape[1] + group  # of each pair's group
    sizes = number.bincount(minlength=lists.shape[:2].numel())
    there = sizes.nonzero().flatten()
    counts, batch = sizes[there], there // lists.shape[1]
    members = lists[batch, there % lists.shape[1]]  # (group, member)
    vectors = (members >= 0).sum(-1) * len(pairs.heads)
    gains, at_once, composed = _gains(counts, vectors, width, depth, len(pairs.heads))
    # All targets run twice more, changed as far as the norm and with nothing taken to the end: some two first matrices.
    if gains.clamp_min(0).sum() - at_once <= 2 * len(pairs.batch) + least:
        return None
    order = (gains <= 0).int().argsort(stable=True)  # groups that gain come first
    place = torch.empty_like(sizes)
    place[there[order]] = torch.arange(len(order))
    mine = place[number].argsort(stable=True)
    folded = int((gains > 0).sum())
    groups = ChunkPlanner(batch[order], members[order], counts[order], folded, len(pairs.heads), target[mine], group[mine])
    device = pairs.active.device
    return [block.to(device) for block in groups.blocks(len(pairs.batch), rows, at_most)], composed


def _gains(counts: Tensor, vectors: Tensor, width: int, depth: int, heads: int) -> tuple[Tensor, int, bool]:
    """What folding gains for each group, what it costs once, and whether that is to multiply the two matrices.

    In rows of a first matrix: of each pair one is saved, less a sum over vectors. A vector costs one; or, once the
    matrices are multiplied, which costs a row for each feature of each head, a share of one.
    """
    alone = counts - vectors * (1 + counts / width)
    composed = counts - vectors * (depth / width + counts / width)
    if composed.clamp_min(0).sum() - heads * depth > alone.clamp_min(0).sum():
        return composed, heads * depth, True
    return alone, 0, False


class GroupSlice(NamedTuple):
    """Some of a group's pairs."""

    number: int  # the group's
    first: int | None  # the first target, if the others follow it one by one
    pairs: int


class ChunkPlanner:
    """Groups of sources, the `folded` first, with `members (group, member)` in the examples `batch (group)`.

    And their pairs `(target, group)`: as many of one group as `counts` says, behind them those of the next.
    """

    def __init__(
        self, batch: Tensor, members: Tensor, counts: Tensor, folded: int, heads: int, target: Tensor, group: Tensor
    ) -> None:
        there = members >= 0
        self.batch = batch[:, None].expand_as(members)[there]
        self.source = members[there]
        self.ends = [0, *there.sum(-1).cumsum(0).tolist()]
        self.folded = folded
        self.heads = heads
        self.target = target
        self.group = group
        self.counts = counts.tolist()
        ends = counts.cumsum(0)
        first, last = target[ends - counts], target[ends - 1]
        follow_each_other = (last - first == counts - 1).tolist()
        self.firsts = [x if follows else None for x, follows in zip(first.tolist(), follow_each_other, strict=True)]

    def blocks(self, targets: int, rows: int, at_most: int | None) -> Iterator[SourceBlock]:
        """All pairs, and among them, with nothing taken, each of so many `targets`."""
        chunks = list(self._partition(_pairs_at_a_time(len(self.target), targets, rows), at_most))
        share = -(-targets // len(chunks))
        clean = cycle(slice(first, min(first + share, targets)) for first in range(0, targets, share))
        begin, end, start, done = 0, 0, 0, list[PairChunk]()
        for parts in chunks:
            first, last = parts[0].number, parts[-1].number
            if done and (self.ends[last + 1] - begin) * self.heads > max(rows, VECTORS):
                yield self._block(begin, end, done)
                begin, done = self.ends[first], []
            end = self.ends[last + 1]
            mine = slice(start, start + sum(part.pairs for part in parts))
            spans = tuple(self._spans(parts, begin, self.target[mine]))
            done.append(_chunk(spans, self.target[mine], self.group[mine], next(clean)))
            start = mine.stop
        yield self._block(begin, end, done)

    def _block(self, begin: int, end: int, chunks: list[PairChunk]) -> SourceBlock:
        folded = min(max(self.ends[self.folded], begin), end) - begin
        return SourceBlock(self.batch[begin:end], self.source[begin:end], tuple(chunks), folded)

    def _partition(self, rows: int, at_most: int | None) -> Iterator[list[GroupSlice]]:
        """All pairs, `rows` at a time, of at most `at_most` groups."""
        parts, room = list[GroupSlice](), rows
        for number, (first, count) in enumerate(zip(self.firsts, self.counts, strict=True)):
            while count:
                if not room or len(parts) == at_most:
                    yield parts
                    parts, room = [], rows
                taken = min(count, room)
                parts.append(GroupSlice(number, first, taken))
                first = None if first is None else first + taken
                count, room = count - taken, room - taken
        yield parts

    def _spans(self, parts: list[GroupSlice], begin: int, target: Tensor) -> Iterator[GroupSpan]:
        """Parts of which the block's members `begin` there, their pairs' targets being `target`."""
        row = 0
        for _, alike in groupby(parts, self._kind):
            same = list(alike)
            number, first, count = same[0]
            rows = slice(row, row + count * len(same))
            vectors = slice(*((self.ends[end] - begin) * self.heads for end in (number, number + len(same))))
            targets = target[rows] if first is None else slice(first, first + count)
            yield GroupSpan(rows, len(same), vectors, targets, number < self.folded)
            row = rows.stop

    def _kind(self, part: GroupSlice) -> tuple[int | None, ...]:
        """Of neighbours that have it in common one product can be taken: their targets, how many members, if folded."""
        number, first, count = part
        alone = number if first is None else None
        return alone, first, count, self.ends[number + 1] - self.ends[number], number < self.folded


def _chunk(spans: tuple[GroupSpan, ...], target: Tensor, group: Tensor, clean: slice) -> PairChunk:
    """The pairs `(target, group)` of some spans, and behind them the rows of which is known what they give."""
    end = len(target) + clean.stop - clean.start
    begin, size = spans[0].vectors.start, (spans[0].vectors.stop - spans[0].vectors.start) // spans[0].groups
    first = replace(spans[0], groups=1, vectors=slice(begin, begin + size))
    unmoved = replace(first, rows=slice(len(target), end), targets=clean)
    one = (
        first.targets[:1] if isinstance(first.targets, Tensor) else slice(first.targets.start, first.targets.start + 1)
    )
    taken = replace(first, rows=slice(end, end + 1), targets=one)
    targets = torch.cat([target, torch.arange(clean.start, clean.stop), target[:1]])
    groups = torch.cat([group, group[:1].expand(end + 1 - len(target))])
    return PairChunk(targets, groups, (*spans, unmoved, taken), clean)


def _pairs_at_a_time(pairs: int, targets: int, rows: int) -> int:
    """How many pairs to a chunk, so that with a share of the targets, and one more row, they are about `rows`."""
    chunks = max(1, round((pairs + targets) / rows))
    others = -(-targets // chunks) + 1
    # Products come in few numbers of rows.
    return max(1, padded(-(-pairs // chunks) + others) - others)
