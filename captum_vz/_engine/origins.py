"""Where the values of an attention come from: runs of the layer that end there, and listeners to them.

A nudge to what goes into a layer moves those values that come from it, and no others, and is so small that a layer
which puts its tokens in an order of its own, by a score, keeps to it. NaN says whether anything at all comes from
somewhere, but whatever is computed of NaN is NaN, a score as well; and what looks before it computes may stop it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from captum_vz._engine.interface import Attend, Listener, listening
from captum_vz._engine.noise import NOISES, chance, noise_like
from captum_vz._engine.precision import without_caches
from captum_vz._engine.recording import AttentionCall, Recording, first_tensor
from captum_vz._engine.replay import NotReproducedError, bare, is_reproduced, run_again


def reads_elsewhere(recording: Recording, call: AttentionCall) -> bool:
    """Whether the values come from other states than the layer's own, as those of a cross-attention do.

    Told by parts of runs that end at the values, and only where there are such states. Values that come from neither
    (Gemma 3n's upper layers take those of a lower one) are of the layer's own tokens.
    """
    own = recording.states[:1]
    others = [x for x in recording.states[1:] if call.batch_first(x).shape[:2] == call.size[::3]]
    others = [x for x in others if not torch.equal(x, own[0])]  # its own states may be given twice
    return any(_reads(recording, call, x) for x in others) and not reads_own(recording, call)


def reads_own(recording: Recording, call: AttentionCall) -> bool:
    """Whether the values come from the layer's own states, as those of a cross-attention do not."""
    return any(_reads(recording, call, x) for x in recording.states[:1])


def _reads(recording: Recording, call: AttentionCall, states: Tensor) -> bool:
    reached = _reached(recording, call, states, torch.ones(states.shape[:2], dtype=torch.bool, device=states.device))
    return reached is not None and bool(reached.any())


def _reached(recording: Recording, call: AttentionCall, states: Tensor, chosen: Tensor) -> Tensor | None:
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


def first_of_own(recording: Recording, call: AttentionCall) -> int | None:
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


def mixes_unseen(recording: Recording, call: AttentionCall) -> bool:
    """Whether a token of the layer's own reaches others by another way than `call`, which reads other states."""
    output, states = first_tensor(recording.output), recording.states[0]
    arguments = without_caches((recording.args, recording.kwargs))
    if output is None or output.dim() < 3:
        return False
    for noise in NOISES:
        disturbed = replaced(states, noise_like(states, noise), _firsts(states, call))
        args, kwargs = tree_map(partial(instead, states, disturbed), arguments)
        try:
            with listening(None):
                answer = first_tensor(run_again(bare(recording.layer), args, kwargs))
        except NotReproducedError:  # it does not run on noise, and does not tell
            continue
        if answer is None or answer.shape != output.shape:
            continue
        if not is_reproduced(*(call.batch_first(x)[:, 1:].flatten(0, 1) for x in (answer, output))):
            return True
    return False


def _firsts(states: Tensor, call: AttentionCall) -> Tensor:
    """Where the first tokens of all examples are in the layer's input, `(batch, in)` or as that has them."""
    firsts = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
    call.batch_first(firsts)[:, 0] = True
    return firsts


def are_in_order(recording: Recording, call: AttentionCall, alone: bool = False) -> bool:
    """Whether each value depends on its own position of the layer's input at least; and, with `alone`, on no other."""
    arguments = without_caches((recording.args, recording.kwargs))
    tensors = (x for x in tree_leaves(arguments) if isinstance(x, Tensor))
    hidden = next((x for x in tensors if x.is_floating_point() and x.dim() > 1), None)
    if hidden is None or hidden.shape[:2] != call.size[::2]:
        return False
    return bool(_stands_in_order(recording, call, hidden, alone))


def values_are_in_order(recording: Recording, call: AttentionCall) -> bool:
    """The same of whatever states the values come from; and where that is told of none."""
    for states in recording.states:
        if call.batch_first(states).shape[:2] == call.size[::3]:
            in_order = _stands_in_order(recording, call, states)
            if in_order is not None:
                return in_order
    return True


def _stands_in_order(recording: Recording, call: AttentionCall, states: Tensor, alone: bool = False) -> bool | None:
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


def nudged(x: Tensor, share: float | None = None) -> Tensor:
    """`x (..., d)` with numbers by chance added to each position, of this share of its size; None: a small one."""
    size = x.abs().mean(-1, keepdim=True)
    share = torch.finfo(x.dtype).eps ** 0.5 if share is None else share
    return x + share * size.where(size > 0, size.mean()) * chance(x)


def replaced(x: Tensor, other: Tensor, chosen: Tensor) -> Tensor:
    """`x (..., d)` with `other` in its place at chosen positions `(...)`."""
    return torch.where(chosen.view(*chosen.shape, *[1] * (x.dim() - chosen.dim())), other, x)


def is_changed(found: Tensor, clean: Tensor) -> Tensor:
    """Where two runs of one code differ, to the last bit; NaN is no change where there was NaN."""
    return (found != clean) & ~(found.isnan() & clean.isnan())


def attention_answers(recording: Recording, call: AttentionCall, context: Tensor) -> Tensor | None:
    """What the module that computes `call` returns, `(batch, out, d)`, where its attention answers with `context`.

    None, where a part of a run does not tell.
    """
    try:
        with listening(_Answering(call, recording.asked_before(call), context)):
            run_again(bare(recording.layer), *without_caches((recording.args, recording.kwargs)))
    except _HeardError as heard:
        return heard.args[0]
    except NotReproducedError:
        pass
    return None


def _first_values(recording: Recording, call: AttentionCall, old: Tensor, new: Tensor) -> Tensor | None:
    """The values that `call` is given where `new` stands for the layer's input `old`, or None; nothing more is run."""
    args, kwargs = tree_map(partial(instead, old, new), without_caches((recording.args, recording.kwargs)))
    try:
        with listening(_FirstValues(call, recording.asked_before(call))):
            run_again(bare(recording.layer), args, kwargs)
    except _HeardError as heard:
        return heard.args[0]
    except NotReproducedError:
        pass
    return None


def instead(old: Tensor, new: Tensor, value: Any) -> Any:
    """What stands in the place of an argument: `new` for `old`, any other as it is."""
    return new if value is old else value


class Values(Listener):
    """Hears the values of one attention, part by part `(windows, places, features)`, and replaces some by `filling`."""

    def __init__(
        self, call: AttentionCall, slots: Tensor | None = None, filling: float = 0.0, heads: Tensor | None = None
    ) -> None:
        self.call = call
        self.slots = slots
        self.filling = filling
        self.heads = heads
        self.parts: list[Tensor] = []

    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        slots = None if self.call.value_projection is not None else self._slots_of(values.transpose(1, 2).flatten(2))
        if slots is None:
            return attend(values)
        filled, weights = attend(values.masked_fill(slots[:, None, :, None], self.filling))
        if self.heads is None or self.heads.all():
            return filled, weights
        return torch.where(self.heads[:, None], filled, attend(values)[0]), weights

    def returned(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> Any:
        if self.call.value_projection is None or module is not self.call.value_projection:
            return None
        rows = output.transpose(0, 1) if self.call.transposed else output
        rows = rows.reshape(1 if rows.dim() == 2 else len(rows), -1, rows.shape[-1])
        columns = self.call.value_columns
        slots = self._slots_of(torch.cat([rows[..., own] for own in columns], dim=-1))
        if slots is None:
            return None
        rows = rows.clone()
        chosen = range(len(columns)) if self.heads is None else self.heads.nonzero().flatten().tolist()
        if any(own == columns[head] for other, own in enumerate(columns) if other not in chosen for head in chosen):
            raise NotReproducedError("its heads share their values, which cannot be zeroed for some of them alone")
        for head in chosen:
            zero = self.call.zero if isinstance(self.call.zero, float) else self.call.zero[head]
            rows[..., columns[head]] = torch.where(slots[..., None], zero + self.filling, rows[..., columns[head]])
        return rows.transpose(0, 1) if self.call.transposed else rows.view_as(output)

    def _slots_of(self, values: Tensor) -> Tensor | None:
        """Takes note of the next part, and says which of its slots to fill, `(windows, places)`; None: none at all."""
        before = sum(part[..., 0].numel() for part in self.parts)
        self.parts.append(values)
        if self.slots is None:
            return None
        return self.slots[before : before + values[..., 0].numel()].view(values.shape[:2])


class _HeardError(Exception):
    """What was waited for has come; the argument is that."""


class _FirstValues(Values):
    """Ends the run of a layer at the first values of an attention, before which others ask for theirs."""

    def __init__(self, call: AttentionCall, before: int) -> None:
        super().__init__(call)
        self.before = before

    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        if self.before:
            self.before -= 1
            return attend(values)
        return super().attend(module, attend, values, visible, dropout)

    def _slots_of(self, values: Tensor) -> Tensor | None:
        raise _HeardError(values)


class _Answering(Listener):
    """Answers an attention, before which others are called, and ends the run when the module that called it returns."""

    def __init__(self, call: AttentionCall, before: int, context: Tensor) -> None:
        self.call = call
        self.before = before
        self.context = context

    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        context, weights = attend(values)
        self.before -= 1
        return (context if self.before >= 0 else self.context.to(context)), weights

    def returned(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> Any:
        answer = first_tensor(output)
        if module is self.call.module and self.before < 0 and answer is not None:
            raise _HeardError(self.call.batch_first(answer))
