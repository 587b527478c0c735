"""Which values of an attention depend on which positions of the layer's input.

The layer runs again on a changed input, and the run ends at the values. Two changes are used:

- A small nudge moves the values that depend on a position, and no others. A layer that orders its tokens by a score
  keeps their order.
- NaN marks every value that depends on a position. It also changes scores that decide an order, and code that checks
  for NaN may remove it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from captum_vz._engine.capture.interventions import SiteHandler, StopAtValues, StopRunError
from captum_vz._engine.capture.layer_runner import LayerRunner
from captum_vz._engine.capture.records import AttentionRecord
from captum_vz._engine.numerics.tensors import (
    PROBE_STRENGTHS,
    is_changed,
    noise_like,
    nudged,
    replaced,
    tensors_in,
)
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_reproduced

if TYPE_CHECKING:
    from captum_vz._engine.taps.handler import AttentionHandler


def reads_other_states(runner: LayerRunner, attention: AttentionRecord) -> bool:
    """Whether the values depend on other states than the layer's own, as those of a cross-attention do.

    Values that depend on neither (Gemma 3n's upper layers take those of a lower layer) belong to the layer's tokens.
    """
    batch, _, _, sources = attention.shape
    own = runner.states[:1]
    others = [x for x in runner.states[1:] if attention.batch_first(x).shape[:2] == (batch, sources)]
    others = [x for x in others if not torch.equal(x, own[0])]  # its own states may be given twice
    return any(_reads(runner, attention, x) for x in others) and not reads_own_states(runner, attention)


def reads_own_states(runner: LayerRunner, attention: AttentionRecord) -> bool:
    """Whether the values depend on the layer's own states, as those of a cross-attention do not."""
    return any(_reads(runner, attention, x) for x in runner.states[:1])


def first_own_source(runner: LayerRunner, attention: AttentionRecord) -> int | None:
    """The source at which the layer's own tokens begin, or None if it is unknown.

    There may be more sources than tokens: a cache comes before them, what torch.nn.MultiheadAttention adds after them.
    """
    if not runner.states:
        return None
    states = runner.states[0]
    reached = _reached(runner, attention, states, first_tokens(states, attention))
    if reached is None or reached.shape[1] != attention.shape.sources:
        return None
    places = reached.any(0).nonzero()
    return int(places[0]) if len(places) else None


def mixes_outside(
    runner: LayerRunner,
    states: Tensor,
    clean: Tensor,
    disturbed: Sequence[Tensor],
    handler: Callable[[], AttentionHandler | None] = lambda: None,
) -> bool | None:
    """Whether disturbed positions of `states` reach others of the `clean` output. None: some are shown by no run.

    `disturbed` are sets of positions, bool. They are replaced by noise, and by NaN. Each run has its own `handler`.
    """
    shown = True
    for chosen in disturbed:
        noisy = (replaced(states, noise_like(states, strength), chosen) for strength in PROBE_STRENGTHS)
        answers = [run_on(runner, states, one, handler()) for one in noisy]
        found = [x for x in answers if x is not None and x.shape == clean.shape == states.shape]
        if any(not is_reproduced(x[~chosen], clean[~chosen]) for x in found):
            return True
        shown = shown and bool(found)
    return False if shown else None


def run_on(runner: LayerRunner, old: Tensor, new: Tensor, handler: AttentionHandler | None) -> Tensor | None:
    """The layer's output for `new` in the place of its input `old`. None: it does not run on that."""
    try:
        return runner.run(handler, runner.arguments_with(old, new))
    except CannotReplayError:
        return None


def values_depend_on_own_position(runner: LayerRunner, attention: AttentionRecord) -> bool | None:
    """Whether each value depends on its own position of the layer's input, and on no other. None: no run shows it."""
    tensors = tensors_in(runner.arguments)
    hidden = next((x for x in tensors if x.is_floating_point() and x.dim() > 1), None)
    batch, _, out, _ = attention.shape
    if hidden is None or attention.batch_first(hidden).shape[:2] != (batch, out):
        return None
    return _follow_positions(runner, attention, hidden, alone=True)


def values_follow_token_order(runner: LayerRunner, attention: AttentionRecord) -> bool:
    """Whether each value depends at least on its own position of the states that the values are made of.

    True if no such states are found.
    """
    batch, _, _, sources = attention.shape
    for states in runner.states:
        if attention.batch_first(states).shape[:2] == (batch, sources):
            in_order = _follow_positions(runner, attention, states)
            if in_order is not None:
                return in_order
    return True


def values_follow_examples(runner: LayerRunner, attention: AttentionRecord) -> bool:
    """Whether the values of each example depend at least on this example of the batch. True if no run shows it."""
    count, device = attention.shape.batch, attention.values.device
    digits = (torch.arange(count, device=device) >> torch.arange(count.bit_length(), device=device)[:, None]) % 2 == 1
    for states in runner.states if count > 1 else ():
        if len(attention.batch_first(states)) == count:
            # The last digit is that of no example, so the last of these sets holds all examples.
            reached = [_examples_reached(runner, attention, states, one) for half in (digits, ~digits) for one in half]
            if (moving := reached[-1]) is not None and moving.any():
                halves = zip((*digits, *~digits), reached, strict=True)
                return not any(own is not None and (moving & chosen & ~own).any() for chosen, own in halves)
    return True


def _examples_reached(runner: LayerRunner, attention: AttentionRecord, states: Tensor, chosen: Tensor) -> Tensor | None:
    """The examples some of whose values depend on chosen examples of `states`, bool `(batch,)`."""
    marked = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
    attention.batch_first(marked)[chosen] = True
    reached = _reached(runner, attention, states, marked)
    return None if reached is None or len(reached) != len(chosen) else reached.any(1)


def _reads(runner: LayerRunner, attention: AttentionRecord, states: Tensor) -> bool:
    everywhere = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    reached = _reached(runner, attention, states, everywhere)
    return reached is not None and bool(reached.any())


def _reached(runner: LayerRunner, attention: AttentionRecord, states: Tensor, chosen: Tensor) -> Tensor | None:
    """Which values `(batch, in)` depend on chosen positions of `states`. None: the runs do not show it."""
    clean = _first_values(runner, attention, states, states)
    reached = None
    for other in (torch.full_like(states, torch.nan), nudged(states)):  # the nudge for layers that remove NaN
        values = _first_values(runner, attention, states, replaced(states, other, chosen))
        if values is not None and clean is not None and values.shape == clean.shape:
            reached = is_changed(values, clean).any(-1)
            if reached.any():
                break
    return reached


def first_tokens(states: Tensor, attention: AttentionRecord) -> Tensor:
    """Marks the first token of each example in the layer's input."""
    firsts = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
    attention.batch_first(firsts)[:, 0] = True
    return firsts


def _follow_positions(
    runner: LayerRunner, attention: AttentionRecord, states: Tensor, alone: bool = False
) -> bool | None:
    """Whether each value depends on its own position of `states`. None: the runs do not show it.

    Positions are tested by the binary digits of their index, two runs a digit. A permuted value differs from its
    position in at least one digit. With `alone`, a value may depend on no other position.
    """
    clean = _first_values(runner, attention, states, states)
    size = attention.batch_first(states).shape[:2]
    nan = torch.full_like(states, torch.nan)
    index = torch.arange(size[1], device=states.device)

    def reached(other: Tensor, chosen: Tensor) -> Tensor | None:
        changed = replaced(states, other, attention.batch_first(chosen.expand(size)))
        values = _first_values(runner, attention, states, changed)
        if values is None or clean is None or values.shape != clean.shape or values.shape[:2] != size:
            return None
        return is_changed(values, clean).any(-1)

    def are_own(other: Tensor, moving: Tensor) -> bool | None:
        for digit in range((size[1] - 1).bit_length()):
            chosen = (index >> digit) % 2 == 1
            own = reached(other, chosen)
            others = reached(nan, chosen) if alone else own
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
                # Permuted values depend on one position each. Rounding by the largest of all values looks alike, but
                # such layers do not run on NaN.
                from_one = (own ^ rest)[moving].all()
                as_many = own.sum(-1).amax() <= chosen.sum() and rest.sum(-1).amax() <= (~chosen).sum()
                return False if from_one and (as_many or reached(nan, index >= 0) is not None) else None
        return True

    moved = False
    # Quantised numbers move with a small nudge only now and then, or never.
    for other in (nudged(states), nudged(states, 1.0), nan):
        moving = reached(other, index >= 0)  # values that are always zero do not move
        if moving is not None and moving.any():
            moved = True
            answer = are_own(other, moving)
            if answer is not None:
                return answer
    return False if moved else None


def _first_values(runner: LayerRunner, attention: AttentionRecord, old: Tensor, new: Tensor) -> Tensor | None:
    """The values of `attention` with `new` in the place of the input `old`, or None. Nothing after them is run."""
    return _result_of(runner, StopAtValues(attention), runner.arguments_with(old, new))


def _result_of(runner: LayerRunner, handler: SiteHandler, arguments: tuple[Any, Any]) -> Tensor | None:
    """The result with which a handler stops the run, or None."""
    try:
        runner.run(handler, arguments)
    except (StopRunError, CannotReplayError) as end:
        return end.args[0] if isinstance(end, StopRunError) else None
    return None
