"""Pairs in the order of the fast lane: by the group of sources that is zeroed, in chunks that run together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Chunk:
    """Some pairs, ordered by group, and behind them two more of the first group, known from the general way.

    The first of these two zeroes nothing, the second takes the group's whole values away, whatever their weights.
    """

    target: Tensor  # (n + 2)
    group: Tensor  # (n + 2)
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Block:
    """Some sources, the members of group after group, and the chunks that need them."""

    batch: Tensor  # (member)
    source: Tensor  # (member)
    chunks: tuple[Chunk, ...]
    folded: bool  # whether first matrices act on these sources; or else on their pairs, being fewer


def blocks(pairs: Pairs, width: int, depth: int, rows: int, at_most: int | None) -> tuple[list[Block], bool]:
    """All active pairs, at most `rows` of them and `at_most` groups to a chunk.

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
    # Before anything is gained, all targets run once through all matrices: about two first ones.
    if gains.clamp_min(0).sum() - at_once <= 2 * len(pairs.batch):
        raise TooFewError("there are too few pairs to fold for")
    found: list[Block] = []
    for folded in (True, False):
        numbers = ((gains > 0) == folded).nonzero().flatten()
        mine = ((gains > 0) == folded)[which].nonzero().flatten()
        mine = mine[which[mine].argsort(stable=True)]
        if len(mine):
            sources = _Sources(batch[numbers], members[numbers], len(pairs.heads), folded)
            found += sources.blocks(target[mine], group[mine], counts[numbers], rows, at_most)
    return found, composed


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
    """The members of some groups, `(group, member)`, of the examples `batch (group)`."""

    def __init__(self, batch: Tensor, members: Tensor, heads: int, folded: bool) -> None:
        there = members >= 0
        self.batch = batch[:, None].expand_as(members)[there]
        self.source = members[there]
        self.ends = [0, *there.sum(-1).cumsum(0).tolist()]
        self.heads = heads
        self.folded = folded

    def blocks(self, target: Tensor, group: Tensor, counts: Tensor, rows: int, at_most: int | None) -> Iterator[Block]:
        """The pairs `(target, group)`, of which each group has so many as `counts` says."""
        ends = counts.cumsum(0)
        follow_each_other = (target[ends - 1] - target[ends - counts] == counts - 1).tolist()
        firsts = target[ends - counts].tolist()
        offsets = (ends - counts).tolist()
        begin, end, start, chunks = 0, 0, 0, list[Chunk]()
        for parts in _partition(counts.tolist(), rows, at_most):
            first, last = parts[0][0], parts[-1][0]
            if chunks and (self.ends[last + 1] - begin) * self.heads > max(rows, VECTORS):
                yield self._block(begin, end, chunks)
                begin, chunks = self.ends[first], []
            end = self.ends[last + 1]
            spans, row = list[Span](), 0
            for number, count in parts:
                vectors = slice(*((self.ends[number + after] - begin) * self.heads for after in (0, 1)))
                targets: slice | Tensor = target[start + row : start + row + count]
                if follow_each_other[number]:
                    from_ = firsts[number] + start + row - offsets[number]
                    targets = slice(from_, from_ + count)
                spans.append(Span(slice(row, row + count), 1, vectors, targets))
                row += count
            first_rows, first_vectors = spans[0].rows, spans[0].vectors
            known = start + first_rows.stop - 1
            taken = torch.arange(start, start + row + 2, device=target.device)
            taken[-2:] = known
            spans = [*_joined(spans), Span(slice(row, row + 2), 1, first_vectors, target[taken[-2:]])]
            chunks.append(Chunk(target[taken], group[taken], tuple(spans)))
            start += row
        yield self._block(begin, end, chunks)

    def _block(self, begin: int, end: int, chunks: list[Chunk]) -> Block:
        return Block(self.batch[begin:end], self.source[begin:end], tuple(chunks), self.folded)


def _joined(spans: list[Span]) -> Iterator[Span]:
    """The same, neighbours of the same size with the same targets in one."""
    last = spans[0]
    for span in spans[1:]:
        follow_each_other = isinstance(span.targets, slice) and isinstance(last.targets, slice)
        size, last_size = (one.vectors.stop - one.vectors.start for one in (span, last))
        if follow_each_other and span.targets == last.targets and size * last.groups == last_size:
            rows = slice(last.rows.start, span.rows.stop)
            last = Span(rows, last.groups + 1, slice(last.vectors.start, span.vectors.stop), last.targets)
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
