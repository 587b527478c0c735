"""TODO."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from captum_vz._engine.capture.interventions import StopAtOutput, StopAtValues, StopRunError
from captum_vz._engine.capture.layer_runner import instead, run_again, without_caches, without_hooks
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.perturbation import PROBE_STRENGTHS, is_changed, noise_like, nudged, replaced
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplay, is_reproduced
from captum_vz._engine.taps.handler import handled_by


def reads_elsewhere(recording: LayerRecord, call: AttentionRecord) -> bool:
    """Whether the values come from other states than the layer's own, as those of a cross-attention do.

    Told by parts of runs that end at the values, and only where there are such states. SlotValues that come from neither
    (Gemma 3n's upper layers take those of a lower one) are of the layer's own tokens.
    """
    own = recording.states[:1]
    others = [x for x in recording.states[1:] if call.batch_first(x).shape[:2] == call.size[::3]]
    others = [x for x in others if not torch.equal(x, own[0])]  # its own states may be given twice
    return any(_reads(recording, call, x) for x in others) and not reads_own(recording, call)


def reads_own(recording: LayerRecord, call: AttentionRecord) -> bool:
    """Whether the values come from the layer's own states, as those of a cross-attention do not."""
    return any(_reads(recording, call, x) for x in recording.states[:1])


def _reads(recording: LayerRecord, call: AttentionRecord, states: Tensor) -> bool:
    reached = _reached(recording, call, states, torch.ones(states.shape[:2], dtype=torch.bool, device=states.device))
    return reached is not None and bool(reached.any())


def _reached(recording: LayerRecord, call: AttentionRecord, states: Tensor, chosen: Tensor) -> Tensor | None:
    """Which values `(batch, in)` depend on chosen positions of the layer's input; None where a run does not tell."""
    clean = _first_values(recording, call, states, states)
    reached = None
    for other in (torch.full_like(states, torch.nan), nudged(states)):  # the second, for what stops NaN
        values = _first_values(recording, call, states, replaced(states, other, chosen))
        if values is not None and clean is not None and values.shape == clean.shape:
            reached = is_changed(values, clean).any(-1)
            if reached.any():
                break
    return reached


def first_of_own(recording: LayerRecord, call: AttentionRecord) -> int | None:
    """Where the layer's own tokens begin among more sources than these, or None where a part of a run does not tell.

    A cache stands before them; torch.nn.MultiheadAttention puts what it adds behind.
    """
    _, _, out, sources = call.size
    if sources <= out or not recording.states:
        return None
    reached = _reached(recording, call, recording.states[0], _firsts(recording.states[0], call))
    if reached is None or reached.shape[1] != sources:
        return None
    places = reached.any(0).nonzero()
    return int(places[0]) if len(places) else None


def mixes_unseen(recording: LayerRecord, call: AttentionRecord) -> bool:
    """Whether a token of the layer's own reaches others by another way than `call`, which reads other states."""
    output, states = first_tensor(recording.output), recording.states[0]
    arguments = without_caches((recording.args, recording.kwargs))
    if output is None or output.dim() < 3:
        return False
    for noise in PROBE_STRENGTHS:
        disturbed = replaced(states, noise_like(states, noise), _firsts(states, call))
        args, kwargs = tree_map(partial(instead, states, disturbed), arguments)
        try:
            with handled_by(None):
                answer = first_tensor(run_again(without_hooks(recording.layer), args, kwargs))
        except CannotReplay:  # it does not run on noise, and does not tell
            continue
        if answer is None or answer.shape != output.shape:
            continue
        if not is_reproduced(*(call.batch_first(x)[:, 1:].flatten(0, 1) for x in (answer, output))):
            return True
    return False


def _firsts(states: Tensor, call: AttentionRecord) -> Tensor:
    """Where the first tokens of all examples are in the layer's input, `(batch, in)` or as that has them."""
    firsts = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
    call.batch_first(firsts)[:, 0] = True
    return firsts


def are_in_order(recording: LayerRecord, call: AttentionRecord, alone: bool = False) -> bool:
    """Whether each value depends on its own position of the layer's input at least; and, with `alone`, on no other."""
    arguments = without_caches((recording.args, recording.kwargs))
    tensors = (x for x in tree_leaves(arguments) if isinstance(x, Tensor))
    hidden = next((x for x in tensors if x.is_floating_point() and x.dim() > 1), None)
    if hidden is None or hidden.shape[:2] != call.size[::2]:
        return False
    return bool(_stands_in_order(recording, call, hidden, alone))


def values_are_in_order(recording: LayerRecord, call: AttentionRecord) -> bool:
    """The same of whatever states the values come from; and where that is told of none."""
    for states in recording.states:
        if call.batch_first(states).shape[:2] == call.size[::3]:
            in_order = _stands_in_order(recording, call, states)
            if in_order is not None:
                return in_order
    return True


def _stands_in_order(recording: LayerRecord, call: AttentionRecord, states: Tensor, alone: bool = False) -> bool | None:
    """Whether each value depends on its own position, told by parts of runs that end at the values.

    None where it depends on none, as far as is told. The digits of a position's number say whether to replace it. In
    another order, some digit of a value's place is not that of the position that it comes from.
    """
    clean = _first_values(recording, call, states, states)
    size = call.batch_first(states).shape[:2]
    nothing = torch.full_like(states, torch.nan)

    def reached(other: Tensor, chosen: Tensor) -> Tensor | None:
        values = _first_values(recording, call, states, replaced(states, other, call.batch_first(chosen.expand(size))))
        if values is None or clean is None or values.shape != clean.shape or values.shape[:2] != size:
            return None
        return is_changed(values, clean).any(-1)

    def are_own(other: Tensor, moving: Tensor) -> bool | None:
        for digit in range((size[1] - 1).bit_length()):
            chosen = (number >> digit) % 2 == 1
            own = reached(other, chosen)
            others = reached(nothing, chosen) if alone else own
            if own is None or others is None:
                return None
            if alone and (own | others)[:, ~chosen].any():
                return False
            if (own == chosen)[moving].all():
                continue
            rest = reached(other, ~chosen)
            if rest is None:
                return None
            if not torch.where(chosen, own, rest)[moving].all():
                # In another order, each from one position; or rounded by the largest of all, which NaN cannot be.
                from_one = (own ^ rest)[moving].all()
                as_many = own.sum(-1).amax() <= chosen.sum() and rest.sum(-1).amax() <= (~chosen).sum()
                return False if from_one and (as_many or reached(nothing, number >= 0) is not None) else None
        return True

    number = torch.arange(size[1], device=states.device)
    told = False
    # Numbers that are rounded to few (quantised ones) move with a small nudge now and then, or never.
    for other in (nudged(states), nudged(states, 1.0), nothing):
        moving = reached(other, number >= 0)  # but for values that are zero whatever they come from
        if moving is not None and moving.any():
            told = True
            answer = are_own(other, moving)
            if answer is not None:
                return answer
    return False if told else None


def attention_answers(recording: LayerRecord, call: AttentionRecord, context: Tensor) -> Tensor | None:
    """What the module that computes `call` returns, `(batch, out, d)`, where its attention answers with `context`.

    None, where a part of a run does not tell.
    """
    try:
        with handled_by(StopAtOutput(call, recording.asked_before(call), context)):
            run_again(without_hooks(recording.layer), *without_caches((recording.args, recording.kwargs)))
    except StopRunError as heard:
        return heard.args[0]
    except CannotReplay:
        pass
    return None


def _first_values(recording: LayerRecord, call: AttentionRecord, old: Tensor, new: Tensor) -> Tensor | None:
    """The values that `call` is given where `new` stands for the layer's input `old`, or None; nothing more is run."""
    args, kwargs = tree_map(partial(instead, old, new), without_caches((recording.args, recording.kwargs)))
    try:
        with handled_by(StopAtValues(call, recording.asked_before(call))):
            run_again(without_hooks(recording.layer), args, kwargs)
    except StopRunError as heard:
        return heard.args[0]
    except CannotReplay:
        pass
    return None
