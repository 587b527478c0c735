"""TODO."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from captum_vz._engine.capture.records import AttentionRecord
from captum_vz._engine.numerics.perturbation import with_noise
from captum_vz._engine.numerics.tensors import first_tensor, for_query_heads
from captum_vz._engine.numerics.tolerance import CannotReplay
from captum_vz._engine.taps.handler import Attend, AttentionHandler, weights_used


class SlotValues(AttentionHandler):
    """Hears the values of one attention, part by part `(windows, places, features)`, and replaces some by `filling`."""

    def __init__(
        self, call: AttentionRecord, slots: Tensor | None = None, filling: float = 0.0, heads: Tensor | None = None
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
            raise CannotReplay("its heads share their values, which cannot be zeroed for some of them alone")
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


class StopRunError(Exception):
    """What was waited for has come; the argument is that."""


class StopAtValues(SlotValues):
    """Ends the run of a layer at the first values of an attention, before which others ask for theirs."""

    def __init__(self, call: AttentionRecord, before: int) -> None:
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
        raise StopRunError(values)


class StopAtOutput(AttentionHandler):
    """Answers an attention, before which others are called, and ends the run when the module that called it returns."""

    def __init__(self, call: AttentionRecord, before: int, context: Tensor) -> None:
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
            raise StopRunError(self.call.batch_first(answer))


class CopiesHandler(AttentionHandler):
    """Changes what one attention of a layer answers, in each of `count` copies otherwise."""

    def __init__(self, call: AttentionRecord, site: int, count: int) -> None:
        self.call = call
        self.site = site
        self.count = count
        self.attentions = 0
        self.times = 0

    def check_asked(self) -> None:
        if self.times != self.call.parts:
            raise CannotReplay(f"the values of its attention were asked for {self.times} times in one run")

    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        context, weights = attend(values)
        self.attentions += 1
        first, last = self.site + 1, self.site + self.call.parts
        if self.call.value_projection is not None or not first <= self.attentions <= last:
            return context, weights
        self.times += 1
        used = weights_used(self.call.module, attend, values, context, weights)
        # In the memory format of the context, for a module may take a view of it.
        return torch.empty_like(context).copy_(self.changed(context, used, values)), weights

    def returned(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> Any:
        if not self.call.projects(module):
            return None
        self.times += 1
        projected = first_tensor(output)
        assert projected is not None  # it was one in the clean pass
        projected = projected.clone()
        self.change(projected.transpose(0, 1) if self.call.transposed else self.call.batch_first(projected))
        return projected if isinstance(output, Tensor) else (projected, *output[1:])

    @abstractmethod
    def changed(self, context: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        """What stands for the context `(copies, out, ...)`, of values `(copies, key-value head, in, d_head)`."""

    @abstractmethod
    def change(self, values: Tensor) -> None:
        """Write into what an inline attention's values are projected to, `(copies, in, features)`."""


class ZeroValues(CopiesHandler):
    """Computes one attention of a layer with a different set of values zeroed in each copy."""

    def __init__(self, call: AttentionRecord, site: int, zeroed: Tensor) -> None:
        super().__init__(call, site, len(zeroed))
        self.zeroed = zeroed

    def changed(self, context: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        # Summed over the others: the context less what is lost would be rounding where nearly all of it is.
        left = (weights * ~self.zeroed[:, :, None]) @ for_query_heads(values, weights.shape[1])
        return left.transpose(1, 2).reshape(context.shape)

    def change(self, values: Tensor) -> None:
        for head, columns in enumerate(self.call.value_columns):
            zeroed = self.zeroed[:, head, :, None]
            sharing = [self.zeroed[:, other] for other, same in enumerate(self.call.value_columns) if same == columns]
            if any(not torch.equal(other, sharing[0]) for other in sharing):
                raise CannotReplay("its heads share their values, which cannot be zeroed for some of them alone")
            zero = self.call.zero if isinstance(self.call.zero, float) else self.call.zero[head]
            values[..., columns] = torch.where(zeroed, zero, values[..., columns])


class ScaleNoise(CopiesHandler):
    """Puts noise in the place of what an attention answers, in each copy so many times as large; 0: in this not."""

    def __init__(self, call: AttentionRecord, site: int, strengths: Tensor) -> None:
        super().__init__(call, site, len(strengths))
        self.strengths = strengths

    def changed(self, context: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        return with_noise(context, self.strengths)

    def change(self, values: Tensor) -> None:
        values.copy_(with_noise(values, self.strengths))


class _Answer:
    """Holds the context for the next replay and makes sure that the layer asked for it, once."""

    context: Tensor | None = None

    def put(self, context: Tensor) -> None:
        self.context = context

    def take(self) -> Tensor:
        if self.context is None:
            raise CannotReplay("it asked for its attention more than once in one run")
        context, self.context = self.context, None
        return context

    def check_used(self) -> None:
        if self.context is not None:
            raise CannotReplay("it never asked for its attention's output")


class ModuleAnswer(nn.Module, _Answer):
    """Stands where the attention module stood, and returns its output for the contexts it was given.

    With `projected`, what it is given is the output itself.
    """

    def __init__(self, call: AttentionRecord, projected: bool = False) -> None:
        super().__init__()
        self.call = call
        # In a tuple, lest it be registered as a submodule of ours.
        self.projection: tuple[Callable[[Tensor], Any], ...] = ()
        if call.projection is not None and not projected:
            self.projection = (call.projection,)
        self.others = (None,) * (len(call.answer) - 1) if isinstance(call.answer, (tuple, list)) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = self.take()
        for projection in self.projection:
            output = first_tensor(projection(output))
        output = self.call.batch_first(output)
        return output if self.others is None else (output, *self.others)


class AnswerContext(_Answer, AttentionHandler):
    """Answers the first attention function that is called; later ones compute."""

    def __init__(self, call: AttentionRecord) -> None:
        assert call.context is not None
        self.heads = call.context.shape[2:]
        self.first = True

    def put(self, context: Tensor) -> None:
        super().put(context)
        self.first = True

    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        if not self.first:
            return attend(values)
        self.first = False
        return self.take().unflatten(-1, self.heads), None


class CleanContexts(AttentionHandler):
    """Answers each attention as in the clean pass."""

    def __init__(self, calls: list[AttentionRecord]) -> None:
        self.calls = iter(calls)

    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        call = next(self.calls)
        assert call.context is not None  # as was asked
        return call.context.clone(), call.weights


class CleanModule(nn.Module):
    """Stands where a module stood that computes attention inline, and returns what it did in the clean pass."""

    def __init__(self, call: AttentionRecord) -> None:
        super().__init__()
        self.answer = call.answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.answer)
