"""How an attention sees the tokens of its layer: in windows, and which of them are padding.

Windows: Swin and SAM cut a grid into windows, after shifting and padding it. Other layers put all images into one
sequence and attend to each by itself. The code that does so is not read. Positions are nudged by the binary digits of
their index, two runs a digit, and the values that move show where each position went. If the layer treats each example
by itself, these runs are copies of its input in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import torch
from torch import Tensor

from captum_vz._engine.capture import AttentionRecord, LayerRecord
from captum_vz._engine.capture.interventions import FillSlots
from captum_vz._engine.capture.layer_runner import LayerRunner
from captum_vz._engine.numerics import first_tensor, is_out_of_memory, mask_as_bool, once_a_pass, repeat_examples
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_changed, is_reproduced, nudged
from captum_vz._engine.structure.dependence import first_own_source, reads_other_states
from captum_vz._engine.structure.modules import keeps_examples_apart
from captum_vz._engine.taps.handler import MADE_OF
from captum_vz._private import tree_leaves, tree_map
from captum_vz.errors import RefusedError

NO_POSITION, MANY_POSITIONS = -1, -2
# Copies run together, with a clean one among them, where at least so many fit in a chunk. With 10 of a layer of
# swin-tiny on a CPU, this took 1.08 times as long as each alone, and with 20 as long.
FEWEST_COPIES = 16
Outcome = tuple[Tensor, Tensor]  # outputs and values of a run, see `Windows.clean`


class Windows:
    """Which position of the layer each value of an attention comes from.

    A position is a place in the layer's input, counted through the batch. A slot is a place in a window, counted
    through the windows. Grids are read row by row.
    """

    shape: tuple[int, int, int]  # examples, positions of the layer's output, positions of its input
    count: int  # how many windows there are
    window: Tensor  # the window of each slot, `(slots,)`
    place: Tensor  # the place of each slot in its window, `(slots,)`
    position: Tensor  # the position whose value each slot holds, `(slots,)`; NO_POSITION: padding
    at_once = 1  # how many changed copies of the input run together; 1: each runs alone
    clean: Outcome  # output `(batch, out, d)` and values `(slots, features)` of a run in which nothing is changed

    def __init__(self, record: LayerRecord, attention: AttentionRecord, axis: int, copied: bool) -> None:
        self.attention = attention
        self.runner = LayerRunner(record)
        self._axis = axis
        output = first_tensor(record.output)
        if output is None or output.dim() < 2 or (axis == 1 and output.dim() != 4):
            raise CannotReplayError("its output does not hold its positions in a known way")
        outputs = self.tokens(output)
        leaves = [x for x in tree_leaves(self.runner.arguments) if isinstance(x, Tensor) and x.is_floating_point()]
        alike = [x for x in leaves if x.dim() == output.dim() and len(self.tokens(x)) == len(outputs)]
        for hidden in alike:  # an attention module may be given its values apart from its queries
            self._hidden = hidden
            self.shape = (len(outputs), outputs.shape[1], self.tokens(hidden).shape[1])
            handler = FillSlots(attention)
            found, device = self._run(handler), hidden.device
            self.clean = found[0][0], found[1][0]
            self.place = torch.cat([torch.arange(x.shape[1], device=device).repeat(len(x)) for x in handler.calls])
            self.window, self.count = (self.place == 0).cumsum(0) - 1, sum(map(len, handler.calls))
            fit = record.rows_in_chunk(outputs) // (len(outputs) * max(self.shape[1:]))
            self.at_once = fit if copied and hidden.dim() > 2 and fit >= FEWEST_COPIES else 1
            self.position = self._positions()
            if (self.position != NO_POSITION).any():
                return
        raise CannotReplayError("its values come from no input that holds positions as its output does")

    def tokens(self, x: Tensor) -> Tensor:
        """A tensor of the layer as `(batch, positions, features)`."""
        x = x.movedim(self._axis, -1)
        return x[None] if x.dim() == 2 else x.flatten(1, -2)

    def again(self) -> Tensor:
        """The layer's output `(batch, out, d)` in one more run."""
        return self._run(FillSlots(self.attention))[0][0]

    def filled(self, slots: Tensor, filling: float = 0.0, heads: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The clean output `(batch, out, d)`, and that of each copy, `(copies, batch, out, d)`.

        In copy i, `filling` stands in the slots `slots[i] (slots,)` of `heads (head,)`. None: all heads.
        """
        clean = torch.zeros_like(slots[:1])
        (output, _), (outputs, _) = self._beside_clean(
            lambda few: self._run(FillSlots(self.attention, few, filling, heads)), slots, clean
        )
        return output, outputs

    def _beside_clean(
        self, run: Callable[[Tensor], Outcome], changed: Tensor, clean: Tensor
    ) -> tuple[Outcome, Outcome]:
        """What `run` finds for the `clean` copy `(1, ...)`, and for each of the `changed` copies `(n, ...)`."""
        if self.at_once == 1:
            each = [*map(run, changed.split(1))]
            return self.clean, (torch.cat([output for output, _ in each]), torch.cat([values for _, values in each]))
        # The last rows of another number than a multiple of 8 may be rounded in another way, so they are not used.
        odd = (self.shape[0] * self.shape[1]) % 8 or len(self.place) % 8
        outputs, values = run(torch.cat([clean, changed, clean] if odd else [clean, changed]))
        end = 1 + len(changed)
        return (outputs[0], values[0]), (outputs[1:end], values[1:end])

    def _run(self, handler: FillSlots, hidden: Tensor | None = None) -> Outcome:
        """Outputs `(copies, batch, out, d)` and values `(copies, slots, features)`, for `hidden (copies, ...)`."""
        copies, arguments = len(handler.slots) if handler.slots is not None else 1, self.runner.arguments
        if hidden is not None:
            copies, own = len(hidden), hidden.flatten(0, 1).movedim(-1, self._axis).contiguous()
            arguments = self.runner.arguments_with(self._hidden, own)
        if copies > 1:
            arguments = tree_map(partial(repeat_examples, copies=copies, batch=self.shape[0]), arguments)
        output = self.tokens(self.runner.run(handler, arguments))
        handler.check_all_filled()
        values = [x.unflatten(0, (copies, -1)).flatten(1, 2) for x in handler.calls]
        return output.unflatten(0, (copies, -1)), torch.cat(values, 1)

    def _positions(self) -> Tensor:
        count = self.shape[0] * self.shape[2]
        hidden = self._hidden.movedim(self._axis, -1)[None]

        def run(other: Tensor, chosen: Tensor) -> tuple[Outcome, Outcome]:
            changed = torch.where(chosen.view(len(chosen), *hidden.shape[1:-1], 1), other, hidden)
            return self._beside_clean(lambda few: self._run(FillSlots(self.attention), few), changed, hidden)

        def depend_on(other: Tensor, chosen: Tensor) -> Tensor:
            (_, clean), (_, values) = run(other, chosen)
            return is_changed(values, clean).any(-1)

        nudge, nan = nudged(hidden), torch.full_like(hidden, torch.nan)
        everywhere = torch.ones(2, count, dtype=torch.bool, device=hidden.device)
        own, (outputs, values) = run(torch.cat([nan, nudge]), everywhere)
        # A layer that holds its examples in another way mixes the copies, so NaN of one copy reaches another.
        if self.at_once > 1 and not (
            all(map(is_reproduced, own, self.clean)) and torch.equal(outputs[1].isnan(), own[0].isnan())
        ):
            raise CannotReplayError("copies of its input depend on each other")
        # Quantised numbers may not move with a nudge.
        all_move = torch.equal(*is_changed(values, own[1]).any(-1))
        other = nudge if all_move else nan
        positions = find_sources(count, partial(depend_on, other), hidden.device, self.at_once)
        if (positions == MANY_POSITIONS).any():
            raise CannotReplayError("its values come from several positions each")
        return positions


def find_windows(record: LayerRecord, attention: AttentionRecord) -> Windows:
    """The positions that an attention sees in windows.

    CannotReplayError: it is unknown which position each value comes from.
    """
    reasons = []
    together = (True, False) if keeps_examples_apart(record.layer) else (False,)
    for axis, copied in product((-1, 1), together):  # features last, or as convolutions have them: (batch, d, ...)
        try:
            return Windows(record, attention, axis, copied)
        except (CannotReplayError, RuntimeError, ValueError, LookupError) as error:
            if is_out_of_memory(error) and not copied:
                raise
            reasons += [] if copied else [str(error)]
    raise CannotReplayError(reasons[0])


def find_sources(count: int, depend_on: Callable[[Tensor], Tensor], device: torch.device, at_once: int = 1) -> Tensor:
    """Which of `count` sources each item depends on: NO_POSITION if on none, MANY_POSITIONS if on several.

    `depend_on(chosen (n, count))` says which items depend on any of the chosen sources, `(n, items)`. It is asked for
    `at_once` sets of sources at a time.
    """
    digits = torch.arange(max(1, (count - 1).bit_length()), device=device)[:, None]
    chosen = (torch.arange(count, device=device) >> digits) % 2 == 1
    ones, zeros = torch.cat([*map(depend_on, torch.cat([chosen, ~chosen]).split(at_once))]).chunk(2)
    found = (ones.long() << digits).sum(0)
    found = found.where((ones ^ zeros).all(0), MANY_POSITIONS)
    return found.where((ones | zeros).any(0), NO_POSITION)


def padding_masks(
    layer: LayerRecord, attention: AttentionRecord, rows: Tensor, all_sources: Tensor
) -> tuple[Tensor, Tensor]:
    """Which rows `(batch, out)` and which sources `(batch, in)` of an attention are no padding.

    Padding is what no token sees in self-attention, not even the token itself, if the inputs hide it or if it sees
    nothing. In sparse attention the layer chooses what is seen, so the mask that it was given is read too. A source
    that no valid row sees is padding. `rows` and `all_sources` are the masks where nothing is padding.
    """
    # The self-attention of these tokens comes first. Attentions with another number of tokens are passed over.
    first = min(layer.attentions, key=lambda one: one.shape.out != attention.shape.out)
    _, _, out, sources = first.shape
    seen = None if first.visible is None or sources < out else first.is_seen()
    cross = seen is not None and len(layer.attentions) == 1 and len(layer.states) > 1 and not seen.all()
    # The mask of a cross-attention alone says nothing of its rows.
    if seen is not None and not (cross and reads_other_states(LayerRunner(layer), first)):
        start = first_own_source(LayerRunner(layer), first) if sources > out else None
        if start is None or start + out > sources:
            if sources != out and not seen[..., -1].any():
                raise RefusedError(
                    f"The attention of {layer.name} has {sources} sources for {out} tokens, and no token sees the last "
                    "of them, so it is unknown where the tokens are in this static cache. Pass use_cache=False, or a "
                    "DynamicCache."
                )
            start = sources - out - layer.encoder_sources(first)  # the tokens in a cache come first
        rows, all_seen = once_a_pass(_seen_by_any, seen, start)
        if not all_seen:
            mask = layer.kwargs.get("attention_mask")
            is_of_pairs = isinstance(mask, Tensor) and mask.shape[2:] == (out, sources) and first.inline is None
            hidden = _hidden_by_inputs(layer, first, seen, start)
            rows = once_a_pass(_shown, rows, seen, hidden, start, mask if is_of_pairs else None)
    if attention.visible is None:
        return rows, all_sources
    inline = attention.inline if attention is first else None
    shown = once_a_pass(_seen_from, rows, attention.is_seen())
    if inline is not None and inline.row.sequence_first and shown.shape == rows.shape:
        shown = shown | rows  # XLNet's mask was changed, so that tokens that only see themselves see nothing
    return rows, shown


# Layers share their masks, so each of these is computed once a pass.


def _seen_by_any(seen: Tensor, start: int) -> tuple[Tensor, bool]:
    """Which tokens, the sources from `start` on, any token sees, `(batch, out)`, and whether this holds for all."""
    rows = seen.any(1)[:, start : start + seen.shape[1]]
    return rows, bool(rows.all())


def _shown(rows: Tensor, seen: Tensor, hidden: Tensor, start: int, mask: Tensor | None) -> Tensor:
    rows = rows | (seen.any(2) & ~hidden)
    return rows if mask is None else rows | mask_as_bool(mask).any(1).any(1)[:, start : start + rows.shape[1]]


def _seen_from(rows: Tensor, seen: Tensor) -> Tensor:
    shown = (seen & rows[:, :, None]).any(1)
    if shown.shape != rows.shape:
        return shown
    # A token that sees nothing may have a weight on each token: the softmax of equal numbers.
    return shown | (rows & (rows & ~seen.any(2)).any(1, keepdim=True))


def _hidden_by_inputs(layer: LayerRecord, attention: AttentionRecord, seen: Tensor, start: int) -> Tensor:
    """Which tokens a mask of tokens hides, and no pattern of the attention, bool `(batch, out)`.

    The layer's own tokens are the sources from `start` on of `seen (batch, out, in)`.
    """
    assert attention.visible is not None
    visible, (batch, _, out, sources) = attention.visible, attention.shape
    given = [x for x in tree_leaves((layer.args, layer.kwargs)) if isinstance(x, Tensor)]
    of_call = tree_leaves([dict(x) if isinstance(x, Mapping) else x for x in layer.inputs])
    of_pairs = any(isinstance(x, Tensor) and x.shape[-2:] == (out, sources) for x in of_call)
    tensors = [*given, *(x for x in of_call if isinstance(x, Tensor))]
    masks = (*tensors, *(getattr(x, MADE_OF) for x in tensors if hasattr(x, MADE_OF)))
    of_tokens = [x for x in masks if x.shape in ((batch, sources), (batch, 1, 1, sources), (batch, out))]
    inline = attention.inline is not None and not of_pairs
    # A layer that was given no mask made one of what its tokens hold, which says nothing of padding.
    could_be_masks = [x for x in given if x.shape[-1:] == (sources,) and not any(x is one for one in layer.states[:1])]
    made_of_inputs = attention.inline is not None or bool(could_be_masks)
    by_shape = visible.shape[2] == 1 and len(visible) == batch  # it hides tokens from all tokens
    return once_a_pass(_hidden, seen, start, by_shape and made_of_inputs, made_of_inputs, inline, *of_tokens)


def _hidden(seen: Tensor, start: int, by_shape: bool, by_pattern: bool, inline: bool, *masks: Tensor) -> Tensor:
    out, own = seen.shape[1], slice(start, start + seen.shape[1])
    seen = seen[:, :, own]
    unseen = ~seen.any(1)
    if by_shape:
        return unseen
    if inline and (seen.diagonal(dim1=1, dim2=2) | unseen).all():
        return unseen  # families that compute attention inline make masks of tokens: all others see themselves
    # What one example hides and another one shows, where the pattern of the attention is the same in all.
    alike = ((seen == seen.any(0) & ~unseen[:, None]) | ~seen.any(2, keepdim=True)).all(1).all(1)
    hidden = unseen & alike[:, None] & ~unseen.all(0) & by_pattern
    for mask in masks:
        tokens = mask.reshape(len(seen), -1).to(unseen.device)
        tokens = tokens if tokens.shape[1] == out else tokens[:, own]
        factors = ((tokens == 0) | (tokens == 1)).all()
        if factors or ((tokens == 0) | ~mask_as_bool(tokens)).all():
            shows = tokens.bool() if factors else mask_as_bool(tokens)
            for one in (~shows, shows):  # a mask may mark what is hidden, or what is not
                hidden = hidden | one if unseen[one].all() else hidden
    return hidden
