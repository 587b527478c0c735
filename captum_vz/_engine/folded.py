"""The fast lane: the first matrices behind the attention are applied to sources, not to pairs.

Zeroing source j takes u_ij = sum_h a_hij f_h(j) from the residual stream p_i, with f_h(j) = W_O^h v_j^h. What the
feed-forward's first matrix W makes of the norm n(p - u) is affine in u, up to the norm's scale s(p - u):

    W n(p_i - u_ij) = s(p_i - u_ij) (W g(p_i) - sum_h a_hij W g(f_h(j))) + W beta

with g the linear part of the norm. W_O and W act on the (source, head) vectors f_h(j), few as they are; a pair pays a
sum over heads, the activation and the last matrix. Everything else is the layer's own code, as in `PackedPairs`, with
the projection and the first matrices answered. An optimisation only: where the layer is of another shape, the general
way does not confirm it, or there are too few pairs to gain by it, NotReproducedError says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from captum_vz._engine.answers import NEARLY_LOST, Answers, Clean, First, Last, add_sums
from captum_vz._engine.blocks import Block, Chunk, Pairs, blocks
from captum_vz._engine.packing import packed_pairs
from captum_vz._engine.products import FastProducts, Product, padded
from captum_vz._engine.recording import AttentionCall, Recording, at
from captum_vz._engine.replay import ModuleAnswer, NotReproducedError, PackedPairs, TooFewError, nearly_all_is_lost
from captum_vz._engine.shapes import Norm, Shape, Trace, matrix, replace_forwards
from captum_vz._engine.watching import is_hooked
from captum_vz._engine.weights import for_query_heads

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
        recording: Recording,
        call: AttentionCall,
        output: Tensor,
        pairs: Pairs,
        rows: int,
        at_most: int | None,
        fast: bool = False,
        least: int = 0,
    ) -> None:
        self.blocks, self.composed = blocks(pairs, output.shape[-1], call.values.shape[-1], rows, at_most, least)
        general = packed_pairs(recording, call, output, pairs.batch, pairs.out)
        assert call.context is not None  # PackedPairs saw to it
        if not isinstance(general.answer, ModuleAnswer) or general.later:
            raise NotReproducedError("its attention module is not answered as a whole, or another one follows")
        self.known = general.known
        self.pairs = pairs
        self.fast = fast
        self.dtype = torch.bfloat16 if fast else output.dtype  # in which what changes is multiplied
        self.values = call.values.transpose(1, 2)  # (batch, in, key-value head, d_head)
        self.heads = call.size[1]
        self.outputs = at(output, pairs.batch, pairs.out)
        sizes = [len(chunk.target) for block in self.blocks for chunk in block.chunks]
        self.rows, self.longest = sum(sizes), max(sizes)
        self.vectors = sum(block.folded for block in self.blocks) * len(pairs.heads)
        contexts = at(call.context, pairs.batch, pairs.out).flatten(1)
        shape = self._trace(Trace(general), recording, call, contexts, rows)
        with FastProducts():
            self.base = self.outputs if self.answers is None else shape.projection(contexts)
        self.changed = self.outputs.new_empty(self.longest, self.projection.shape[-1])
        if self.answers is not None:
            self.replay = self._folded(PackedPairs(recording, call), shape, self.answers)

    def run(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Raises NotReproducedError where a chunk is not confirmed by the clean outputs and by the general way."""
        rounding = _rounding(self.outputs, torch.zeros_like(self.outputs))
        probes = zip(self.probes, self.rounding, strict=True)
        for block in self.blocks:
            values = self._head_values(block.batch, block.source)[:, self.pairs.heads]
            vectors = (values.transpose(0, 1) @ self.projection).transpose(0, 1).flatten(0, 1)  # (member * head, d)
            if self.answers is not None and block.folded:
                self.answers.fold(vectors[: block.folded * len(self.pairs.heads)], values[: block.folded])
            for chunk in block.chunks:
                moved, pairs, (probe, of_probe) = self._moved(chunk, vectors), chunk.pairs, next(probes)
                expected = torch.cat([self.outputs[chunk.clean], probe[None]])
                _check(moved[pairs:], expected, torch.cat([rounding[chunk.clean], of_probe[None]]))
                yield chunk.target[:pairs], chunk.group[:pairs], moved[:pairs]

    def _trace(self, trace: Trace, recording: Recording, call: AttentionCall, contexts: Tensor, rows: int) -> Shape:
        """Run a few targets and each chunk's last row the general way, and learn from them what the fast needs."""
        pairs, count = self.pairs, len(contexts)
        last = torch.stack([chunk.target[-1] for block in self.blocks for chunk in block.chunks])
        taken = torch.stack([self._taken(block, chunk) for block in self.blocks for chunk in block.chunks])
        few = torch.linspace(count - 1, 0, min(count, FEW), dtype=torch.float64, device=last.device).long()
        target = torch.cat([few, last])
        clean_and_known = torch.cat([contexts[few], contexts[last] - taken])
        shape: Shape | None = None
        answers = []
        for part in torch.arange(len(target), device=target.device).split(rows):
            part = torch.cat([part, part[-1:]])
            context = clean_and_known[part]
            context[-1] = torch.nan
            answers.append(trace.run(pairs.batch[target[part]], pairs.out[target[part]], context)[:-1])
            shape = shape or trace.shape(call, context)
        assert shape is not None
        self.probes = torch.cat(answers)[len(few) :]  # what the last row of each chunk should give
        self.rounding = _rounding(self.probes, self.outputs[last], self.dtype)

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
        _check(changed, expected, _rounding(expected, clean))
        self.projection = weight.unflatten(0, (call.size[1], -1))  # (head, d_head, d)
        if len(pairs.heads) < call.size[1]:
            self.projection = self.projection[pairs.heads]
        if not self.projection.abs().amax():  # in a fifth of the time that any() takes
            raise TooFewError("the projection of these heads is zero: nothing is to move, not even by rounding")
        self.answers: Answers | None = None
        self.clean = clean  # what the norm is given, of each target
        if shape.norm is None and not self.known:
            raise NotReproducedError("what becomes of the attention's output is the layer's own, and not checked")
        if shape.norm is not None:
            scale = shape.norm.scale(clean)
            made = partial(self._in_the_pass, recording, call)
            firsts = [self._first(shape.norm, scale, module, made(module, 1)) for module in shape.linears]
            lasts = [self._last(m, (made(m, 0), made(m, 1)) if self.fast else None) for m in shape.lasts]
            self.answers = Answers(shape.norm, scale, firsts, lasts)
        return shape

    def _in_the_pass(self, recording: Recording, call: AttentionCall, module: nn.Module, which: int) -> Tensor:
        """A module's input (0) or output (1) for each target in the clean pass, `(target, features)`.

        What is made of it is checked: each target runs in some chunk with nothing taken.
        """
        batch, _, tokens, _ = call.size
        size = (tokens, batch) if call.sequence_first else (batch, tokens)
        made = recording.made.get(id(module))
        if made is None or made[which].value.shape[:-1].numel() != batch * tokens:
            raise NotReproducedError("a module behind the attention did not run once on each position")
        if not made[which].is_as_it_was():
            raise NotReproducedError("what a module made was changed in place")
        return at(call.batch_first(made[which].value.reshape(*size, -1)), self.pairs.batch, self.pairs.out)

    def _first(self, norm: Norm, scale: Tensor, module: nn.Module, result: Tensor) -> First:
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
        return First(module, product, composed, base, constant, room)

    def _last(self, module: nn.Module, clean: tuple[Tensor, Tensor] | None) -> Last:
        """A later matrix, and what it was given for the clean targets and made of that, if only changes go through."""
        weight = matrix(module)
        assert weight is not None
        if clean is None:
            bias = module.bias if isinstance(module.bias, Tensor) else None
            return Last(module, Product(weight, bias, self.rows), None)
        change = clean[0].new_zeros(padded(self.longest), clean[0].shape[1], dtype=self.dtype)
        return Last(module, Product(weight.to(self.dtype), count=self.rows), Clean(*clean, change))

    def _folded(self, replay: PackedPairs, shape: Shape, answers: Answers) -> PackedPairs:
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
            raise NotReproducedError("a module behind the attention has a hook, which would not be called")
        replace_forwards(replay, forwards)
        replay.around = nullcontext  # products are answered, and to ask at every other function costs time
        return replay

    def _moved(self, chunk: Chunk, vectors: Tensor) -> Tensor:
        """The layer's output `(row, d)`."""
        pairs = self.pairs
        batch, out = (x.index_select(0, chunk.target) for x in (pairs.batch, pairs.out))
        members = at(pairs.members, batch, chunk.group).clamp_min(0)
        shares = at(pairs.weights, chunk.target[:, None], members).flatten(1).neg_()
        shares[chunk.pairs : -1], shares[-1] = 0, -1
        changed = torch.index_select(self.base, 0, chunk.target, out=self.changed[: len(chunk.target)])
        for span, rows, share in zip(chunk.spans, chunk.by_span(changed), chunk.by_span(shares), strict=True):
            add_sums(rows, share, vectors[span.vectors])
        if self.answers is None:
            if nearly_all_is_lost(changed, self.base.index_select(0, chunk.target))[: chunk.pairs].any():
                raise NotReproducedError(NEARLY_LOST)
            return changed
        self.answers.chunk, self.answers.shares = chunk, shares
        if not self.known:  # it may cut what no clean one reaches
            self.answers.expected = changed + (self.clean - self.base).index_select(0, chunk.target)
        return self.replay.run(batch, out, changed)

    def _head_values(self, batch: Tensor, source: Tensor) -> Tensor:
        """The values of all query heads, `(member, head, d_head)`."""
        return for_query_heads(self.values[batch, source], self.heads)

    def _taken(self, block: Block, chunk: Chunk) -> Tensor:
        """What the context of a chunk's last row loses, `(head * d_head)`."""
        heads, mine = self.pairs.heads, chunk.spans[-1].vectors
        members = slice(mine.start // len(heads), mine.stop // len(heads))
        values = self._head_values(block.batch[members], block.source[members]).sum(0)
        return torch.zeros_like(values).index_copy(0, heads, values[heads]).flatten()


def _rounding(expected: Tensor, clean: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """By how much a run may miss what is `expected (n, d)`, seen from `clean`: by rounding, of each position's size."""
    eps = torch.finfo(clean.dtype).eps
    # A product of bfloat16 is off by some eps of it, other sums by hundreds.
    share = 8 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else eps**0.6
    return share * (expected - clean).abs().amax(-1) + 64 * eps * expected.abs().amax(-1)


def _check(moved: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Raise NotReproducedError unless `moved` is `expected (n, d)` but for `bound (n)`."""
    error = (moved - expected).abs().amax(-1)
    if not (error <= bound).all():
        raise NotReproducedError(f"the fast way differs by {error.max():.1e} from the general way")
