"""Which values of an attention depend on which positions of the layer's input.

The layer runs again on a changed input, and the run ends at the values. Two changes are used:

- A small nudge moves the values that depend on a position, and no others. A layer that orders its tokens by a score
  keeps their order.
- NaN marks every value that depends on a position. It also changes scores that decide an order, and code that checks
  for NaN may remove it.

For rollouts, `OtherMixing` looks for what mixes the tokens of a stack except the attention of its layers. A rollout
multiplies the maps of layers that follow each other. Another mixer between two layers (the recurrent layers of a hybrid
model), or a layer that is left out, has a share that no map shows. So has a mixer that runs in parallel to the
attention of a layer (a recurrent one, a convolution).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture import AttentionRecord, LayerRecord
from captum_vz._engine.capture.interventions import AddToValues, StopAtValues, StopRunError
from captum_vz._engine.capture.layer_runner import LAYER_ERRORS, LayerRunner, find_streams
from captum_vz._engine.numerics import ReturnedTensor, Weights, clone_tensor, first_tensor, tensors_in
from captum_vz._engine.numerics.tolerance import (
    PROBE_STRENGTHS,
    CannotReplayError,
    binary_digits,
    is_changed,
    is_reproduced,
    noise_like,
    nudged,
    replaced,
)
from captum_vz._engine.structure.modules import each_module_runs_once, is_library_code, matrix, once_a_kind
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz._private import modules_of, tree_map


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
    """Whether the values depend on the layer's own states."""
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
    hidden = next((x for x in tensors_in(runner.arguments) if x.is_floating_point() and x.dim() > 1), None)
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
    try:
        runner.run(StopAtValues(attention), runner.arguments_with(old, new))
    except StopRunError as end:
        return end.args[0]
    except CannotReplayError:
        return None
    return None


def check_named_values(layer: LayerRecord, attention: AttentionRecord) -> None:
    """Refuse values that the user names, unless the layer mixes tokens by sums of them, with weights that stay.

    The first submodule that is given more rows that change than values do is given such sums. CannotReplayError: they
    are queries, keys, or no part of an attention.
    """
    runner, (batch, _, out, sources) = LayerRunner(layer), attention.shape
    in_tokens = any(attention.batch_first(x).shape[:2] == (batch, sources) for x in layer.states)
    if not in_tokens and not layer.rearranges(attention):
        raise CannotReplayError(f"they have {sources} rows in {batch} examples, and no hidden states have this shape")
    for source in dict.fromkeys((0, sources // 2, sources - 1)):
        seen = []
        for strength in (0, 1, 2):
            handler = AddToValues(attention, source, strength)
            output = runner.run(handler)
            seen.append([*handler.given, output])
        for clean, once, twice in zip(*seen, strict=True):
            moved = once - clean
            # Other layouts have more rows (one for each head), other projections have more numbers.
            alone = moved.count_nonzero() <= attention.values[:, 0].numel() or moved.any(-1).sum() <= batch
            if not moved.any() or (alone and min(out, sources) > 1):
                continue
            eps = torch.finfo(attention.values.dtype).eps
            if (twice - once - moved).abs().max() <= 0.01 * moved.abs().max() + 8 * eps * twice.abs().max():
                return
            raise CannotReplayError("the weights, or what the weights multiply, change with them in another way")
    raise CannotReplayError("they change no other token")


class OtherMixing:
    """Where a stack mixes its tokens by anything except attention. `note` is called with each layer's record.

    Linear modules and norms of `model` may run between two of its `layers`, because they treat each token alone.
    """

    def __init__(self, model: Any = None, layers: Sequence[nn.Module] = ()) -> None:
        inside = {part for layer in layers for part in modules_of(layer)}
        modules = set(modules_of(model)) - inside if isinstance(model, nn.Module) else set()
        norms = [
            one for one in modules if isinstance(one, (nn.LayerNorm, nn.RMSNorm)) and len(one.normalized_shape) == 1
        ]
        self._each_token = [*norms, *(one for one in modules if matrix(one) is not None)]
        # Indices of layers that ran one after the other, the second on something else than what the first returned.
        # Each pair once, in the order in which they ran.
        self.pairs: list[tuple[int, int]] = []
        self.mixers: list[int] = []  # the layers that mix their tokens by more than their attention
        self.untested: list[int] = []  # those of unknown code of which no run shows whether they do
        self._before: tuple[int, ReturnedTensor] | None = None  # the layer that ran last, and its output

    def note(self, record: LayerRecord) -> None:
        """Look at a layer that has just run."""
        output = first_tensor(record.output)
        if output is None:
            return
        # Experts of a library may make tokens compete by their numbers, so layers with experts are tested each.
        library = is_library_code(record)
        alike = record.attentions and (not library or each_module_runs_once(record))
        mixes = once_a_kind(record, (), _mixes, record, output) if alike else _mixes(record, output)
        if mixes and record.index not in self.mixers:
            self.mixers.append(record.index)
        if mixes is None and record.index not in self.untested and not library:
            self.untested.append(record.index)
        before, self._before = self._before, (record.index, ReturnedTensor(output))
        if before is not None and not record.is_given(before[1]) and not self._is_given_alone(record, before[1]):
            self.pairs = list(dict.fromkeys([*self.pairs, (before[0], record.index)]))

    @torch.no_grad()
    def _is_given_alone(self, record: LayerRecord, before: ReturnedTensor) -> bool:
        """Whether a layer is given what one module, or two in a row, make of each token of `before`."""
        widths = [x.shape[-1:] for x in tensors_in((record.args, record.kwargs))]
        # Others take long, such as the unembedding.
        fitting = [one for one in self._each_token if (weight := matrix(one)) is None or weight.shape[1:] in widths]
        made = [before.copy]
        for _ in range(2):
            given, made = made, []
            for x, module in product(given, fitting):
                with suppress(*LAYER_ERRORS):  # it is for other vectors
                    made.append(module.forward(x))
            if any(record.is_given(ReturnedTensor(found)) for found in made):
                return True
        return False


def _mixes(record: LayerRecord, output: Tensor) -> bool | None:
    """Whether tokens reach others by anything but the weights of attention. None: no run shows it.

    All attention is answered as in the clean pass. In code from elsewhere, values may be made of several tokens.

    Disturbed are, in library code, the middle token; in other code, the tokens whose position has a binary digit, and
    those whose position has not. A module that computes attention inline is answered as a whole, so other mixing inside
    it is not seen.
    """
    attentions = record.attentions
    streams, runner = find_streams(record, attentions[0]) if len(attentions) == 1 else None, LayerRunner(record)
    if streams is not None and values_depend_on_own_position(LayerRunner(record, streams), attentions[0]):
        runner, output = LayerRunner(record, streams), streams.tokens(output)
    hidden = next((x for x in tensors_in(runner.arguments) if x.is_floating_point()), None)
    library, tokens_first = is_library_code(record), any(one.tokens_first for one in attentions[:1])
    if not attentions or hidden is None or hidden.shape != output.shape or (library and hidden.dim() != 3):
        return None
    if not library and values_depend_on_own_position(runner, attentions[0]) is False:
        return True
    runner.replace_forwards({one.module: _clean_output_of(one) for one in attentions if one.inline is not None})
    contexts: list[tuple[Tensor, Weights | None]] = []
    # It fills the contexts. A hook of the layer may have changed the recorded output.
    clean = run_on(runner, hidden, hidden.clone(), CleanContexts(contexts))
    disturbed = [both for digit in binary_digits(hidden, tokens_first) for both in (digit, ~digit)]
    if library:
        disturbed = [torch.zeros_like(hidden[..., 0], dtype=torch.bool)]
        disturbed[0].select(0 if tokens_first else 1, (output.shape[not tokens_first] - 1) // 2).fill_(True)
    return None if clean is None else mixes_outside(runner, hidden, clean, disturbed, lambda: CleanContexts(contexts))


class CleanContexts(AttentionHandler):
    """Answers each attention call with its context in an earlier run. A call without one is computed, and kept."""

    def __init__(self, contexts: list[tuple[Tensor, Weights | None]]) -> None:
        self.contexts, self._calls = contexts, 0

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        self._calls += 1
        if self._calls > len(self.contexts):
            self.contexts.append(call.compute(call.values))
        context, weights = self.contexts[self._calls - 1]
        return context.clone(), weights


def _clean_output_of(attention: AttentionRecord) -> Callable[..., Any]:
    """Returns what the attention module returned in the clean pass, whatever it is given."""
    return lambda *args, **kwargs: tree_map(clone_tensor, attention.output)
