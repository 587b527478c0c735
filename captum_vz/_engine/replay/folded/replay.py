"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.interventions import ModuleAnswer
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.budget import budget_of
from captum_vz._engine.numerics.matmul import OneDnnLinears, Product, has_fast_bfloat16, padded
from captum_vz._engine.numerics.tensors import for_query_heads, gather_rows
from captum_vz._engine.numerics.tolerance import (
    TOO_LITTLE_LEFT,
    CannotReplay,
    TooFewError,
    check_folded,
    folded_bound,
    is_cancelled,
)
from captum_vz._engine.replay.base import (
    Ablation,
    TargetRows,
    active_groups,
    chunk_rows,
    empty_map,
    fill_neighbours,
    group_members,
    zeroed_heads,
    zeroed_weights,
)
from captum_vz._engine.replay.folded.kernels import CleanActivations, FirstLinear, FoldedModules, LaterLinear, add_sums
from captum_vz._engine.replay.folded.plan import PairChunk, PairTable, SourceBlock, plan_chunks
from captum_vz._engine.replay.folded.structure import FeedForwardStructure, Trace, replace_forwards
from captum_vz._engine.replay.packed import PackedPairs, packed_pairs
from captum_vz._engine.structure.modules import Norm, matrix
from captum_vz._engine.taps.handler import is_hooked

# How many clean targets are run to learn a layer's shape from them.
FEW = 8


class FoldedPairs:
    """Runs pairs: `run()` gives `(target, group, moved (n, d))`, so many pairs at a time as fit into `rows`.

    What it gives is to be used before the next is asked for, which takes its place. With `fast`, what changes goes
    through the matrices in bfloat16 and is added to what does not: it is rounded beside the change, not the output.
    `least` rows of a first matrix are to be saved.
    """

    def __init__(
        self,
        recording: LayerRecord,
        call: AttentionRecord,
        output: Tensor,
        pairs: PairTable,
        rows: int,
        at_most: int | None,
        fast: bool = False,
        least: int = 0,
    ) -> None:
        self.blocks, self.composed = plan_chunks(pairs, output.shape[-1], call.values.shape[-1], rows, at_most, least)
        general = packed_pairs(recording, call, output, pairs.batch, pairs.out)
        assert call.context is not None  # PackedPairs saw to it
        if not isinstance(general.answer, ModuleAnswer) or general.later:
            raise CannotReplay("its attention module is not answered as a whole, or another one follows")
        self.known = general.known
        self.pairs = pairs
        self.fast = fast
        self.dtype = torch.bfloat16 if fast else output.dtype  # in which what changes is multiplied
        self.values = call.values.transpose(1, 2)  # (batch, in, key-value head, d_head)
        self.heads = call.size[1]
        self.outputs = gather_rows(output, pairs.batch, pairs.out)
        sizes = [len(chunk.target) for block in self.blocks for chunk in block.chunks]
        self.rows, self.longest = sum(sizes), max(sizes)
        self.vectors = sum(block.folded for block in self.blocks) * len(pairs.heads)
        contexts = gather_rows(call.context, pairs.batch, pairs.out).flatten(1)
        shape = self._trace(Trace(general), recording, call, contexts, rows)
        with OneDnnLinears():
            self.base = self.outputs if self.answers is None else shape.projection(contexts)
        self.changed = self.outputs.new_empty(self.longest, self.projection.shape[-1])
        if self.answers is not None:
            self.replay = self._folded(PackedPairs(recording, call), shape, self.answers)

    def run(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Raises CannotReplay where a chunk is not confirmed by the clean outputs and by the general way."""
        rounding = folded_bound(self.outputs, torch.zeros_like(self.outputs))
        probes = zip(self.probes, self.rounding, strict=True)
        for block in self.blocks:
            values = self._head_values(block.batch, block.source)[:, self.pairs.heads]
            vectors = (values.transpose(0, 1) @ self.projection).transpose(0, 1).flatten(0, 1)  # (member * head, d)
            if self.answers is not None and block.folded:
                self.answers.fold(vectors[: block.folded * len(self.pairs.heads)], values[: block.folded])
            for chunk in block.chunks:
                moved, pairs, (probe, of_probe) = self._moved(chunk, vectors), chunk.pairs, next(probes)
                expected = torch.cat([self.outputs[chunk.clean], probe[None]])
                check_folded(moved[pairs:], expected, torch.cat([rounding[chunk.clean], of_probe[None]]))
                yield chunk.target[:pairs], chunk.group[:pairs], moved[:pairs]

    def _trace(self, trace: Trace, recording: LayerRecord, call: AttentionRecord, contexts: Tensor, rows: int) -> FeedForwardStructure:
        """Run a few targets and each chunk's last row the general way, and learn from them what the fast needs."""
        pairs, count = self.pairs, len(contexts)
        last = torch.stack([chunk.target[-1] for block in self.blocks for chunk in block.chunks])
        taken = torch.stack([self._taken(block, chunk) for block in self.blocks for chunk in block.chunks])
        few = torch.linspace(count - 1, 0, min(count, FEW), dtype=torch.float64, device=last.device).long()
        target = torch.cat([few, last])
        clean_and_known = torch.cat([contexts[few], contexts[last] - taken])
        shape: FeedForwardStructure | None = None
        answers = []
        for part in torch.arange(len(target), device=target.device).split(rows):
            part = torch.cat([part, part[-1:]])
            context = clean_and_known[part]
            context[-1] = torch.nan
            answers.append(trace.run(pairs.batch[target[part]], pairs.out[target[part]], context)[:-1])
            shape = shape or trace.shape(call, context)
        assert shape is not None
        self.probes = torch.cat(answers)[len(few) :]  # what the last row of each chunk should give
        self.rounding = folded_bound(self.probes, self.outputs[last], self.dtype)

        # What a context loses is to reach the residual stream as it is, at each target: a layer may switch some off.
        clean, run = self.outputs, trace.run
        if shape.norm is not None:
            clean = self._in_the_pass(recording, call, shape.norm.module, 0)
            run = partial(trace.run_until, shape.norm.module)
        less = contexts - taken[:1]
        parts = torch.arange(count, device=target.device).split(rows)
        changed = torch.cat([run(pairs.batch[part], pairs.out[part], less[part]) for part in parts])
        weight = matrix(shape.projection)
        assert weight is not None
        expected = clean - taken[:1] @ weight
        check_folded(changed, expected, folded_bound(expected, clean))
        self.projection = weight.unflatten(0, (call.size[1], -1))  # (head, d_head, d)
        if len(pairs.heads) < call.size[1]:
            self.projection = self.projection[pairs.heads]
        if not self.projection.abs().amax():  # in a fifth of the time that any() takes
            raise TooFewError("the projection of these heads is zero: nothing is to move, not even by rounding")
        self.answers: FoldedModules | None = None
        self.clean = clean  # what the norm is given, of each target
        if shape.norm is None and not self.known:
            raise CannotReplay("what becomes of the attention's output is the layer's own, and not checked")
        if shape.norm is not None:
            scale = shape.norm.scale(clean)
            made = partial(self._in_the_pass, recording, call)
            firsts = [self._first(shape.norm, scale, module, made(module, 1)) for module in shape.linears]
            lasts = [self._last(m, (made(m, 0), made(m, 1)) if self.fast else None) for m in shape.lasts]
            self.answers = FoldedModules(shape.norm, scale, firsts, lasts)
        return shape

    def _in_the_pass(self, recording: LayerRecord, call: AttentionRecord, module: nn.Module, which: int) -> Tensor:
        """A module's input (0) or output (1) for each target in the clean pass, `(target, features)`.

        What is made of it is checked: each target runs in some chunk with nothing taken.
        """
        batch, _, tokens, _ = call.size
        size = (tokens, batch) if call.sequence_first else (batch, tokens)
        made = recording.made.get(id(module))
        if made is None or made[which].value.shape[:-1].numel() != batch * tokens:
            raise CannotReplay("a module behind the attention did not run once on each position")
        if not made[which].is_as_it_was():
            raise CannotReplay("what a module made was changed in place")
        return gather_rows(call.batch_first(made[which].value.reshape(*size, -1)), self.pairs.batch, self.pairs.out)

    def _first(self, norm: Norm, scale: Tensor, module: nn.Module, result: Tensor) -> FirstLinear:
        """A first matrix and its `result` for the clean targets, of whose norm the `scale` is given."""
        weight, constant = matrix(module), module(norm.beta[None])
        assert weight is not None
        base = (result - constant) / scale
        room = base.new_empty(padded(self.longest), base.shape[1])
        count = self.projection.shape[:2].numel() if self.composed else self.vectors
        product = Product(weight.to(self.dtype), count=count)
        composed = None
        if self.composed:
            directions = norm.direction(self.projection).to(self.dtype)  # (head, d_head, d)
            composed = product(directions.flatten(0, 1)).to(base.dtype).unflatten(0, self.projection.shape[:2])
        return FirstLinear(module, product, composed, base, constant, room)

    def _last(self, module: nn.Module, clean: tuple[Tensor, Tensor] | None) -> LaterLinear:
        """A later matrix, and what it was given for the clean targets and made of that, if only changes go through."""
        weight = matrix(module)
        assert weight is not None
        if clean is None:
            bias = module.bias if isinstance(module.bias, Tensor) else None
            return LaterLinear(module, Product(weight, bias, self.rows), None)
        change = clean[0].new_zeros(padded(self.longest), clean[0].shape[1], dtype=self.dtype)
        return LaterLinear(module, Product(weight.to(self.dtype), count=self.rows), CleanActivations(*clean, change))

    def _folded(self, replay: PackedPairs, shape: FeedForwardStructure, answers: FoldedModules) -> PackedPairs:
        """A replay whose attention is given after its projection, and whose first matrices are answered."""
        assert isinstance(replay.answer, ModuleAnswer)
        forwards: dict[nn.Module, Callable[..., Tensor]] = {answers.norm.module: answers.normed}
        if replay.answer.projection:
            replay.answer.projection = ()
        else:
            forwards[shape.projection] = lambda projected: projected
        forwards |= {first.module: partial(answers.first, number) for number, first in enumerate(answers.firsts)}
        forwards |= {last.module: partial(answers.last, number) for number, last in enumerate(answers.lasts)}
        forwards |= {module: partial(answers.activated, activation) for module, activation in shape.activations}
        if any(map(is_hooked, forwards)):
            raise CannotReplay("a module behind the attention has a hook, which would not be called")
        replace_forwards(replay, forwards)
        replay.around = nullcontext  # products are answered, and to ask at every other function costs time
        return replay

    def _moved(self, chunk: PairChunk, vectors: Tensor) -> Tensor:
        """The layer's output `(row, d)`."""
        pairs = self.pairs
        batch, out = (x.index_select(0, chunk.target) for x in (pairs.batch, pairs.out))
        members = gather_rows(pairs.members, batch, chunk.group).clamp_min(0)
        shares = gather_rows(pairs.weights, chunk.target[:, None], members).flatten(1).neg_()
        shares[chunk.pairs : -1], shares[-1] = 0, -1
        changed = torch.index_select(self.base, 0, chunk.target, out=self.changed[: len(chunk.target)])
        for span, rows, share in zip(chunk.spans, chunk.by_span(changed), chunk.by_span(shares), strict=True):
            add_sums(rows, share, vectors[span.vectors])
        if self.answers is None:
            if is_cancelled(changed, self.base.index_select(0, chunk.target))[: chunk.pairs].any():
                raise CannotReplay(TOO_LITTLE_LEFT)
            return changed
        self.answers.chunk, self.answers.shares = chunk, shares
        if not self.known:  # it may cut what no clean one reaches
            self.answers.expected = changed + (self.clean - self.base).index_select(0, chunk.target)
        return self.replay.run(batch, out, changed)

    def _head_values(self, batch: Tensor, source: Tensor) -> Tensor:
        """The values of all query heads, `(member, head, d_head)`."""
        return for_query_heads(self.values[batch, source], self.heads)

    def _taken(self, block: SourceBlock, chunk: PairChunk) -> Tensor:
        """What the context of a chunk's last row loses, `(head * d_head)`."""
        heads, mine = self.pairs.heads, chunk.spans[-1].vectors
        members = slice(mine.start // len(heads), mine.stop // len(heads))
        values = self._head_values(block.batch[members], block.source[members]).sum(0)
        return torch.zeros_like(values).index_copy(0, heads, values[heads]).flatten()


def _folded_pairs(
    recording: LayerRecord, call: AttentionRecord, output: Tensor, zeroing: Ablation, targets: TargetRows
) -> Tensor:
    """The same numbers as `_packed_pairs`, faster: for layers of a known shape, and rows enough to gain by it."""
    if call.weights is None:
        raise CannotReplay("its attention is computed inline, out of sight")
    fast = zeroing.fast and has_fast_bfloat16(output.device)
    if zeroing.fast and not fast:
        recording.notes.append(f"matmul_precision='medium' found no fast bfloat16 on {output.device}, computed exactly")
    largest = max((parameter.numel() for parameter in recording.parameters if parameter.dim() == 2), default=1)
    least = budget_of(output.device).rows_to_save(largest * (1 + fast))  # in bfloat16 the last matrix costs little, too
    members = group_members(call, zeroing)
    if len(targets) * members.shape[1] <= least:
        raise TooFewError("there are too few pairs to fold for")
    # A source whose vectors are folded for one target only gains nothing, and more for few only among many.
    most = int(targets.batch.bincount().max())
    heads = zeroed_heads(call, zeroing.heads).nonzero().flatten()
    features = len(heads) * call.values.shape[-1]
    if most <= 1 or (most <= len(heads) and len(targets) * members.shape[1] <= features):
        raise TooFewError("there are too few rows to fold for")
    scores = empty_map(call, zeroing, members)
    weights = zeroed_weights(call, zeroing, targets.sources, targets.batch, targets.out)
    lists = members[targets.batch]  # (target, group, member)
    changes = active_groups(weights, lists)
    active = fill_neighbours(changes, lists, budget_of(changes.device).neighbours)
    pairs = PairTable(targets.batch, targets.out, weights[..., heads], heads, members, active)
    rows = chunk_rows(recording, output)
    folded = FoldedPairs(recording, call, output, pairs, rows, zeroing.at_most, fast, least)
    clean = zeroing.measure.prepare(folded.outputs)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for target, group, moved in folded.run():
        distance = zeroing.measure.between(zeroing.measure.prepare(moved), clean.index_select(0, target))
        found.append((target, group, distance.to(scores)))
    target, group, distance = map(torch.cat, zip(*found, strict=True))
    scores[targets.batch[target], targets.place[target], group] = distance.where(changes[target, group], 0)
    return scores
