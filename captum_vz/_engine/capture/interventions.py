"""Handlers that zero, replace or stop one attention while a layer runs again."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_vz._engine.numerics import Weights, by_rows, first_tensor, for_query_heads
from captum_vz._engine.numerics.tolerance import CannotReplayError, noise_like, with_noise
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz.functional.interventions import Intervention, contexts_after, values_after

if TYPE_CHECKING:
    from captum_vz._engine.capture import AttentionRecord


class StopRunError(Exception):
    """The run of a layer has come to the point where it should end. The argument is the result."""


@dataclass(eq=False, repr=False)
class SiteHandler(AttentionHandler):
    """Changes one attention of a layer. All other attentions are computed.

    One attention may be several calls of the attention function, or several runs of value projections. A subclass says
    in `change_call` what a call returns, and in `change_values` what a value projection returns.
    """

    attention: AttentionRecord
    _function_calls = 0
    _site_calls = 0

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        self._function_calls += 1
        number = self._function_calls - self.attention.calls_before
        if self.attention.inline is not None or not 1 <= number <= self.attention.calls:
            return call.compute(call.values)
        self._site_calls += 1
        return self.change_call(call)

    def on_exit(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> Any:
        inline = self.attention.inline
        if inline is None or not any(module is x for x in (inline.projection, inline.other_projection, *inline.places)):
            return None
        if (projected := first_tensor(output)) is None:
            return None
        self._site_calls += 1
        row, own = inline.places.get(module, (inline.row, slice(None)))
        rows = row.rows(projected)
        if inline.places:  # other modules project the values of other heads
            rows = functional.pad(rows, (own.start, inline.columns[-1].stop - own.stop))
        self.change_values(rows)
        projected = row.with_rows(rows[..., own], projected)
        return projected if isinstance(output, Tensor) else (projected, *output[1:])

    def check_called(self) -> None:
        """Raise CannotReplayError unless the attention was called as often as in the clean pass."""
        if self._site_calls != self.attention.calls:
            raise CannotReplayError(f"the values of its attention were asked for {self._site_calls} times in one run")

    def change_call(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        """What a call of the attention function returns."""
        return call.compute(call.values)

    def change_values(self, values: Tensor) -> None:
        """Write into the output of a value projection, `(batch, in, features)`."""


@dataclass(eq=False, repr=False)
class Intervene(SiteHandler):
    """Lets an intervention replace values where `zeroed (copies, head, in)` is True."""

    zeroed: Tensor
    intervention: Intervention
    real: Tensor | None = None  # the sources that are no padding, (copies, in). None: all
    on_clean_input: bool = False  # whether the layer runs on its clean input, so that its weights are known

    def change_call(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        weights, context = self.attention.weights, self.attention.context
        used, known = weights, self.on_clean_input and call.explained and self.attention.calls == 1
        if not known or weights is None or context is None:
            context, weights = call.compute(call.values)
            used = call.weights_used(self.attention.module, context, weights)
        assert used is not None  # narrows the type
        # In the memory format of the context, because a module may take a view of it.
        return torch.empty_like(context).copy_(self.new_context(context, used, call.values)), weights

    def new_context(self, context: Tensor, weights: Weights, values: Tensor) -> Tensor:
        """The context of values `(copies, key-value head, in, d_head)`, in any shape of as many numbers."""
        # Summed over the other sources. The context minus the zeroed values would be rounding if little is left.
        values = for_query_heads(values, weights.shape[1])
        change = partial(contexts_after, self.intervention, values=values, zeroed=self.zeroed, real=self.real)
        changed = by_rows(weights, change)
        return changed.transpose(1, 2).reshape(context.shape)

    def change_values(self, values: Tensor) -> None:
        if self.attention.inline is not None:
            self.attention.inline.change(
                values, self.zeroed, lambda own: values_after(self.intervention, own, self.zeroed, self.real)
            )


@dataclass(eq=False, repr=False)
class ScaleNoise(SiteHandler):
    """Replaces the context of copy i by noise of strength `strengths[i]`. Strength 0 leaves it unchanged."""

    strengths: Tensor

    def change_call(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        context, weights = call.compute(call.values)
        return torch.empty_like(context).copy_(with_noise(context, self.strengths)), weights

    def change_values(self, values: Tensor) -> None:
        values.copy_(with_noise(values, self.strengths))


@dataclass(eq=False, repr=False)
class AddToValues(SiteHandler):
    """Adds `strength` times noise to the values of one source, and keeps what submodules are given afterwards."""

    source: int
    strength: float
    given: list[Tensor] = field(default_factory=list, init=False)

    def on_exit(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> Any:
        if self._site_calls and isinstance(module, nn.Module):
            self.given += [x.clone() for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
        return super().on_exit(module, inputs, output)

    def change_values(self, values: Tensor) -> None:
        row = values[:, self.source]
        row += self.strength * noise_like(row, 1.0)


@dataclass(eq=False, repr=False)
class FillSlots(SiteHandler):
    """Replaces values by `filling` in some slots of an attention that sees the layer's tokens in windows.

    A slot is a place in a window, counted through all windows and `calls`, the values `(windows, places, features)`.
    `slots (copies, slots)` are those of each copy of the layer's input. None: no slot.
    """

    slots: Tensor | None = None
    filling: float = 0.0
    heads: Tensor | None = None
    calls: list[Tensor] = field(default_factory=list, init=False)

    def change_call(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        slots = self._slots_of(call.values.transpose(1, 2).flatten(2))
        if slots is None:
            return call.compute(call.values)
        filled, weights = call.compute(call.values.masked_fill(slots[:, None, :, None], self.filling))
        if self.heads is None:
            return filled, weights
        return torch.where(self.heads[:, None], filled, call.compute(call.values)[0]), weights

    def change_values(self, values: Tensor) -> None:
        inline = self.attention.inline
        slots = None if inline is None else self._slots_of(inline.by_head(values))
        if inline is not None and slots is not None:
            heads = values.new_ones(self.attention.shape.heads, dtype=torch.bool) if self.heads is None else self.heads
            filled = slots[:, None] & heads[:, None]
            inline.change(values, filled, lambda own: torch.full_like(own, self.filling))

    def check_all_filled(self) -> None:
        """Raise CannotReplayError unless the values filled as many slots as are known."""
        if self.slots is not None and _slots_in(self.calls) != self.slots.numel():
            raise CannotReplayError("run again, its attention asked for other values")

    def _slots_of(self, values: Tensor) -> Tensor | None:
        """The slots that are filled in the next call, `(windows, places)`. None: no slots are filled."""
        before = _slots_in(self.calls)
        self.calls.append(values)
        if self.slots is None:
            return None
        copies = len(self.slots)
        return self.slots[:, before // copies : _slots_in(self.calls) // copies].reshape(values.shape[:2])


def _slots_in(calls: list[Tensor]) -> int:
    return sum(values.shape[0] * values.shape[1] for values in calls)


class StopAtValues(SiteHandler):
    """Ends the run of a layer at one attention. The result is its first values, `(windows, places, features)`."""

    def change_call(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        raise StopRunError(call.values.transpose(1, 2).flatten(2))

    def change_values(self, values: Tensor) -> None:
        if self.attention.inline is not None:
            raise StopRunError(self.attention.inline.by_head(values))
