"""Packed pairs: after the attention each position is independent, so all pairs run as one long sequence.

The context of each pair is computed beforehand, and the attention answers it. The layer's own code does the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from captum_vz._engine.capture.layer_runner import AnswerContext, ModuleAnswer
from captum_vz._engine.numerics import first_tensor, for_query_heads, gather_rows, once_a_pass
from captum_vz._engine.numerics.tolerance import (
    CANCELLATION,
    PROBE_STRENGTHS,
    SMALL_STRENGTHS,
    CannotReplayError,
    error_among_changes,
    is_reproduced,
    refuse_difference,
    refuse_large_error,
    scale_of,
    with_noise,
)
from captum_vz._engine.replay import BLOCK, PackedChunk, ReplayChunk, ReplayProblem, run_with_noise
from captum_vz._engine.structure.modules import once_a_kind
from captum_vz._engine.taps.handler import AttentionHandler
from captum_vz._private import tree_map
from captum_vz.functional.interventions import ZeroValue, contexts_after

if TYPE_CHECKING:
    from captum_vz._engine.structure import AttentionSite

FIRST_TARGETS = 8  # how many targets run first where a replay is likely to fail
# The number of noisy positions in the test of independence. They are nine tenths of all positions of that run.
CROWD_SIZE = 60
# Room for a fixed number may suffice for this crowd, and not for a chunk. So where positions may compete, a crowd as
# large as a chunk is tested too. A chunk then has this many pairs, or this share of all pairs if that is more.
TESTED_PAIRS = 256
TESTED_SHARE = 0.25


class PackedReplay:
    """Runs all pairs as positions of one sequence, in chunks.

    With `first_tensor_only`, only the first tensor of the layer's arguments holds one entry a position. A decoder whose
    sequence is as long as its encoder's has others of the same shape.
    """

    def __init__(self, first_tensor_only: bool = False) -> None:
        self.first_tensor_only = first_tensor_only
        self.name = "packed pairs, first tensor only" if first_tensor_only else "packed pairs"

    def fits(self, problem: ReplayProblem) -> bool:
        if problem.site.windows is not None:
            return False
        return not self.first_tensor_only or len(problem.site.layer.attentions) > 1

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        asked, rows, count = problem.targets, problem.chunk_rows, problem.targets.count
        if not problem.independent:
            rows = min(rows, max(TESTED_PAIRS, int(TESTED_SHARE * count)))
            problem = replace(problem, chunk_rows=rows)
        run = ChunkRunner(problem, packed_pairs(problem, self.first_tensor_only))
        # The layers share the indices of a single chunk. Those of many would take the memory of the pairs themselves.
        shared = count <= rows and problem.asked.max_groups is None
        whole = [asked.only_chunk] if count and shared else []
        # A few targets run before a whole chunk does, where the replay is likely to fail or no pair would show it.
        if not count:
            self._run_few(problem, run)
        elif len(asked) > 1 and (not problem.independent or len(problem.site.layer.attentions) > 1):
            once_a_kind(problem.site.layer, (rows, count, self.name), self._run_few, problem, run)
        again: list[tuple[PackedChunk, Tensor]] = []
        for chunk in whole if shared else asked.chunks(rows, problem.asked.max_groups):
            if isinstance(problem.intervention, ZeroValue):
                yield run(chunk, lost=context_change(problem, chunk), shared=shared)
                problem.readings.add(run.cancelled.amax(), partial(_note_positive, again, (chunk, run.cancelled)))
            else:
                yield run(chunk, contexts_of_pairs(problem, chunk.target, chunk.group), shared=shared)
        share = error_among_changes(run.error, run.change, run.scale)
        problem.readings.add(share, partial(refuse_large_error, run.eps))
        problem.readings.read()
        # Where too little was left of a context, its other sources are summed. Few layers have such pairs.
        for chunk, cancelled in again:
            yield from exact_chunks(problem, run, chunk.target[cancelled > 0], chunk.group[cancelled > 0])

    @staticmethod
    def _run_few(problem: ReplayProblem, run: ChunkRunner) -> None:
        asked = problem.targets
        few = torch.arange(len(asked), device=asked.possible.device)[-FIRST_TARGETS:]
        run(asked.chunk(few[:0], few[:0], few))
        problem.readings.read()


def exact_chunks(problem: ReplayProblem, run: ChunkRunner, target: Tensor, group: Tensor) -> Iterator[ReplayChunk]:
    """Outputs of some pairs. The context of each is summed over the sources that are left."""
    for part in torch.stack([target, group]).split(problem.chunk_rows, dim=1):
        if part.shape[1]:
            yield run(problem.targets.chunk(*part), contexts_of_pairs(problem, *part))


def _note_positive(noted: list[Any], what: Any, number: float) -> None:
    if number > 0:
        noted.append(what)


class ChunkRunner:
    """Runs chunks of a problem, and keeps what the checks of the whole map need."""

    cancelled: Tensor  # above 0 for pairs of the last chunk of whose contexts too little was left, `(n,)`

    def __init__(self, problem: ReplayProblem, pairs: PackedPairs) -> None:
        self._problem, self._pairs = problem, pairs
        self._contexts = problem.targets.of(pairs.contexts).flatten(1)
        self._sizes = self._contexts.abs().amax(-1)
        self.scale = scale_of(problem.clean)  # the largest entry of each target's clean output, `(target,)`
        number = torch.finfo(self.scale.dtype)
        self.eps = number.eps
        self.error = torch.zeros_like(self.scale)  # the largest error of each target with nothing zeroed
        self.change = torch.full_like(self.scale, number.tiny)  # its largest change by zeroing

    def __call__(
        self, chunk: PackedChunk, contexts: Tensor | None = None, lost: Tensor | None = None, shared: bool = False
    ) -> ReplayChunk:
        """Outputs of the pairs with these `contexts`, or with contexts that have `lost` something, `(n, features)`.

        Rows that run unchanged must equal the recorded output.
        """
        problem, count = self._problem, len(chunk.target)
        given, unchanged = self._contexts.index_select(0, chunk.rows), None
        own = given[1 : 1 + count]
        if contexts is not None:
            own.copy_(contexts)
        elif lost is not None:
            unchanged = lost.abs().amax(-1) == 0
            own.sub_(lost)
            self.cancelled = torch.sub(self._sizes[chunk.target], own.abs().amax(-1), alpha=CANCELLATION)
            if chunk.alone is not None and problem.asked.heads is None:
                own.masked_fill_(chunk.alone, 0)
                self.cancelled = self.cancelled.masked_fill(chunk.alone[:, 0], 0)
        answer = self._pairs.run(chunk.batch, chunk.out, given.mul_(chunk.signs), shared)
        zeroed, found = answer[1 : 1 + count], answer.index_select(0, chunk.checked)
        error = (found - problem.clean.index_select(0, chunk.unchanged)).abs().amax(-1)
        share = (error / self.scale.index_select(0, chunk.unchanged)).amax()
        problem.readings.add(share, partial(refuse_difference, self.eps))
        self.error.scatter_reduce_(0, chunk.unchanged, error, "amax")
        again = found[1:]
        if count:
            change = (zeroed - again.index_select(0, chunk.clean_row)).abs().amax(-1)
            self.change.scatter_reduce_(0, chunk.target, change, "amax")
        return ReplayChunk(chunk.target, chunk.group, zeroed, again, chunk.clean_row, unchanged, shared)


class PackedPairs:
    """Runs single positions of a layer with given contexts.

    If the attention module returned the context or its projection, the module is answered as a whole. If the module
    does more (ALBERT's norm and residual), its own code runs, and only the attention function inside is answered.
    Attentions before the one that is zeroed answer their clean output. Those after it really run, on the positions of
    one example at a time.
    """

    def __init__(self, site: AttentionSite, first_tensor_only: bool = False) -> None:
        attention, layer = site.attention, site.layer
        if attention.context is None:
            raise CannotReplayError("its attention is computed inline, so its contexts cannot be read")
        if any(one.calls > 1 for one in layer.attentions):
            raise CannotReplayError("its attention calls the attention function several times, each for some values")
        number = layer.attentions.index(attention)
        self.contexts = attention.context  # (batch, out, head, d_head)
        self.attention = attention
        self.runner = site.runner()
        self.first_tensor_only = first_tensor_only
        self.later = number + 1 < len(layer.attentions)
        self._earlier: list[tuple[ModuleAnswer, Tensor]] = []
        for before in layer.attentions[:number]:
            clean = first_tensor(before.output)
            if not before.replaceable or clean is None:
                raise CannotReplayError("an attention before the one that is zeroed cannot be answered")
            answer = ModuleAnswer(before, projected=True)
            self.runner.replace_modules({before.module: answer})
            self._earlier.append((answer, before.batch_first(clean)))
        self.answer: ModuleAnswer | AnswerContext
        if attention.replaceable and attention.module is not layer.layer:
            self.answer = ModuleAnswer(attention)
            self.runner.replace_modules({attention.module: self.answer})
        else:
            self.answer = AnswerContext(attention.context.shape[2:])

    def run(self, batch: Tensor, out: Tensor, context: Tensor, shared: bool = False) -> Tensor:
        """The layer's output `(n, d)` at positions `(batch, out)` with contexts `(n, head * d_head)`.

        With `shared`, other layers run on the same positions. What they share is packed once.
        """
        if self.later and len(batch):
            parts = batch.unique_consecutive(return_counts=True)[1].tolist()
            if len(parts) > 1:
                each = zip(batch.split(parts), out.split(parts), context.split(parts), strict=True)
                outputs = []
                for part, count in zip(each, parts, strict=True):  # unused rows follow those of an example, see `BLOCK`
                    rows = torch.arange(count + BLOCK - count % BLOCK, device=batch.device).clamp_max(count - 1)
                    outputs.append(self._run(*(x[rows] for x in part))[:count])
                return torch.cat(outputs)
        return self._run(batch, out, context, shared)

    def _run(self, batch: Tensor, out: Tensor, context: Tensor, shared: bool = False) -> Tensor:
        arguments = tree_map(self._packing(batch, out, shared), self.runner.arguments)
        for answer, clean in self._earlier:
            answer.context = gather_rows(clean, batch, out)[None]
        self.answer.context = context[None]
        handler = self.answer if isinstance(self.answer, AttentionHandler) else None
        output = self.runner.run(handler, arguments)
        for asked in (self.answer, *(answer for answer, _ in self._earlier)):
            asked.check_used()
        output = self.attention.batch_first(output)
        if output.shape[:2] != (1, len(batch)):
            raise CannotReplayError(f"on {len(batch)} packed positions it returned a tensor {tuple(output.shape)}")
        return output[0]

    def _packing(self, batch: Tensor, out: Tensor, shared: bool) -> Callable[[Any], Any]:
        """Takes positions `(batch, out)` of each tensor that has one entry a position: `(1, n, ...)`."""
        left = 1 if self.first_tensor_only else -1  # how many tensors may still be packed; -1: any number
        examples, _, tokens, _ = self.attention.shape
        states = {id(x) for x in self.runner.states}  # each layer has its own

        def pack(value: Any) -> Any:
            nonlocal left
            if not isinstance(value, Tensor) or value.dim() < 2:
                return value
            rows = self.attention.batch_first(value)
            if left and rows.shape[1] == tokens and rows.shape[0] in (1, examples):
                left -= 1
                where = (out,) if rows.shape[0] == 1 else (batch, out)
                own = id(value) in states or not shared
                return (_packed if own else partial(once_a_pass, _packed))(value, self.attention.tokens_first, *where)
            if not self.later:
                return value
            # Later attentions really run, on positions of one example, with its own sources and its rows of a mask.
            if value.dim() == 4 and value.shape[2] == tokens and value.shape[0] in (1, examples):
                return value[int(batch[0]) if value.shape[0] == examples else 0][:, out][None]
            if examples > 1 and rows.shape[0] == examples:
                return self.attention.batch_first(rows[batch[:1]])
            return value

        return pack


def _packed(value: Tensor, tokens_first: bool, *where: Tensor) -> Tensor:
    """The entries of `value` at positions `(example, position)` or `(position,)`, as one sequence."""
    rows = value.transpose(0, 1) if tokens_first else value
    position = where[-1] if len(where) == 1 else where[0] * rows.shape[1] + where[1]
    packed = rows.flatten(0, 1).index_select(0, position)
    return packed[:, None] if tokens_first else packed[None]


def packed_pairs(problem: ReplayProblem, first_tensor_only: bool = False) -> PackedPairs:
    """Runs positions of the problem's layer, which is checked where it is not trusted.

    CannotReplayError: its values are permuted, or its positions depend on each other.
    """
    site = problem.site
    pairs = PackedPairs(site, first_tensor_only)
    if not problem.library and not site.follows_token_order():
        raise CannotReplayError("its values stand in another order than its tokens")
    if not problem.library:
        run = len(problem.targets), problem.targets.count, problem.chunk_rows, first_tensor_only
        once_a_kind(site.layer, run, _check_independent, pairs, problem)
    elif not problem.independent:  # by their numbers, experts of a library may make tokens compete
        _check_independent(pairs, problem)
    return pairs


def _check_independent(pairs: PackedPairs, problem: ReplayProblem) -> None:
    """Raise CannotReplayError if the last target depends on other positions of the same run.

    Experts of limited capacity make positions compete. To detect this, the target runs together with many identical
    positions of large norm, the crowd. It holds its clean context or small noise, because noise may choose an expert
    that no clean context chooses. It comes before and after the crowd, because capacity may be given in either order.
    """
    batch, out = problem.targets.batch[-1:], problem.targets.out[-1:]
    context, clean = (gather_rows(x, batch, out).flatten(1) for x in (pairs.contexts, problem.output))
    counts = problem.targets.count, len(problem.targets)
    largest = sum(min(problem.chunk_rows, count) for count in counts) + 2 * BLOCK + 2  # positions of a run
    crowds = [(CROWD_SIZE, strength) for strength in PROBE_STRENGTHS]
    crowds += [(largest, PROBE_STRENGTHS[0])] if largest > CROWD_SIZE else []
    tested, first = len(SMALL_STRENGTHS), None
    for size, strength in crowds:
        each = [*SMALL_STRENGTHS, *[strength] * size, *reversed(SMALL_STRENGTHS)]
        given = with_noise(context.expand(len(each), -1), torch.tensor(each, device=clean.device))
        answer = run_with_noise(partial(pairs.run, batch.expand(len(each)), out.expand(len(each)), given), strength)
        if answer is None:
            continue
        before, crowd, after = answer.split([tested, size, tested])
        # Code from elsewhere may treat some places of a long run in its own way.
        if not problem.library and not is_reproduced(crowd, crowd[:1].expand_as(crowd)):
            raise CannotReplayError("a position depends on its place in the run")
        first = torch.cat([clean, before[1:]]) if first is None else first
        if not (is_reproduced(before, first) and is_reproduced(after.flip(0), first)):
            raise CannotReplayError("a position depends on other positions of the same run")


def context_change(problem: ReplayProblem, chunk: PackedChunk) -> Tensor:
    """What each pair's context loses, the sum of weight times value over the group, `(n, head * d_head)`."""
    known, values, (batch, out) = problem.site.attention.weights, problem.site.attention.values, chunk.position
    shared_by, terms = problem.site.shape.heads // values.shape[1], []
    for source, there in chunk.sources:
        if isinstance(known, Tensor):
            weight = known[batch, :, out, source].to(values.dtype)  # (n, head)
        else:
            weight = problem.clean_weights[chunk.target, :, source].to(values.dtype)
        weight = weight if problem.asked.heads is None else weight * problem.heads
        weight = weight if there is None else weight * there
        value = values[batch, :, source]  # (n, key-value head, d_head)
        if shared_by == 1:
            terms.append((weight[..., None] * value).flatten(1))
        else:
            terms.append((weight.unflatten(1, (-1, shared_by, 1)) * value.unsqueeze(2)).flatten(1))
    return functools.reduce(torch.add, terms)


def contexts_of_pairs(problem: ReplayProblem, target: Tensor, group: Tensor) -> Tensor:
    """The contexts of pairs after the intervention, `(n, head * d_head)`, a group of one example at a time.

    Exact where little is left of a context. For zeroed values, `context_change` is faster.
    """
    heads, groups, values = problem.site.shape.heads, problem.targets.members.shape[1], problem.site.attention.values
    contexts = values.new_empty(len(target), heads, values.shape[-1])
    number = problem.targets.batch[target] * groups + group
    for one in number.unique().tolist():
        pairs, (example, own_group) = number == one, divmod(one, groups)
        zeroed = (problem.group_of[example] == own_group) & problem.heads[:, None]
        own = slice(example, example + 1)
        weights = problem.clean_weights[target[pairs]].transpose(0, 1).contiguous()[None]
        given = weights.to(values.dtype), for_query_heads(values[own], heads), zeroed[None]
        changed = contexts_after(problem.intervention, *given, problem.site.source_mask[own])
        contexts[pairs] = changed[0].transpose(0, 1)
    return contexts.flatten(1)
