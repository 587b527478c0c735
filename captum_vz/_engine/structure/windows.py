"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from captum_vz._engine.capture.interventions import SlotValues
from captum_vz._engine.capture.layer_runner import instead, run_again, without_caches, without_hooks
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.matmul import OneDnnLinears
from captum_vz._engine.numerics.perturbation import is_changed, max_abs, nudged, replaced
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplay
from captum_vz._engine.taps.handler import handled_by

NO_POSITION, MANY_POSITIONS = -1, -2
# How many times as large as all values the one is that is not to be overheard.
LOUD_FACTOR = 8


class Windows:
    """Where the values of an attention come from, and runs of its layer with some of them zeroed.

    A position is a place in the layer's input, counted through the batch. A slot is a place in a window, counted
    through the windows.

    Attributes:
        shape: (examples, positions of the layer's output, positions of its input).
        window: The window of each slot, `(slots,)`.
        place: The place of each slot in its window, `(slots,)`.
        position: The position whose value each slot holds, `(slots,)`; NO_POSITION: padding.
    """

    def __init__(self, recording: LayerRecord, call: AttentionRecord, axis: int) -> None:
        self.call = call
        self.axis = axis
        self.layer = without_hooks(recording.layer)
        self.arguments = without_caches((recording.args, recording.kwargs))
        output = first_tensor(recording.output)
        leaves = [x for x in tree_leaves(self.arguments) if isinstance(x, Tensor) and x.is_floating_point()]
        if output is None or output.dim() < 2 or (axis == 1 and output.dim() != 4):
            raise CannotReplay("its output does not hold its positions in a known way")
        outputs = self.by_position(output)
        alike = [x for x in leaves if x.dim() == output.dim() and len(self.by_position(x)) == len(outputs)]
        for hidden in alike:  # an attention module may be given its values apart from its queries
            self.hidden = hidden
            self.shape = (len(outputs), outputs.shape[1], self.by_position(hidden).shape[1])
            self.window, self.place = self._slots()
            self.position = self._positions()
            if (self.position != NO_POSITION).any():
                return
        raise CannotReplay("its values come from no input that holds positions as its output does")

    def _slots(self) -> tuple[Tensor, Tensor]:
        """The window of each slot, and its place in it."""
        clean = SlotValues(self.call)
        self._run(self.hidden, clean)
        sizes = [part.shape[:2] for part in clean.parts]
        place = [torch.arange(places).repeat(windows) for windows, places in sizes]
        windows = [torch.arange(windows).repeat_interleave(places) for windows, places in sizes]
        before = [sum(one[0] for one in sizes[:number]) for number in range(len(sizes))]
        window = torch.cat([n + w for n, w in zip(before, windows, strict=True)])
        return window.to(self.hidden.device), torch.cat(place).to(self.hidden.device)

    def by_position(self, tensor: Tensor) -> Tensor:
        """A tensor of the layer, as `(batch, positions, features)`."""
        tensor = tensor.movedim(self.axis, -1)
        return tensor[None] if tensor.dim() == 2 else tensor.flatten(1, -2)

    def run(self, zeroed: Tensor, heads: Tensor) -> Tensor:
        """The layer's output `(batch, out, d)` with the values of `zeroed (slots,)` zeroed in `heads (head,)`."""
        values = SlotValues(self.call, zeroed, 0.0, heads)
        output = self._run(self.hidden, values)
        if sum(part[..., 0].numel() for part in values.parts) != len(zeroed):
            raise CannotReplay("run again, its attention asked for other values")
        return self.by_position(output)

    def steps(self, groups: Tensor | None, one_by_one: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """What to zero at a time, and the column of the map that this is for each output: `(slots,)`, `(batch, out)`.

        Groups `(batch, in)` of positions are zeroed together; None: each position is its own.
        """
        batch, out, sources = self.shape
        home = self.home  # to be asked for in any case: it makes sure that examples are apart
        if home is not None and groups is None and not one_by_one:
            for place in self.place.unique():
                zeroed = (self.place == place) & (self.position != NO_POSITION)
                held = torch.full((int(self.window.max()) + 1,), NO_POSITION, device=self.window.device)
                held[self.window[zeroed]] = self.position[zeroed] % sources
                yield zeroed, held[home].where(home != NO_POSITION, NO_POSITION)
            return
        if groups is None:
            groups = torch.arange(sources, device=self.position.device).expand(batch, sources)
        group = groups.flatten()[self.position].where(self.position != NO_POSITION, NO_POSITION)
        for number in range(int(groups.max()) + 1):
            yield group == number, torch.full((batch, out), number, device=group.device)

    def _run(self, hidden: Tensor, values: SlotValues) -> Tensor:
        args, kwargs = tree_map(partial(instead, self.hidden, hidden), self.arguments)
        with handled_by(values), OneDnnLinears():
            output = first_tensor(run_again(self.layer, args, kwargs))
        if output is None:
            raise CannotReplay("run again, it returned no tensor")
        return output

    def _positions(self) -> Tensor:
        batch, _, sources = self.shape
        moved = self.hidden.movedim(self.axis, -1)

        def values_of(hidden: Tensor) -> list[Tensor]:
            values = SlotValues(self.call)
            self._run(hidden.movedim(-1, self.axis).contiguous(), values)
            return values.parts

        clean = values_of(moved)

        def values_that_come_from(other: Tensor, chosen: Tensor) -> Tensor:
            found = values_of(replaced(moved, other, chosen.view(moved.shape[:-1])))
            return torch.cat([is_changed(x, y).any(-1).flatten() for x, y in zip(found, clean, strict=True)])

        everywhere = torch.ones(batch * sources, dtype=torch.bool, device=self.hidden.device)
        nudge, nothing = nudged(moved), torch.full_like(moved, torch.nan)
        # Quantised numbers may not move with a nudge.
        seen = torch.equal(values_that_come_from(nudge, everywhere), values_that_come_from(nothing, everywhere))
        other = nudge if seen else nothing
        positions = _which_one(batch * sources, partial(values_that_come_from, other), self.hidden.device)
        if (positions == MANY_POSITIONS).any():
            raise CannotReplay("its values come from several positions each")
        return positions

    @cached_property
    def home(self) -> Tensor | None:
        """The window that each output depends on, `(batch, out)`, or NO_POSITION; no tensor if any depends on several."""
        batch, out, sources = self.shape
        held = self.position != NO_POSITION
        example = torch.full((int(self.window.max()) + 1,), NO_POSITION, device=self.window.device)
        example[self.window[held]] = self.position[held] // sources
        if (example[self.window[held]] != self.position[held] // sources).any():
            raise CannotReplay("its attention reaches from one example to another")

        values = SlotValues(self.call)
        clean = self._run(self.hidden, values)
        loud = LOUD_FACTOR * max(float(max_abs(part)) for part in values.parts)

        def outputs_that_see(slots: Tensor) -> Tensor:
            found = [self._run(self.hidden, SlotValues(self.call, slots, filling)) for filling in (torch.nan, loud)]
            seen = torch.stack([is_changed(self.by_position(x), self.by_position(clean)) for x in found])
            return seen.any(0).any(-1).flatten()

        own = torch.arange(batch, device=held.device).repeat_interleave(out)
        seen = _which_one(batch, lambda chosen: outputs_that_see(chosen[example[self.window]] & held), held.device)
        if ((seen != own) & (seen != NO_POSITION)).any():
            raise CannotReplay("its attention reaches from one example to another")
        home = _which_one(len(example), lambda chosen: outputs_that_see(chosen[self.window]), held.device)
        if (home == NO_POSITION).all():
            raise CannotReplay("its outputs seem to depend on no value")
        twice = len(torch.stack([self.window, self.position])[:, held].unique(dim=1).T) < held.sum()
        return None if twice or (home == MANY_POSITIONS).any() else home.view(batch, out)


def _which_one(count: int, dependent: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Which of `count` things each of others depends on, told by `dependent(chosen (count,)) -> (others,)`."""
    number = torch.arange(count, device=device)
    digits = range(max(1, (count - 1).bit_length()))
    ones = torch.stack([dependent((number >> digit) % 2 == 1) for digit in digits])
    zeros = torch.stack([dependent((number >> digit) % 2 == 0) for digit in digits])
    found = (ones.long() << torch.arange(len(digits), device=device)[:, None]).sum(0)
    found = found.where((ones ^ zeros).all(0), MANY_POSITIONS)
    return found.where((ones | zeros).any(0), NO_POSITION)
