"""Pairs in the order of the fast lane: by the group of sources that is zeroed, in chunks that run together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from captum_vz._engine.products import padded
from captum_vz._engine.replay import TooFewError

# How many (source, head) vectors are folded at a time: so many that the product is worth its call.
VECTORS = 1024


@dataclass(frozen=True)
class Pairs:
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
class Span:
    """The pairs of one group in a chunk; or of several, of as many members and with the same targets."""

    rows: slice  # of the chunk
    groups: int
    vectors: slice  # the groups' (source, head) vectors in the block
    targets: slice | Tensor  # of each group's pairs; a slice where they follow each other, for it copies nothing
    folded: bool  # whether first matrices act on these vectors, or on these rows


@dataclass(frozen=True)
class Chunk:
    """Some pairs, ordered by group, and behind them rows of which is known what they give.

    First some targets of which nothing is taken: all targets are among those of some chunk. At last the target of one
    of the first group's pairs, of which the group's whole values are taken, whatever their weights.
    """

    target: Tensor  # (row)
    group: Tensor  # (row)
    spans: tuple[Span, ...]
    clean: slice  # the targets of which nothing is taken

    @property
    def pairs(self) -> int:
        """How many rows are pairs."""
        return len(self.target) - (self.clean.stop - self.clean.start) - 1

    @property
    def alone(self) -> slice:
        """The rows of groups that are not folded: they follow each other, for groups that are come first."""
        rows = [span.rows for span in self.spans if not span.folded]
        return slice(rows[0].start, rows[-1].stop) if rows else slice(0, 0)


@dataclass(frozen=True)
class Block:
    """Some sources, the members of group after group, and the chunks that need them."""

    batch: Tensor  # (member)
    source: Tensor  # (member)
    chunks: tuple[Chunk, ...]
    folded: int  # on so many, the first ones, first matrices act; the pairs of the others are fewer than their vectors


def blocks(pairs: Pairs, width: int, depth: int, rows: int, at_most: int | None) -> tuple[list[Block], bool]:
    """All active pairs, in chunks of about `rows` rows and of at most `at_most` groups.

    Also whether the attention's projection and a first matrix should be multiplied with each other, for heads of
    `depth` features, rather than a first matrix with the vectors of `width` features.

    Raises:
        TooFewError: There are too few pairs to a group to pay for its vectors.
    """
    target, group = pairs.active.nonzero(as_tuple=True)
    number = pairs.batch[target] * pairs.members.shape[1] + group
    number, which, counts = number.unique(return_inverse=True, return_counts=True)
    batch = number // pairs.members.shape[1]
    members = pairs.members[batch, number % pairs.members.shape[1]]  # (number, member)
    vectors = (members >= 0).sum(-1) * len(pairs.heads)
    gains, at_once, composed = _gains(counts, vectors, width, depth, len(pairs.heads))
    # All targets run twice more, changed as far as the norm and with nothing taken to the end: some two first matrices.
    if gains.clamp_min(0).sum() - at_once <= 2 * len(pairs.batch):
        raise TooFewError("there are too few pairs to fold for")
    order = (gains <= 0).long().argsort(stable=True)  # groups that gain come first
    place = order.argsort()  # of each group in that order
    mine = place[which].argsort(stable=True)
    sources = _Sources(batch[order], members[order], len(pairs.heads), int((gains > 0).sum()))
    return list(sources.blocks(target[mine], group[mine], counts[order], len(pairs.batch), rows, at_most)), composed


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


class _Sources:
    """The members of some groups, `(group, member)`, of the examples `batch (group)`; the first groups are folded."""

    def __init__(self, batch: Tensor, members: Tensor, heads: int, folded: int) -> None:
        there = members >= 0
        self.batch = batch[:, None].expand_as(members)[there]
        self.source = members[there]
        self.ends = [0, *there.sum(-1).cumsum(0).tolist()]
        self.heads = heads
        self.folded = folded

    def blocks(
        self, target: Tensor, group: Tensor, counts: Tensor, targets: int, rows: int, at_most: int | None
    ) -> Iterator[Block]:
        """The pairs `(target, group)`, of which each group has so many as `counts` says."""
        ends = counts.cumsum(0)
        follow_each_other = (target[ends - 1] - target[ends - counts] == counts - 1).tolist()
        firsts = target[ends - counts].tolist()
        offsets = (ends - counts).tolist()
        chunks = list(_partition(counts.tolist(), _pairs_at_a_time(len(target), targets, rows), at_most))
        share = -(-targets // len(chunks))
        clean = cycle(slice(first, min(first + share, targets)) for first in range(0, targets, share))
        begin, end, start, done = 0, 0, 0, list[Chunk]()
        for parts in chunks:
            first, last = parts[0][0], parts[-1][0]
            if done and (self.ends[last + 1] - begin) * self.heads > max(rows, VECTORS):
                yield self._block(begin, end, done)
                begin, done = self.ends[first], []
            end = self.ends[last + 1]
            spans, row = list[Span](), 0
            for number, count in parts:
                vectors = slice(*((self.ends[number + after] - begin) * self.heads for after in (0, 1)))
                if follow_each_other[number]:
                    from_ = firsts[number] + start + row - offsets[number]
                    of_pairs: slice | Tensor = slice(from_, from_ + count)
                else:
                    of_pairs = target[start + row : start + row + count]
                spans.append(Span(slice(row, row + count), 1, vectors, of_pairs, number < self.folded))
                row += count
            mine = slice(start, start + row)
            done.append(_chunk(spans, target[mine], group[mine], next(clean)))
            start += row
        yield self._block(begin, end, done)

    def _block(self, begin: int, end: int, chunks: list[Chunk]) -> Block:
        folded = min(max(self.ends[self.folded], begin), end) - begin
        return Block(self.batch[begin:end], self.source[begin:end], tuple(chunks), folded)


def _chunk(spans: list[Span], target: Tensor, group: Tensor, clean: slice) -> Chunk:
    """The pairs `(target, group)` of some spans, and behind them the rows of which is known what they give."""
    first, end = spans[0], len(target) + clean.stop - clean.start
    known = slice(first.rows.stop - 1, first.rows.stop)  # one of the first group's pairs
    unmoved = replace(first, rows=slice(len(target), end), targets=clean)
    taken = replace(first, rows=slice(end, end + 1), targets=target[known])
    targets = torch.cat([target, torch.arange(clean.start, clean.stop, device=target.device), target[known]])
    groups = torch.cat([group, group[known].expand(end + 1 - len(target))])
    return Chunk(targets, groups, (*_joined(spans), unmoved, taken), clean)


def _pairs_at_a_time(pairs: int, targets: int, rows: int) -> int:
    """How many pairs to a chunk, so that with a share of the targets, and one more row, they are about `rows`."""
    chunks = max(1, round((pairs + targets) / rows))
    others = -(-targets // chunks) + 1
    # Products come in few numbers of rows.
    return max(1, padded(-(-pairs // chunks) + others) - others)


def _joined(spans: list[Span]) -> Iterator[Span]:
    """The same, neighbours of the same size with the same targets in one."""
    last = spans[0]
    for span in spans[1:]:
        follow_each_other = isinstance(span.targets, slice) and isinstance(last.targets, slice)
        size, last_size = (one.vectors.stop - one.vectors.start for one in (span, last))
        same = follow_each_other and span.targets == last.targets and span.folded == last.folded
        if same and size * last.groups == last_size:
            rows, vectors = slice(last.rows.start, span.rows.stop), slice(last.vectors.start, span.vectors.stop)
            last = replace(last, rows=rows, groups=last.groups + 1, vectors=vectors)
        else:
            yield last
            last = span
    yield last


def _partition(counts: list[int], rows: int, at_most: int | None) -> Iterator[list[tuple[int, int]]]:
    """Groups, by their number, and how many of their pairs to take: `rows` pairs at a time, of `at_most` groups."""
    parts: list[tuple[int, int]] = []
    room = rows
    for number, count in enumerate(counts):
        while count:
            if not room or len(parts) == at_most:
                yield parts
                parts, room = [], rows
            taken = min(count, room)
            parts.append((number, taken))
            count, room = count - taken, room - taken
    yield parts
