"""How far each output of a layer moves when a source's value is zeroed: the map of one recorded layer."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz._engine.blocks import Pairs
from captum_vz._engine.chunks import fitting, neighbours, rows_to_save
from captum_vz._engine.folded import FoldedPairs
from captum_vz._engine.origins import are_in_order
from captum_vz._engine.packing import code_is_known, has_no_experts, packed_pairs
from captum_vz._engine.precision import is_half, multiplies_halves_fast, rerun_in_float32
from captum_vz._engine.recording import AttentionCall, Recording, at, first_tensor
from captum_vz._engine.replay import (
    FAILURES,
    NotReproducedError,
    SameAgainError,
    TooFewError,
    check_against_changes,
    check_reproduced,
    nearly_all_is_lost,
)
from captum_vz._engine.streams import as_one_vector
from captum_vz._engine.whole_sequences import ENOUGH, InItsBatch, WholeSequences
from captum_vz._engine.windows import is_reordered, over_positions
from captum_vz._engine.zeroing import (
    Measure,
    Targets,
    Zeroing,
    active_groups,
    empty_map,
    evened,
    group_members,
    left_context,
    lost_context,
    pairs_at_a_time,
    wanted_targets,
    zeroed_heads,
    zeroed_weights,
)

# How many targets are replayed to see that they can be, before the pairs.
FEW = 8
# How many rows of no use stand behind all others: the last ones of a product may be rounded in another way than the
# rest, and what nothing changes would seem to change.
LAST = 8
# How many whole sequences of the first chunk are run by themselves as well.
ALONE = 4
# By how many units in the last place rounding may move what a layer returns: more than it does, lest it be overlooked.
ROUNDINGS = 5


def value_zeroing_map(recording: Recording, call: AttentionCall, zeroing: Zeroing) -> tuple[Tensor, int]:
    """The raw distances of one layer, `(batch, row, group)`; padded rows and sources are 0.

    And how many rows change, but by no more than rounding may: where what a layer adds is a millionth of what it
    carries on, their scores say nothing.
    """
    name = recording.name
    if call.streams is not None:
        recording = as_one_vector(recording, call.streams)
    output = _output(recording, call)
    assert output is not None  # attention_call saw to it
    assert output.abs().amax().isfinite(), (
        f"{name} returned values that are not finite (NaN or infinity) in {output.dtype}; no distance can be taken of "
        "them. float16 overflows above 65504: load the model in bfloat16 or float32, and check its weights and inputs."
    )
    assert not recording.state.drew_lots_in_training(), (
        f"The layer {name} draws random numbers, so that no two runs of it agree: call model.eval() first."
    )
    if not is_half(recording):
        return _replayed(recording, call, output, zeroing)
    site = 0 if call.windows is not None else recording.calls.index(call)
    notes = recording.notes
    recording.made.clear()  # in half precision, of no use
    recording = rerun_in_float32(recording)
    recording.notes = notes
    with torch.autocast(output.device.type, enabled=False):
        again = recording.calls[site]
        again = again if call.windows is None else over_positions(recording, again)
        again.streams = call.streams
        output = _output(recording, again)
        assert output is not None
        return _replayed(recording, again, output, zeroing)


def _rounding(clean: Tensor, measure: Measure) -> Tensor:
    """The distance by which rounding alone may move outputs `(n, d)`, `(n)`."""
    prepared, rounded = measure.prepare(torch.cat([clean, _rounded(clean)])).chunk(2)
    return measure.between(_rounded(rounded), prepared)  # for what the measure makes of them is rounded as well


def _rounded(x: Tensor) -> Tensor:
    """`x` with all its entries off by rounding, every second in the other direction."""
    share = ROUNDINGS * torch.finfo(x.dtype).eps
    factors = x.new_full(x.shape[-1:], 1 + share)
    factors[1::2] = 1 - share
    return x * factors


def _replayed(recording: Recording, call: AttentionCall, output: Tensor, zeroing: Zeroing) -> tuple[Tensor, int]:
    targets = wanted_targets(recording, call, zeroing)
    if not len(targets):
        return empty_map(call, zeroing, group_members(call, zeroing)), 0
    # First: what the user's own functions raise is to be told as it is, and not as a layer's failure.
    rounding = _rounding(at(output, targets.batch, targets.out), zeroing.measure)
    scores = _scores(recording, call, output, zeroing, targets)
    largest = scores.amax(-1)[targets.batch, targets.place]
    return scores, int(((largest > 0) & (largest < rounding.to(largest))).sum())


def _scores(recording: Recording, call: AttentionCall, output: Tensor, zeroing: Zeroing, targets: Targets) -> Tensor:
    reasons = []
    for way in WAYS if call.windows is None else (_folded_pairs, _in_windows):
        try:
            return way(recording, call, output, zeroing, targets)
        # A layer that does not fit a way can fail in it in any manner; the next way, or the error below, answers.
        except FAILURES as error:
            if way is _folded_pairs:  # a faster form of the next way, whose reason is the one that counts
                if zeroing.fast and not isinstance(error, TooFewError):
                    room = isinstance(error, torch.OutOfMemoryError)
                    why = "found no memory for" if room else "knows no shape like that of"
                    recording.notes.append(f"precision='fast' {why} {recording.name}, computed exactly")
            elif isinstance(error, torch.OutOfMemoryError):
                raise
            elif not isinstance(error, SameAgainError):
                reasons.append(f"{way.__name__.strip('_').replace('_', ' ')}: {error}")
    raise AssertionError(
        f"The layer {recording.name} cannot be replayed: run again on its own clean input, it does not "
        f"return its clean output, so that no distance could be trusted. Tried {'; '.join(reasons)}. Pass a single "
        "Transformer block in eval mode, whose output at each token depends on its input alone."
    )


def _output(recording: Recording, call: AttentionCall) -> Tensor | None:
    """The layer's hidden states, `(batch, out, d)`."""
    output = first_tensor(recording.output)
    if output is not None and call.windows is not None:
        return call.windows.by_position(output)
    return output if output is None else call.batch_first(output)


def _packed_first(
    recording: Recording, call: AttentionCall, output: Tensor, zeroing: Zeroing, targets: Targets
) -> Tensor:
    """Packed pairs, with the first tensor of the layer's arguments alone taken to hold one entry a position.

    Where a decoder's sequence is as long as its encoder's, the shapes of the others do not tell.
    """
    if len(recording.calls) == 1:
        raise SameAgainError
    return _packed_pairs(recording, call, output, zeroing, targets, only_first=True)


def _folded_pairs(
    recording: Recording, call: AttentionCall, output: Tensor, zeroing: Zeroing, targets: Targets
) -> Tensor:
    """The same numbers as `_packed_pairs`, faster: for layers of a known shape, and rows enough to gain by it."""
    if call.weights is None:
        raise NotReproducedError("its attention is computed inline, out of sight")
    fast = zeroing.fast and multiplies_halves_fast(output.device)
    if zeroing.fast and not fast:
        recording.notes.append(f"precision='fast' found no fast bfloat16 on {output.device}, computed exactly")
    largest = max((parameter.numel() for parameter in recording.parameters if parameter.dim() == 2), default=1)
    least = rows_to_save(output, largest * (1 + fast))  # in bfloat16 the last matrix costs little, too
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
    active = evened(changes, lists, neighbours(changes))
    pairs = Pairs(targets.batch, targets.out, weights[..., heads], heads, members, active)
    rows = _chunk_rows(recording, output)
    folded = FoldedPairs(recording, call, output, pairs, rows, zeroing.at_most, fast, least)
    clean = zeroing.measure.prepare(folded.outputs)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for target, group, moved in folded.run():
        distance = zeroing.measure.between(zeroing.measure.prepare(moved), clean.index_select(0, target))
        found.append((target, group, distance.to(scores)))
    target, group, distance = map(torch.cat, zip(*found, strict=True))
    scores[targets.batch[target], targets.place[target], group] = distance.where(changes[target, group], 0)
    return scores


def _packed_pairs(
    recording: Recording,
    call: AttentionCall,
    output: Tensor,
    zeroing: Zeroing,
    targets: Targets,
    only_first: bool = False,
) -> Tensor:
    members = group_members(call, zeroing)
    scores = empty_map(call, zeroing, members)
    replay = packed_pairs(recording, call, output, targets.batch, targets.out, only_first)
    assert call.context is not None  # PackedPairs saw to it
    rows = _chunk_rows(recording, output)
    weights = zeroed_weights(call, zeroing, targets.sources, targets.batch, targets.out)  # (target, in, head)
    values = call.values.transpose(1, 2)  # (batch, in, key-value head, d_head)
    contexts = at(call.context, targets.batch, targets.out).flatten(1)

    outputs = at(output, targets.batch, targets.out)
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
        left = contexts[target] - lost_context(weights, values, targets.batch, lists, target, group)
        anew = nearly_all_is_lost(left, contexts[target]).nonzero().flatten()
        if len(anew):
            of, lost = target[anew], lists[target[anew], group[anew]]
            left[anew] = left_context(call, heads, targets.batch[of], targets.out[of], lost)
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


def _whole_sequences(
    recording: Recording,
    call: AttentionCall,
    output: Tensor,
    zeroing: Zeroing,
    targets: Targets,
    choose: bool = False,
    kind: type[WholeSequences] = WholeSequences,
) -> Tensor:
    # Which axis holds the tokens was told by a shape. Packed pairs fail where it is another; whole sequences would not.
    if call.streams is not None and not are_in_order(recording, call, alone=True):
        raise NotReproducedError("its tokens have several vectors each, and a value does not depend on its own alone")
    if is_reordered(recording, call):
        # Which tokens are hidden is known in the attention's order only.
        if call.visible is not None and not call.visible.all():
            raise NotReproducedError("its attention sees its tokens in another order, and not all of them")
        return _in_windows(recording, over_positions(recording, call), output, zeroing, targets)
    members = group_members(call, zeroing)
    scores = empty_map(call, zeroing, members)
    replay = kind(recording, call)
    if choose:
        replay.choose(output)
    replay.check_examples_apart(output)
    count = members.shape[1]
    copies = max(1, _chunk_rows(recording, output) // output.shape[1])
    copies = copies if zeroing.at_most is None else min(copies, zeroing.at_most)
    heads = zeroed_heads(call, zeroing.heads)
    examples = targets.batch.unique().tolist()
    together = code_is_known(recording) and has_no_experts(recording)
    if not together and copies >= ENOUGH:
        together = replay.copies_are_apart(examples[0], output[examples[0]])

    for example in examples:
        mine = targets.batch == example
        out, place = targets.out[mine], targets.place[mine]
        nothing = torch.zeros(1, len(heads), targets.sources.shape[1], dtype=torch.bool, device=output.device)
        in_group = torch.zeros(count, targets.sources.shape[1] + 1, dtype=torch.bool, device=output.device)
        in_group = in_group.scatter(1, members[example] % in_group.shape[1], True)[:, :-1] & targets.sources[example]
        # Seen by any row, not by the wanted alone: a layer that mixes positions hands on what their neighbours saw.
        rows = torch.arange(call.size[2], device=output.device)
        weights = zeroed_weights(call, zeroing, targets.sources, torch.full_like(rows, example), rows)
        active = (in_group & weights.ne(0).any(-1).any(0)).any(-1).nonzero().flatten()
        alone = None if together else replay.run(example, nothing)[:, out]
        for part in active.split(copies if together else 1):
            zeroed = in_group[part][:, None, :] & heads[:, None]
            if alone is None:
                # The last copy is left as it is and checked: copies may compete too, for experts of limited capacity.
                answer = replay.run(example, torch.cat([zeroed, nothing]))[:, out]
            else:
                answer = torch.cat([replay.run(example, zeroed)[:, out], alone])
            check_reproduced(answer[-1], output[example, out])
            # And some that are zeroed are to be the same each alone: one that is not may win against those that are.
            first = together and example == examples[0] and part[0] == active[0] and len(part) > 1
            for number in range(0, len(part) if first else 0, -(-len(part) // ALONE)):
                check_reproduced(replay.run(example, zeroed[number][None])[0, out], answer[number])
            prepared = zeroing.measure.prepare(answer)
            distance = zeroing.measure.between(prepared[:-1], prepared[-1].expand_as(prepared[:-1]))
            scores[example, place[:, None], part] = distance.T.to(scores)
    return scores


def _whole_by_trial(
    recording: Recording, call: AttentionCall, output: Tensor, zeroing: Zeroing, targets: Targets
) -> Tensor:
    """Whole sequences, the examples being along other axes: where the batch is as long as something else."""
    return _whole_sequences(recording, call, output, zeroing, targets, choose=True)


def _in_its_batch(
    recording: Recording, call: AttentionCall, output: Tensor, zeroing: Zeroing, targets: Targets
) -> Tensor:
    """Whole sequences that run in the batch as it was: slower by the number of examples."""
    return _whole_sequences(recording, call, output, zeroing, targets, kind=InItsBatch)


def _in_windows(
    recording: Recording, call: AttentionCall, output: Tensor, zeroing: Zeroing, _targets: Targets
) -> Tensor:
    assert call.windows is not None
    scores = empty_map(call, zeroing, group_members(call, zeroing))
    heads = zeroed_heads(call, zeroing.heads)
    nothing = torch.zeros_like(call.windows.position, dtype=torch.bool)
    clean = call.windows.run(nothing, heads)
    check_reproduced(clean.flatten(0, 1), output.flatten(0, 1))
    clean = zeroing.measure.prepare(clean)
    for zeroed, column in call.windows.steps(zeroing.groups, one_by_one=zeroing.at_most is not None):
        distance = zeroing.measure.between(zeroing.measure.prepare(call.windows.run(zeroed, heads)), clean)
        if zeroing.rows is not None:
            distance, column = distance.gather(1, zeroing.rows), column.gather(1, zeroing.rows)
        example, row = (column >= 0).nonzero(as_tuple=True)
        scores[example, row, column[example, row]] = distance[example, row].to(scores)
    return scores


def _chunk_rows(recording: Recording, output: Tensor) -> int:
    """How many positions one chunk holds, by its widest activation."""
    shapes = [parameter.shape[-2:] for parameter in recording.parameters if parameter.dim() > 1]
    width = max([output.shape[-1], *(size for shape in shapes for size in shape)])
    return fitting(output, width)


# Tried in this order. All give the same numbers: a test may leave the first one out.
WAYS = (_folded_pairs, _packed_pairs, _packed_first, _whole_sequences, _whole_by_trial, _in_its_batch)
