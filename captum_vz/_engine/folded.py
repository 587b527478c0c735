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

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from captum_vz._engine.answers import Answers, Clean, First, Last, add_sums, by_group
from captum_vz._engine.blocks import Block, Chunk, Pairs, blocks
from captum_vz._engine.products import STEP, FastProducts, Product, padded
from captum_vz._engine.recording import AttentionCall, Recording
from captum_vz._engine.replay import ModuleAnswer, NotReproducedError, PackedPairs, TooFewError, check_reproduced
from captum_vz._engine.shapes import Norm, Shape, Trace, matrix, replace_forward


class FoldedPairs:
    """Runs pairs: `run()` gives `(target, group, moved (n, d))`, so many pairs at a time as fit into `rows`.

    What it gives is to be used before the next is asked for, which takes its place. With `fast`, what changes goes
    through the matrices in bfloat16 and is added to what does not: it is rounded beside the change, not the output.
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
    ) -> None:
        general = PackedPairs(recording, call)
        assert call.context is not None  # PackedPairs saw to it
        if not isinstance(general.answer, ModuleAnswer) or general.later:
            raise NotReproducedError("its attention module is not answered as a whole, or another one follows")
        self.pairs = pairs
        self.fast = fast
        self.dtype = torch.bfloat16 if fast else output.dtype  # in which what changes is multiplied
        self.values = call.values.transpose(1, 2)  # (batch, in, key-value head, d_head)
        self.shared_by = call.size[1] // self.values.shape[2]
        self.outputs = output[pairs.batch, pairs.out]
        # So many that, with the two known ones, products need no padding.
        chunk = rows if rows < STEP else padded(rows + 2) - 2
        self.blocks, self.composed = blocks(pairs, output.shape[-1], self.values.shape[-1], chunk, at_most)
        sizes = [len(chunk.target) for block in self.blocks for chunk in block.chunks]
        self.rows, self.longest = sum(sizes), max(sizes)
        self.vectors = sum(len(block.source) for block in self.blocks if block.folded) * len(pairs.heads)
        contexts = call.context.flatten(2)[pairs.batch, pairs.out]
        with FastProducts():
            shape = self._trace(Trace(general), call, contexts, rows)
            self.base = self.outputs if self.answers is None else shape.projection(contexts)
        self.changed = self.outputs.new_empty(self.longest, self.projection.shape[-1])
        if self.answers is not None:
            self.replay = self._folded(PackedPairs(recording, call), shape, self.answers)

    def run(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Raises NotReproducedError where a chunk is not confirmed by the general way."""
        probes = iter(self.probes)
        for block in self.blocks:
            values = self._head_values(block.batch, block.source)[:, self.pairs.heads]
            vectors = (values.transpose(0, 1) @ self.projection).transpose(0, 1).flatten(0, 1)  # (member * head, d)
            if self.answers is not None:
                self.answers.fold(block, vectors, values)
            for chunk in block.chunks:
                moved = self._moved(chunk, vectors)
                clean = self.outputs[chunk.target[-2:]]
                check_reproduced(moved[-2:-1], clean[:1])
                _check_change(moved[-1:], next(probes)[None], clean[1:], self.dtype)
                yield chunk.target[:-2], chunk.group[:-2], moved[:-2]

    def _trace(self, trace: Trace, call: AttentionCall, contexts: Tensor, rows: int) -> Shape:
        """Run all targets, clean and changed, and each chunk's last row the general way; keep what the fast needs."""
        pairs, count = self.pairs, len(contexts)
        last = torch.stack([chunk.target[-1] for block in self.blocks for chunk in block.chunks])
        taken = torch.stack([self._taken(block, chunk) for block in self.blocks for chunk in block.chunks])
        target = torch.cat([torch.arange(count, device=last.device), last])
        clean_and_known = torch.cat([contexts, contexts[last] - taken])
        shape: Shape | None = None
        answers, seen = [], list[dict[nn.Module, tuple[Tensor, Tensor]]]()
        for part in torch.arange(len(target), device=target.device).split(rows):
            part = torch.cat([part, part[-1:]])
            context = clean_and_known[part]
            context[-1] = torch.nan
            answers.append(trace.run(pairs.batch[target[part]], pairs.out[target[part]], context)[:-1])
            shape = shape or trace.shape(call, context)
            seen.append({module: trace.of(module) for module in shape.known(self.fast)})
        assert shape is not None
        answer = torch.cat(answers)
        check_reproduced(answer[:count], self.outputs)
        self.probes = answer[count:]

        def known(module: nn.Module) -> tuple[Tensor, Tensor]:  # its input and output for the clean targets
            inputs, outputs = ([one[module][which][:-1] for one in seen] for which in (0, 1))
            return torch.cat(inputs)[:count], torch.cat(outputs)[:count]

        # What a context loses is to reach the residual stream as it is, at each target: a layer may switch some off.
        if shape.norm is None:
            clean, run = self.outputs, trace.run
        else:
            clean, run = known(shape.norm.module)[0], partial(trace.run_until, shape.norm.module)
        less = contexts - taken[:1]
        parts = torch.arange(count, device=target.device).split(rows)
        changed = torch.cat([run(pairs.batch[part], pairs.out[part], less[part]) for part in parts])
        weight = matrix(shape.projection)
        assert weight is not None
        _check_change(changed, clean - taken[:1] @ weight, clean)
        self.projection = weight.unflatten(0, (call.size[1], -1))[pairs.heads]  # (head, d_head, d)
        if not self.projection.abs().amax():  # in a fifth of the time that any() takes
            raise TooFewError("the projection of these heads is zero: nothing is to move, not even by rounding")
        self.answers: Answers | None = None
        if shape.norm is not None:
            scale = shape.norm.scale(clean)
            firsts = [self._first(shape.norm, scale, module, known(module)[1]) for module in shape.linears]
            lasts = [self._last(module, known(module) if self.fast else None) for module in shape.lasts]
            self.answers = Answers(shape.norm, firsts, lasts)
        return shape

    def _first(self, norm: Norm, scale: Tensor, module: nn.Module, result: Tensor) -> First:
        """A first matrix and its `result` for the clean targets, of whose norm the `scale` is given."""
        weight, constant = matrix(module), module(norm.beta[None])
        assert weight is not None
        base = (result - constant) / scale
        room = base.new_empty(padded(self.longest), base.shape[1])
        directions = norm.direction(self.projection).flatten(0, 1)
        product = Product(weight.to(self.dtype), count=len(directions) if self.composed else self.vectors)
        composed = None
        if self.composed:
            composed = product(directions.to(self.dtype)).to(base.dtype).unflatten(0, self.projection.shape[:2])
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
        if replay.answer.projection:
            replay.answer.projection = ()
        else:
            replace_forward(replay, shape.projection, lambda projected: projected)
        replace_forward(replay, answers.norm.module, answers.normed)
        for number, first in enumerate(answers.firsts):
            replace_forward(replay, first.module, partial(answers.first, number))
        for number, last in enumerate(answers.lasts):
            replace_forward(replay, last.module, partial(answers.last, number))
        for module, activation in shape.activations:
            replace_forward(replay, module, partial(answers.activated, activation))
        replay.around = nullcontext  # products are answered, and to ask at every other function costs time
        return replay

    def _moved(self, chunk: Chunk, vectors: Tensor) -> Tensor:
        """The layer's output `(n + 2, d)`."""
        pairs = self.pairs
        members = pairs.members[pairs.batch[chunk.target], chunk.group].clamp_min(0)
        shares = -pairs.weights[chunk.target[:, None], members].flatten(1)
        shares[-2], shares[-1] = 0, -1
        changed = self.changed[: len(chunk.target)]
        for span in chunk.spans:
            rows = by_group(span, changed).copy_(self.base[span.targets])
            add_sums(span, shares, vectors, rows)
        if self.answers is None:
            return changed
        self.answers.chunk, self.answers.shares = chunk, shares
        return self.replay.run(pairs.batch[chunk.target], pairs.out[chunk.target], changed)

    def _head_values(self, batch: Tensor, source: Tensor) -> Tensor:
        """The values of all query heads, `(member, head, d_head)`."""
        return self.values[batch, source].repeat_interleave(self.shared_by, dim=1)

    def _taken(self, block: Block, chunk: Chunk) -> Tensor:
        """What the context of a chunk's last row loses, `(head * d_head)`."""
        heads, mine = self.pairs.heads, chunk.spans[-1].vectors
        members = slice(mine.start // len(heads), mine.stop // len(heads))
        values = self._head_values(block.batch[members], block.source[members]).sum(0)
        return torch.zeros_like(values).index_copy(0, heads, values[heads]).flatten()


def _check_change(moved: Tensor, expected: Tensor, clean: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise NotReproducedError unless `moved` equals `expected`, seen from `clean` `(n, d)`, but for rounding."""
    eps = torch.finfo(clean.dtype).eps
    # A product of bfloat16 is off by some eps of it, other sums by hundreds.
    share = 8 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else eps**0.6
    bound = share * (expected - clean).abs().amax(-1) + 64 * eps * expected.abs().amax(-1)
    error = (moved - expected).abs().amax(-1)
    if not (error <= bound).all():
        raise NotReproducedError(f"zeroing a value the fast way differs by {error.max():.1e} from the general way")
