"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from captum_vz._engine.capture.interventions import AnswerContext, ModuleAnswer
from captum_vz._engine.capture.layer_runner import run_again, with_submodules_replaced, without_caches, without_hooks
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.matmul import OneDnnLinears
from captum_vz._engine.numerics.perturbation import is_independent, with_noise
from captum_vz._engine.numerics.tensors import describe, first_tensor, gather_rows
from captum_vz._engine.numerics.tolerance import (
    CannotReplay,
    SameAgainError,
    check_against_changes,
    check_reproduced,
    is_cancelled,
)
from captum_vz._engine.replay.base import (
    Ablation,
    TargetRows,
    active_groups,
    chunk_rows,
    context_change,
    context_without,
    empty_map,
    group_members,
    pairs_at_a_time,
    zeroed_heads,
    zeroed_weights,
)
from captum_vz._engine.replay.trust import each_module_runs_once, is_library_code, projects_any_context
from captum_vz._engine.structure.dependence import values_are_in_order
from captum_vz._engine.taps.handler import AttentionHandler, handled_by

# How many positions are the crowd that another is to hear nothing of: it fills nine tenths of all that run with it.
CROWD_SIZE = 60
# How many targets are replayed to see that they can be, before the pairs.
FEW = 8
# How many rows of no use stand behind all others: the last ones of a product may be rounded in another way than the
# rest, and what nothing changes would seem to change.
LAST = 8


class PackedPairs:
    """Replays single positions: `run(batch, out, context)` answers the layer's output for n of them.

    Where the attention module returned the context or its projection, that module is answered as a whole, unless
    `by_module` is off. Where it does more (ALBERT's norm and residual), its own code runs and only the attention
    function inside is answered.
    Attentions that ran before the one that is zeroed answer what they answered in the clean pass; those after it really
    run, on the positions of one example at a time.

    Attributes:
        known: Whether what the layer does is written in torch and transformers, and nowhere else, as far as was asked.
        apart: Whether, moreover, nothing in it is known to let positions compete.
    """

    known = False
    apart = False

    def __init__(
        self, recording: LayerRecord, call: AttentionRecord, only_first: bool = False, by_module: bool = True
    ) -> None:
        if call.context is None:
            raise CannotReplay("its attention is computed inline, out of sight")
        if any(one.parts > 1 for one in recording.calls):
            raise CannotReplay("its attention calls the attention function several times, each for some values")
        site = recording.calls.index(call)
        self.call = call
        self.arguments = without_caches((recording.args, recording.kwargs))
        self.only_first = only_first
        # To ask at each function costs time.
        fast = OneDnnLinears.gain(recording.parameters)
        self.around: Callable[[], AbstractContextManager[Any]] = OneDnnLinears if fast else nullcontext
        self.later = site + 1 < len(recording.calls)
        self.layer = without_hooks(recording.layer)
        self.earlier: list[tuple[ModuleAnswer, Tensor]] = []
        for before in recording.calls[:site]:
            clean = first_tensor(before.answer)
            if not before.answered or clean is None:
                raise CannotReplay("an attention before the one that is meant cannot be answered")
            answer = ModuleAnswer(before, projected=True)
            self.layer = with_submodules_replaced(self.layer, {before.module: answer})
            self.earlier.append((answer, before.batch_first(clean)))
        self.answer: ModuleAnswer | AnswerContext
        if by_module and call.answered and call.module is not recording.layer:
            self.answer = ModuleAnswer(call)
            self.layer = with_submodules_replaced(self.layer, {call.module: self.answer})
        else:
            self.answer = AnswerContext(call)

    def run(self, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        """The layer's output `(n, d)` at positions `(batch, out)` with attention contexts `(n, head * d_head)`."""
        if self.later and len(batch):
            parts = batch.unique_consecutive(return_counts=True)[1].tolist()
            if len(parts) > 1:
                each = zip(batch.split(parts), out.split(parts), context.split(parts), strict=True)
                return torch.cat([self._run(*part) for part in each])
        return self._run(batch, out, context)

    def _run(self, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        packed = _Packing(self.call, batch, out, self.only_first, self.later)
        args, kwargs = tree_map(packed, self.arguments)
        for answer, clean in self.earlier:
            answer.put(gather_rows(clean, batch, out)[None])
        self.answer.put(context[None])
        with handled_by(self.answer if isinstance(self.answer, AttentionHandler) else None), self.around():
            output = first_tensor(run_again(self.layer, args, kwargs))
        for asked in (self.answer, *(answer for answer, _ in self.earlier)):
            asked.check_used()
        if output is None or self.call.batch_first(output).shape[:2] != (1, len(batch)):
            raise CannotReplay(f"on {len(batch)} packed positions it returned {describe(output)}")
        return self.call.batch_first(output)[0]


class _Packing:
    """Takes positions `(batch, out)` of every tensor that has one entry a position: `(1, n, ...)`."""

    def __init__(self, call: AttentionRecord, batch: Tensor, out: Tensor, only_first: bool, later: bool) -> None:
        self.call = call
        self.batch = batch
        self.out = out
        self.left = 1 if only_first else -1  # how many tensors may still be packed; -1: any number
        self.later = later

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        batch, _, tokens, _ = self.call.size
        there = self.call.batch_first(value)
        if self.left and there.shape[1] == tokens and there.shape[0] in (1, batch):
            self.left -= 1
            position = self.out if there.shape[0] == 1 else self.batch * tokens + self.out
            return self.call.batch_first(there.flatten(0, 1).index_select(0, position)[None])
        if not self.later:
            return value
        # Attentions that really run, on positions of one example: its own sources, and its own rows of a mask.
        if value.dim() == 4 and value.shape[2] == tokens and value.shape[0] in (1, batch):
            own = value[int(self.batch[0]) if value.shape[0] == batch else 0]
            return own[:, self.out][None]
        if batch > 1 and there.shape[0] == batch:
            return self.call.batch_first(there[self.batch[:1]])
        return value


def packed_pairs(
    recording: LayerRecord, call: AttentionRecord, output: Tensor, batch: Tensor, out: Tensor, only_first: bool = False
) -> PackedPairs:
    """What replays packed positions of a layer, some of them being `(batch, out)`.

    Raises:
        CannotReplay: They cannot be told from what they are replayed beside, or by their sources.
    """
    replay = PackedPairs(recording, call, only_first)
    replay.known = is_library_code(recording)
    if not replay.known:
        if not values_are_in_order(recording, call):
            raise CannotReplay("its values stand in another order than its tokens")
        if not projects_any_context(recording, call):
            replay = PackedPairs(recording, call, only_first, by_module=False)
    replay.apart = replay.known and each_module_runs_once(recording)
    if not replay.apart:
        _check_apart(replay, call, output, batch, out)
    return replay


def _check_apart(replay: PackedPairs, call: AttentionRecord, output: Tensor, batch: Tensor, out: Tensor) -> None:
    """Raise CannotReplay if the last of positions `(batch, out)` hears others that run beside it."""
    assert call.context is not None  # PackedPairs saw to it
    one = batch[-1:], out[-1:]
    context = gather_rows(call.context, *one).flatten(1)

    def run(strengths: Tensor) -> Tensor:
        everyone = [x.expand(len(strengths)) for x in one]
        return replay.run(everyone[0], everyone[1], with_noise(context.expand(len(strengths), -1), strengths))

    if not is_independent(run, gather_rows(output, *one)[0], CROWD_SIZE):
        raise CannotReplay("what becomes of a position depends on others that run beside it")


def _packed_first(
    recording: LayerRecord, call: AttentionRecord, output: Tensor, zeroing: Ablation, targets: TargetRows
) -> Tensor:
    """Packed pairs, with the first tensor of the layer's arguments alone taken to hold one entry a position.

    Where a decoder's sequence is as long as its encoder's, the shapes of the others do not tell.
    """
    if len(recording.calls) == 1:
        raise SameAgainError
    return _packed_pairs(recording, call, output, zeroing, targets, only_first=True)


def _packed_pairs(
    recording: LayerRecord,
    call: AttentionRecord,
    output: Tensor,
    zeroing: Ablation,
    targets: TargetRows,
    only_first: bool = False,
) -> Tensor:
    members = group_members(call, zeroing)
    scores = empty_map(call, zeroing, members)
    replay = packed_pairs(recording, call, output, targets.batch, targets.out, only_first)
    assert call.context is not None  # PackedPairs saw to it
    rows = chunk_rows(recording, output)
    weights = zeroed_weights(call, zeroing, targets.sources, targets.batch, targets.out)  # (target, in, head)
    values = call.values.transpose(1, 2)  # (batch, in, key-value head, d_head)
    contexts = gather_rows(call.context, targets.batch, targets.out).flatten(1)

    outputs = gather_rows(output, targets.batch, targets.out)
    heads = zeroed_heads(call, zeroing.heads)
    lists = members[targets.batch]  # (target, group, member)
    active = active_groups(weights, lists)
    off, change = outputs.new_zeros(2, len(targets))  # of each target: unchanged, and what zeroing changes at most

    def run(target: Tensor, left: Tensor, unchanged: Tensor) -> tuple[Tensor, Tensor]:
        """What targets give with the contexts that are left, and what others give with nothing taken, which is checked.

        A layer that mixes positions reproduces its output on the sequence that it knows. So the latter run before the
        pairs and behind them, and there beside other contexts, of which they are to hear nothing.
        """
        first, last = unchanged[:1], unchanged[-1:].expand(LAST)
        everyone = torch.cat([first, target, last[:1], unchanged, last])  # by example
        context = torch.cat([contexts[first], left, -contexts[last[:1]], contexts[unchanged], -contexts[last]])
        answer = replay.run(targets.batch[everyone], targets.out[everyone], context)
        before, answer, _, again, _ = answer.split([1, len(target), 1, len(unchanged), LAST])
        check_reproduced(torch.cat([before, again]), outputs[torch.cat([first, unchanged])])
        return answer, again

    # Where it may well fail, sooner than in a whole chunk; and where there is no pair to show it.
    if (len(targets) > 1 and (not replay.apart or len(recording.calls) > 1)) or not active.any():
        few = torch.arange(len(targets), device=contexts.device)[-FEW:]
        run(few[:0], contexts[:0], few)
    for target, group in pairs_at_a_time(active, rows, zeroing.at_most):
        left = contexts[target] - context_change(weights, values, targets.batch, lists, target, group)
        anew = is_cancelled(left, contexts[target]).nonzero().flatten()
        if len(anew):
            of, lost = target[anew], lists[target[anew], group[anew]]
            left[anew] = context_without(call, heads, targets.batch[of], targets.out[of], lost)
        # All of the chunk's targets: where positions compete, as for experts of limited capacity, only it shows it.
        unchanged, which = target.unique(return_inverse=True)
        zeroed, again = run(target, left, unchanged)
        change.scatter_reduce_(0, target, (zeroed - again[which]).abs().amax(-1), "amax")
        off.scatter_reduce_(0, unchanged, (again - outputs[unchanged]).abs().amax(-1), "amax")
        clean = zeroing.measure.prepare(again)
        distance = zeroing.measure.between(zeroing.measure.prepare(zeroed), clean[which])
        scores[targets.batch[target], targets.place[target], group] = distance.to(scores)
    check_against_changes(off, change, outputs)
    return scores
