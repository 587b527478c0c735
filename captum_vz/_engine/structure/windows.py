"""Layouts of tokens: positions that attention sees in windows, grids or packed images, and tokens with several vectors.

Swin and SAM cut a grid into windows, after shifting and padding it. Other layers put all images into one sequence and
attend to each by itself. The code that does so is not read. A nudge to a position of the layer's input moves the values
that come from it, and no others, so runs of the layer show where each position went. Positions are nudged by the
binary digits of their index, two runs a digit.

Other layers carry several vectors of each token, in streams (hyper-connections, AltUp).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from captum_vz._engine.capture.interventions import FillSlots
from captum_vz._engine.capture.layer_runner import LayerRunner, Streams
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.budget import is_out_of_memory
from captum_vz._engine.numerics.perturbation import is_changed, nudged, replaced
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._private import tree_leaves
from captum_vz.errors import UnsupportedLayerError

NO_POSITION, MANY_POSITIONS = -1, -2
# The axis of the streams: (batch, tokens, stream, d) in DeepSeek-V4, (stream, batch, tokens, d) in Gemma 3n.
AXES = (2, 0)


class Windows:
    """Which position of the layer each value of an attention comes from.

    A position is a place in the layer's input, counted through the batch. A slot is a place in a window, counted
    through the windows. Grids are read row by row.

    Attributes:
        shape: (examples, positions of the layer's output, positions of its input).
        window: The window of each slot, `(slots,)`.
        place: The place of each slot in its window, `(slots,)`.
        position: The position whose value each slot holds, `(slots,)`. NO_POSITION: padding.
    """

    def __init__(self, record: LayerRecord, attention: AttentionRecord, axis: int) -> None:
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
            of_calls = [torch.arange(values.shape[1]).repeat(len(values)) for values in self.values()]
            self.place = torch.cat(of_calls).to(hidden.device)
            self.window = (self.place == 0).cumsum(0) - 1
            self.position = self._positions()
            if (self.position != NO_POSITION).any():
                return
        raise CannotReplayError("its values come from no input that holds positions as its output does")

    def tokens(self, x: Tensor) -> Tensor:
        """A tensor of the layer as `(batch, positions, features)`."""
        x = x.movedim(self._axis, -1)
        return x[None] if x.dim() == 2 else x.flatten(1, -2)

    def run(self, slots: Tensor | None = None, filling: float = 0.0, heads: Tensor | None = None) -> Tensor:
        """The layer's output `(batch, out, d)`, with `filling` in `slots (slots,)` of `heads (head,)`."""
        return self.tokens(self._run(self._hidden, FillSlots(self.attention, slots, filling, heads)))

    def values(self, hidden: Tensor | None = None) -> list[Tensor]:
        """The values of each attention call, `(windows, places, features)`. `hidden` replaces the layer's input."""
        handler = FillSlots(self.attention)
        self._run(self._hidden if hidden is None else hidden, handler)
        return handler.calls

    def _run(self, hidden: Tensor, handler: FillSlots) -> Tensor:
        output = self.runner.run(handler, self.runner.arguments_with(self._hidden, hidden))
        handler.check_all_filled()
        return output

    def _positions(self) -> Tensor:
        batch, _, sources = self.shape
        hidden = self._hidden.movedim(self._axis, -1)
        clean = self.values(hidden.movedim(-1, self._axis).contiguous())

        def depend_on(other: Tensor, chosen: Tensor) -> Tensor:
            changed = replaced(hidden, other, chosen.view(hidden.shape[:-1]))
            found = self.values(changed.movedim(-1, self._axis).contiguous())
            return torch.cat([is_changed(x, y).any(-1).flatten() for x, y in zip(found, clean, strict=True)])

        everywhere = torch.ones(batch * sources, dtype=torch.bool, device=hidden.device)
        nudge, nan = nudged(hidden), torch.full_like(hidden, torch.nan)
        # Quantised numbers may not move with a nudge.
        all_move = torch.equal(depend_on(nudge, everywhere), depend_on(nan, everywhere))
        positions = find_sources(batch * sources, partial(depend_on, nudge if all_move else nan), hidden.device)
        if (positions == MANY_POSITIONS).any():
            raise CannotReplayError("its values come from several positions each")
        return positions


def is_rearranged(record: LayerRecord, attention: AttentionRecord) -> bool:
    """Whether the layer's output is not `(batch, out, d)` with one vector for each row of its attention."""
    output = first_tensor(record.output)
    batch, _, out, _ = attention.shape
    return output is None or output.dim() != 3 or attention.batch_first(output).shape[:2] != (batch, out)


def find_windows(record: LayerRecord, attention: AttentionRecord) -> Windows:
    """The positions that an attention sees in windows.

    CannotReplayError: it is unknown which position each value comes from.
    """
    reasons = []
    for axis in (-1, 1):  # features last, or as convolutions have them: (batch, d, height, width)
        try:
            return Windows(record, attention, axis)
        except (CannotReplayError, RuntimeError, ValueError, LookupError) as error:
            if is_out_of_memory(error):
                raise
            reasons.append(str(error))
    raise CannotReplayError(reasons[0])


def find_sources(count: int, depend_on: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Which of `count` sources each item depends on: NO_POSITION if on none, MANY_POSITIONS if on several.

    `depend_on(chosen (count,))` says which items depend on any of the chosen sources, `(items,)`.
    """
    index = torch.arange(count, device=device)
    digits = range(max(1, (count - 1).bit_length()))
    ones = torch.stack([depend_on((index >> digit) % 2 == 1) for digit in digits])
    zeros = torch.stack([depend_on((index >> digit) % 2 == 0) for digit in digits])
    found = (ones.long() << torch.arange(len(digits), device=device)[:, None]).sum(0)
    found = found.where((ones ^ zeros).all(0), MANY_POSITIONS)
    return found.where((ones | zeros).any(0), NO_POSITION)


def find_streams(record: LayerRecord, attention: AttentionRecord) -> Streams | None:
    """The streams of a layer, or None if its tokens have one vector each.

    UnsupportedLayerError: tokens and streams have the same number, so that either axis could hold the streams.
    """
    output = first_tensor(record.output)
    if output is None or output.dim() != 4 or not record.states or record.states[0].shape != output.shape:
        return None
    batch, _, out, sources = attention.shape
    if output.shape[:3] == (batch, 1, out):  # one prompt for each image (SAM)
        return Streams(1, 1)
    # Other sources than the tokens: summaries of them (DeepSeek-V4), or a cache.
    if out != sources or len(record.attentions) > 1:
        return None
    axes = [axis for axis in AXES if output.shape[axis] > 1 and output.movedim(axis, 2).shape[:2] == (batch, out)]
    if len(axes) > 1:
        raise UnsupportedLayerError(
            f"The layer {record.name} carries {tuple(output.shape)}, as many vectors of each token as there are tokens "
            "and examples, so the axes cannot be distinguished. Pass another number of examples."
        )
    return Streams(axes[0], output.shape[axes[0]]) if axes else None
