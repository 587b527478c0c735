"""Packed pairs: after the attention each position is independent, so all pairs run as one long sequence.

The context of each pair is computed beforehand, and the attention answers it. The layer's own code does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.tensors import PROBE_STRENGTHS, first_tensor, for_query_heads, gather_rows, with_noise
from captum_vz._engine.numerics.tolerance import (
    CannotReplayError,
    check_against_changes,
    check_reproduced,
    is_cancelled,
    is_reproduced,
)
from captum_vz._engine.replay.base import ReplayChunk, ReplayProblem, pairs_at_a_time
from captum_vz._engine.replay.trust import is_independent
from captum_vz._engine.structure.dependence import projects_any_context, values_follow_token_order
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz._private import tree_map
from captum_vz.functional.interventions import ZeroValue, contexts_after

if TYPE_CHECKING:
    from captum_vz._engine.capture.records import AttentionRecord
    from captum_vz._engine.replay.base import ReplayProblem
    from captum_vz._engine.structure.site import AttentionSite

# How many targets run first where a replay is likely to fail.
FIRST_TARGETS = 8
# One unused row or more follow all others, up to a multiple of this number. The last rows of another number may be
# rounded in another way than the rest (by MKL if it is no multiple of 4). Unchanged rows would then seem to change.
BLOCK = 8
# The number of noisy positions in the test of independence. They are nine tenths of all positions of that run.
CROWD_SIZE = 60
# Room for a fixed number may suffice for this crowd, and not for a chunk. So where positions may compete, a crowd as
# large as a chunk is tested too. A chunk then has this many pairs, or this share of all pairs if that is more.
TESTED_PAIRS = 256
TESTED_SHARE = 0.25


class PackedReplay:
    """Runs all pairs as positions of one sequence, in chunks.

    Attributes:
        first_tensor_only: Whether only the first tensor of the layer's arguments holds one entry a position. A decoder
            whose sequence is as long as its encoder's has others of the same shape.
    """

    def __init__(self, first_tensor_only: bool = False) -> None:
        self.first_tensor_only = first_tensor_only
        self.name = "packed pairs, first tensor only" if first_tensor_only else "packed pairs"

    def fits(self, problem: ReplayProblem) -> bool:
        if problem.site.windows is not None:
            return False
        return not self.first_tensor_only or len(problem.site.layer.attentions) > 1

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        if not problem.trust.independent:
            tested = max(TESTED_PAIRS, int(TESTED_SHARE * problem.active.sum()))
            problem = replace(problem, chunk_rows=min(problem.chunk_rows, tested))
        pairs = packed_pairs(problem, self.first_tensor_only)
        targets, clean = problem.targets, problem.clean
        contexts = gather_rows(pairs.contexts, targets.batch, targets.out).flatten(1)
        # Of each target: the largest error with nothing zeroed, and the largest change by zeroing.
        error, change = clean.new_zeros(2, len(targets))

        def run(target: Tensor, context: Tensor, unchanged: Tensor) -> tuple[Tensor, Tensor]:
            """Outputs of targets with ablated contexts, and of `unchanged` targets with clean contexts.

            The latter must equal the recorded output. A layer that mixes positions reproduces its output on the
            sequence that it knows. So unchanged targets run before and after the pairs, together with other contexts.
            """
            unused = BLOCK - (len(target) + len(unchanged) + 2) % BLOCK
            first, last = unchanged[:1], unchanged[-1:].expand(unused)
            rows = torch.cat([first, target, last[:1], unchanged, last])  # by example
            context = torch.cat([contexts[first], context, -contexts[last[:1]], contexts[unchanged], -contexts[last]])
            answer = pairs.run(targets.batch[rows], targets.out[rows], context)
            before, answer, _, after, _ = answer.split([1, len(target), 1, len(unchanged), unused])
            check_reproduced(torch.cat([before, after]), clean[torch.cat([first, unchanged])])
            return answer, after

        # A few targets run before a whole chunk does, where the replay is likely to fail or no pair would show it.
        likely_to_fail = not problem.trust.independent or len(problem.site.layer.attentions) > 1
        if (len(targets) > 1 and likely_to_fail) or not problem.active.any():
            few = torch.arange(len(targets), device=contexts.device)[-FIRST_TARGETS:]
            run(few[:0], contexts[:0], few)
        for target, group in pairs_at_a_time(problem.active, problem.chunk_rows, problem.max_groups):
            if isinstance(problem.intervention, ZeroValue):
                left = contexts[target] - context_change(problem, target, group)
                cancelled = is_cancelled(left, contexts[target]).nonzero().flatten()
                if len(cancelled):
                    left[cancelled] = contexts_of_pairs(problem, target[cancelled], group[cancelled])
            else:
                left = contexts_of_pairs(problem, target, group)
            # All targets of the chunk run unchanged too. Where positions compete, only this shows it.
            unchanged, clean_row = target.unique(return_inverse=True)
            zeroed, again = run(target, left, unchanged)
            change.scatter_reduce_(0, target, (zeroed - again[clean_row]).abs().amax(-1), "amax")
            error.scatter_reduce_(0, unchanged, (again - clean[unchanged]).abs().amax(-1), "amax")
            yield ReplayChunk(target, group, zeroed, again, clean_row)
        check_against_changes(error, change, clean)


class PackedPairs:
    """Runs single positions of a layer with given contexts.

    If the attention module returned the context or its projection, the module is answered as a whole, unless
    `by_module` is False. If the module does more (ALBERT's norm and residual), its own code runs, and only the
    attention function inside is answered. Attentions before the one that is zeroed answer their clean output. Those
    after it really run, on the positions of one example at a time.
    """

    def __init__(self, site: AttentionSite, first_tensor_only: bool = False, by_module: bool = True) -> None:
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
        if by_module and attention.replaceable and attention.module is not layer.layer:
            self.answer = ModuleAnswer(attention)
            self.runner.replace_modules({attention.module: self.answer})
        else:
            self.answer = AnswerContext(attention.context.shape[2:])

    def run(self, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        """The layer's output `(n, d)` at positions `(batch, out)` with contexts `(n, head * d_head)`."""
        if self.later and len(batch):
            parts = batch.unique_consecutive(return_counts=True)[1].tolist()
            if len(parts) > 1:
                each = zip(batch.split(parts), out.split(parts), context.split(parts), strict=True)
                return torch.cat([self._run_filled(*part) for part in each])
        return self._run(batch, out, context)

    def _run_filled(self, *part: Tensor) -> Tensor:
        """The output of one example's positions, which unused rows follow, see `BLOCK`."""
        count = len(part[0])
        rows = torch.arange(count + BLOCK - count % BLOCK, device=part[0].device).clamp_max(count - 1)
        return self._run(*(x[rows] for x in part))[:count]

    def _run(self, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        arguments = tree_map(self._packing(batch, out), self.runner.arguments)
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

    def _packing(self, batch: Tensor, out: Tensor) -> Callable[[Any], Any]:
        """Takes positions `(batch, out)` of each tensor that has one entry a position: `(1, n, ...)`."""
        left = 1 if self.first_tensor_only else -1  # how many tensors may still be packed; -1: any number
        examples, _, tokens, _ = self.attention.shape

        def pack(value: Any) -> Any:
            nonlocal left
            if not isinstance(value, Tensor) or value.dim() < 2:
                return value
            rows = self.attention.batch_first(value)
            if left and rows.shape[1] == tokens and rows.shape[0] in (1, examples):
                left -= 1
                position = out if rows.shape[0] == 1 else batch * tokens + out
                return self.attention.batch_first(rows.flatten(0, 1).index_select(0, position)[None])
            if not self.later:
                return value
            # Later attentions really run, on positions of one example, with its own sources and its rows of a mask.
            if value.dim() == 4 and value.shape[2] == tokens and value.shape[0] in (1, examples):
                return value[int(batch[0]) if value.shape[0] == examples else 0][:, out][None]
            if examples > 1 and rows.shape[0] == examples:
                return self.attention.batch_first(rows[batch[:1]])
            return value

        return pack


def packed_pairs(problem: ReplayProblem, first_tensor_only: bool = False) -> PackedPairs:
    """Runs positions of the problem's layer, which is checked where it is not trusted.

    CannotReplayError: its values are permuted, or its positions depend on each other.
    """
    site = problem.site
    pairs = PackedPairs(site, first_tensor_only)
    if not problem.trust.library:
        if not values_follow_token_order(site.runner(), site.attention):
            raise CannotReplayError("its values stand in another order than its tokens")
        own_code = site.attention.module is site.layer.layer  # which runs in any case
        if not own_code and not projects_any_context(site.runner(), site.attention):
            pairs = PackedPairs(site, first_tensor_only, by_module=False)
    if not problem.trust.independent:
        _check_independent(pairs, problem)
    return pairs


def _check_independent(pairs: PackedPairs, problem: ReplayProblem) -> None:
    """Raise CannotReplayError if the last target depends on other positions of the same run."""
    batch, out = problem.targets.batch[-1:], problem.targets.out[-1:]
    context = gather_rows(pairs.contexts, batch, out).flatten(1)

    def run(strengths: Tensor) -> Tensor:
        count = len(strengths)
        answer = pairs.run(batch.expand(count), out.expand(count), with_noise(context.expand(count, -1), strengths))
        # Code from elsewhere may treat some places of a long run in its own way.
        alike = answer[(strengths == strengths[count // 2]) & (not problem.trust.library)]
        if not is_reproduced(alike, alike[:1].expand_as(alike)):
            raise CannotReplayError("a position depends on its place in the run")
        return answer

    clean = gather_rows(problem.output, batch, out)[0]
    counts = int(problem.active.sum()), len(problem.targets)
    largest = sum(min(problem.chunk_rows, count) for count in counts) + 2 * BLOCK + 2  # positions of a run
    independent = is_independent(run, clean, CROWD_SIZE)
    if independent and largest > CROWD_SIZE:
        independent = is_independent(run, clean, largest, PROBE_STRENGTHS[:1])
    if not independent:
        raise CannotReplayError("a position depends on other positions of the same run")


def context_change(problem: ReplayProblem, target: Tensor, group: Tensor) -> Tensor:
    """What each pair's context loses, the sum of weight times value over the group, `(n, head * d_head)`."""
    values = problem.site.attention.values.transpose(1, 2)  # (batch, in, key-value head, d_head)
    shared_by = problem.weights.shape[-1] // values.shape[2]
    batch = problem.targets.batch[target]
    change = values.new_zeros(())
    for number, source in enumerate(problem.members[batch, group].unbind(-1)):
        weight = problem.weights[target, source.clamp_min(0)] * (source >= 0)[:, None]
        value = values[batch, source.clamp_min(0)]
        lost = (weight.unflatten(-1, (-1, shared_by))[..., None] * value[:, :, None, :]).flatten(1)
        change = change + lost if number else lost
    return change


def contexts_of_pairs(problem: ReplayProblem, target: Tensor, group: Tensor) -> Tensor:
    """The contexts of pairs after the intervention, `(n, head * d_head)`, a group of one example at a time.

    Exact where little is left of a context. For zeroed values, `context_change` is faster.
    """
    attention, members = problem.site.attention, problem.members
    batch, out = problem.targets.batch[target], problem.targets.out[target]
    if attention.weights is None:
        raise CannotReplayError("its attention is computed inline, so its contexts cannot be computed")
    heads, sources = problem.site.shape.heads, problem.site.shape.sources
    contexts = attention.values.new_empty(len(target), heads, attention.values.shape[-1])
    number = batch * members.shape[1] + group
    for one in number.unique().tolist():
        pairs, (example, own_group) = number == one, divmod(one, members.shape[1])
        zeroed = torch.zeros(sources + 1, dtype=torch.bool, device=number.device)
        zeroed = zeroed.index_fill(0, members[example, own_group] % (sources + 1), True)[:-1] & problem.heads[:, None]
        own = slice(example, example + 1)
        weights = attention.weights[own, :, out[pairs]].to(attention.values.dtype)
        real = problem.site.source_mask[own]
        values = for_query_heads(attention.values[own], heads)
        changed = contexts_after(problem.intervention, weights, values, zeroed[None], real)
        contexts[pairs] = changed[0].transpose(0, 1)
    return contexts.flatten(1)


class _Answer:
    """Holds a context for the next run, and checks that the layer asks for it exactly once."""

    context: Tensor | None = None

    def take(self) -> Tensor:
        """The context, once."""
        if self.context is None:
            raise CannotReplayError("it asked for its attention more than once in one run")
        context, self.context = self.context, None
        return context

    def check_used(self) -> None:
        """Raise CannotReplayError unless the context was asked for."""
        if self.context is not None:
            raise CannotReplayError("it never asked for its attention's output")


class ModuleAnswer(nn.Module, _Answer):
    """Takes the place of the attention module, and returns its output for given contexts.

    With `projected`, what is given is the output itself.
    """

    def __init__(self, attention: AttentionRecord, projected: bool = False) -> None:
        super().__init__()
        self.attention = attention
        # In a tuple, so that it is not registered as a submodule.
        self.projection: tuple[Callable[[Tensor], Any], ...] = ()
        if attention.projection is not None and not projected:
            self.projection = (attention.projection,)
        returned = attention.output
        self.others = (None,) * (len(returned) - 1) if isinstance(returned, (tuple, list)) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = self.take()
        for projection in self.projection:
            output = first_tensor(projection(output))
        output = self.attention.batch_first(output)
        return output if self.others is None else (output, *self.others)


class AnswerContext(AttentionHandler, _Answer):
    """Answers the first attention call with a given context, and computes later ones."""

    def __init__(self, heads: Sequence[int]) -> None:
        self.heads = heads  # (head, d_head)

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if self.context is None:
            return call.compute(call.values)
        return self.take().unflatten(-1, tuple(self.heads)), None
