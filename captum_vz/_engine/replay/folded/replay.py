"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.budget import budget_of
from captum_vz._engine.numerics.matmul import OneDnnLinears, Product, has_fast_bfloat16, padded
from captum_vz._engine.numerics.tensors import for_query_heads, gather_rows
from captum_vz._engine.numerics.tolerance import (
    TOO_LITTLE_LEFT,
    CannotReplayError,
    check_folded,
    folded_bound,
    is_cancelled,
)
from captum_vz._engine.replay.answers import ModuleAnswer
from captum_vz._engine.replay.base import ReplayChunk, ReplayProblem, fill_neighbours
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
        problem: ReplayProblem,
        pairs: PairTable,
        plan: tuple[list[SourceBlock], bool],
        fast: bool = False,
    ) -> None:
        self.blocks, self.composed = plan
        self.problem = problem
        site, output = problem.site, problem.output
        attention = site.attention
        general = packed_pairs(problem)
        if not isinstance(general.answer, ModuleAnswer) or general.later:
            raise CannotReplayError("its attention module is not answered as a whole, or another one follows")
        self.known = problem.trust.library_code
        self.pairs = pairs
        self.fast = fast
        self.dtype = torch.bfloat16 if fast else output.dtype  # in which what changes is multiplied
        self.values = attention.values.transpose(1, 2)  # (batch, in, key-value head, d_head)
        self.heads = site.shape.heads
        self.outputs = gather_rows(output, pairs.batch, pairs.out)
        sizes = [len(chunk.target) for block in self.blocks for chunk in block.chunks]
        self.rows, self.longest = sum(sizes), max(sizes)
        self.vectors = sum(block.folded for block in self.blocks) * len(pairs.heads)
        contexts = gather_rows(general.contexts, pairs.batch, pairs.out).flatten(1)
        shape = self._trace(Trace(general), contexts)
        with OneDnnLinears():
            self.base = self.outputs if self.answers is None else shape.projection(contexts)
        self.changed = self.outputs.new_empty(self.longest, self.projection.shape[-1])
        if self.answers is not None:
            self.replay = self._folded(PackedPairs(site), shape, self.answers)

    def run(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Raises CannotReplayError where a chunk is not confirmed by the clean outputs and by the general way."""
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

    def _trace(self, trace: Trace, contexts: Tensor) -> FeedForwardStructure:
        """Run a few targets and each chunk's last row the general way, and learn from them what the fast needs."""
        pairs, count, rows = self.pairs, len(contexts), self.problem.chunk_rows
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
            shape = shape or trace.shape(self.problem.site.attention, context)
        assert shape is not None
        self.probes = torch.cat(answers)[len(few) :]  # what the last row of each chunk should give
        self.rounding = folded_bound(self.probes, self.outputs[last], self.dtype)

        # What a context loses is to reach the residual stream as it is, at each target: a layer may switch some off.
        clean, run = self.outputs, trace.run
        if shape.norm is not None:
            clean = self._in_the_pass(shape.norm.module, 0)
            run = partial(trace.run_until, shape.norm.module)
        less = contexts - taken[:1]
        parts = torch.arange(count, device=target.device).split(rows)
        changed = torch.cat([run(pairs.batch[part], pairs.out[part], less[part]) for part in parts])
        weight = matrix(shape.projection)
        assert weight is not None
        expected = clean - taken[:1] @ weight
        check_folded(changed, expected, folded_bound(expected, clean))
        self.projection = weight.unflatten(0, (self.heads, -1))  # (head, d_head, d)
        if len(pairs.heads) < self.heads:
            self.projection = self.projection[pairs.heads]
        if not self.projection.abs().amax():  # in a fifth of the time that any() takes
            raise CannotReplayError("the projection of these heads is zero, and rounding would give them a score")
        self.answers: FoldedModules | None = None
        self.clean = clean  # what the norm is given, of each target
        if shape.norm is None and not self.known:
            raise CannotReplayError("what becomes of the attention's output is the layer's own, and not checked")
        if shape.norm is not None:
            scale = shape.norm.scale(clean)
            made = self._in_the_pass
            firsts = [self._first(shape.norm, scale, module, made(module, 1)) for module in shape.linears]
            lasts = [self._last(m, (made(m, 0), made(m, 1)) if self.fast else None) for m in shape.lasts]
            self.answers = FoldedModules(shape.norm, scale, firsts, lasts)
        return shape

    def _in_the_pass(self, module: nn.Module, which: int) -> Tensor:
        """A module's input (0) or output (1) for each target in the clean pass, `(target, features)`.

        What is made of it is checked: each target runs in some chunk with nothing taken.
        """
        attention = self.problem.site.attention
        batch, _, tokens, _ = attention.shape
        size = (tokens, batch) if attention.tokens_first else (batch, tokens)
        made = self.problem.site.layer.module_io.get(id(module))
        if made is None or made[which].value.shape[:-1].numel() != batch * tokens:
            raise CannotReplayError("a module behind the attention did not run once on each position")
        if not made[which].is_unmodified():
            raise CannotReplayError("what a module made was changed in place")
        value = attention.batch_first(made[which].value.reshape(*size, -1))
        return gather_rows(value, self.pairs.batch, self.pairs.out)

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
            raise CannotReplayError("a module behind the attention has a hook, which would not be called")
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
                raise CannotReplayError(TOO_LITTLE_LEFT)
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


class FoldedReplay:
    """A faster form of packed pairs: the first matrices after the attention act on sources, not on pairs."""

    name = "folded pairs"

    def fits(self, problem: ReplayProblem) -> bool:
        """Whether there are enough pairs to pay for learning the layer's structure."""
        return problem.site.attention.weights is not None and self._plan(problem) is not None

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        """See :class:`~captum_vz._engine.replay.base.Replay`."""
        warnings, name = problem.site.layer.warnings, problem.site.layer.name
        fast = problem.ablation.bfloat16_changes and has_fast_bfloat16(problem.output.device)
        if problem.ablation.bfloat16_changes and not fast:
            warnings.append(f"precision='fast' found no fast bfloat16 on {problem.output.device}, computed exactly")
        plan = self._plan(problem)
        try:
            if plan is None:
                raise CannotReplayError("there are too few pairs to fold")
            pairs = FoldedPairs(problem, self._table(problem), plan, fast)
            for target, group, output in pairs.run():
                yield ReplayChunk(target, group, output, pairs.outputs, target)
        except torch.OutOfMemoryError as error:
            if problem.ablation.bfloat16_changes:
                warnings.append(f"precision='fast' found no memory for {name}, computed exactly")
            raise CannotReplayError("it found no memory") from error
        except CannotReplayError:
            if problem.ablation.bfloat16_changes:
                warnings.append(f"precision='fast' knows no shape like that of {name}, computed exactly")
            raise

    def _table(self, problem: ReplayProblem) -> PairTable:
        targets, heads = problem.targets, problem.heads.nonzero().flatten()
        members = problem.members[targets.batch]  # (target, group, member)
        active = fill_neighbours(problem.active, members, budget_of(problem.output.device).neighbours)
        return PairTable(targets.batch, targets.out, problem.weights[..., heads], heads, problem.members, active)

    def _plan(self, problem: ReplayProblem) -> tuple[list[SourceBlock], bool] | None:
        """The chunks of all pairs. None: folding would not pay."""
        targets, members, output = problem.targets, problem.members, problem.output
        fast = problem.ablation.bfloat16_changes and has_fast_bfloat16(output.device)
        largest = max((x.numel() for x in problem.site.layer.parameters if x.dim() == 2), default=1)
        # In bfloat16 the last matrix costs little, too.
        least = budget_of(output.device).rows_to_save(largest * (1 + fast))
        if len(targets) * members.shape[1] <= least:
            return None
        # A source whose vectors are folded for one target only gains nothing, and more for few only among many.
        most = int(targets.batch.bincount().max())
        heads, depth = int(problem.heads.sum()), problem.site.attention.values.shape[-1]
        if most <= 1 or (most <= heads and len(targets) * members.shape[1] <= heads * depth):
            return None
        return plan_chunks(
            self._table(problem), output.shape[-1], depth, problem.chunk_rows, problem.ablation.max_groups, least
        )
