"""The handler that records a layer's run in the clean pass."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.records import (
    AttentionRecord,
    AttentionShape,
    InlineValues,
    LayerRecord,
    Step,
    VersionedTensor,
)
from captum_vz._engine.numerics.attention import Weights, all_weights
from captum_vz._engine.numerics.tensors import first_tensor, version
from captum_vz._engine.numerics.tolerance import PROJECTED, is_same_attention, same_numbers
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz._engine.taps.projection import family_of, is_value_projection, visible_by_argument
from captum_vz._private import own_modules, own_parameters
from captum_vz.errors import UnsupportedLayerError


class Recorder(AttentionHandler):
    """Computes each attention call as the model does, and fills a `LayerRecord`."""

    def __init__(self, record: LayerRecord) -> None:
        self.record = record
        self._running: list[nn.Module] = []  # submodules that have begun, innermost last
        self._inline_values: dict[int, list[Tensor]] = {}  # by the id of the attention module that runs
        self._context: VersionedTensor | None = None  # the last one, as the model was given it
        self._projections: list[tuple[nn.Module, VersionedTensor]] = []  # and what modules made of it
        # Tensors of steps and their copies, by id and version. Most tensors are of several steps.
        self._copies: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Weights]:
        context, weights = call.compute(call.values)
        record = self.record
        module = call.module or (self._running[-1] if self._running else record.layer)
        if call.plain is not None and not record.attentions and not is_same_attention(call.plain()[0], context):
            record.warnings.append(
                f"a plain run of {type(module).__name__} returns NaN for tokens that see nothing, because the number "
                "that hides tokens is -inf in its softmax. Here it is float32's lowest number, and the output is finite"
            )
        try:
            used = call.weights_used(module, context, weights)
        except UnsupportedLayerError:
            if record.given is None:
                raise
            return context, weights  # the user has said where the values are
        last = record.attentions[-1] if record.attentions else None
        again = last is not None and last.module is module and last.output is None  # the module still runs
        if last is not None and again and call.module is not None:  # for another part of the same attention
            last.calls += 1
            # For the same rows (DiffLlama), or for others (images of different sizes in a sequence).
            before, last.weights = last.weights, None
            if before is not None and before.shape == used.shape:
                last.weights = torch.maximum(all_weights(before), all_weights(used))
            return context, weights
        # scaled_dot_product_attention does not say which module calls it. Two calls from one forward may be self- and
        # cross-attention, or two parts of one attention.
        self._context = VersionedTensor(context)
        self._projections.clear()
        shape = AttentionShape(*weights.shape)
        values = call.values if len(call.values) == shape.batch else call.values.expand(shape.batch, -1, -1, -1)
        record.attentions.append(
            AttentionRecord(
                module,
                shape,
                values.clone(),  # some layers write over them
                call.visible if call.obeys_mask or _hides(call.visible, used) else None,
                used if isinstance(used, Tensor) else used.kept(),
                context.clone(),  # some modules gate the context in place
                call.dropout,
                calls_before=sum(one.calls for one in record.attentions if one.inline is None),
                repeated=again,
                tokens_first=isinstance(module, nn.MultiheadAttention) and not module.batch_first,
                tap="scaled_dot_product_attention" if call.module is None else "AttentionInterface",
                causal=call.causal,
            )
        )
        return context, weights

    def on_enter(self, module: nn.Module) -> None:
        self.record.modules_run.append(module)
        self._running.append(module)

    def on_exit(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> None:
        record = self.record
        if self._running and self._running[-1] is module:
            self._running.pop()
        values = first_tensor(output)
        attention = self._running[-1] if self._running else record.layer
        holder = attention if record.given is None else record.layer
        if values is not None and is_value_projection(module, holder, record.given):
            self._inline_values.setdefault(id(attention), []).append(values)
        if isinstance(module, nn.Parameter):
            return
        if record.steps is not None:
            given = first_tensor(inputs)
            alone = None if given is None or len(inputs) > 1 else VersionedTensor(given)
            record.steps.append(Step(module, alone, self._copied(given), self._copied(values)))
        if own_parameters(module) and inputs and isinstance(inputs[0], Tensor):
            record.module_rows.setdefault(id(module), []).append(inputs[0].shape[:-1].numel())
        kept = record.keep_module_io and record.attentions and own_parameters(module) and not own_modules(module)
        if kept and inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            record.module_io[id(module)] = VersionedTensor(inputs[0]), VersionedTensor(output)
        if id(module) in self._inline_values and self._records_inline(module):
            self._record_inline(module, self._inline_values.pop(id(module)), output)
        elif record.attentions:
            self._follow_context(record.attentions[-1], module, inputs, output)

    def _copied(self, value: Tensor | None) -> Tensor | None:
        """A copy of hidden states. None: the tensor has another size."""
        # Some layers flatten batch and tokens.
        if value is None or not any(
            x.numel() == value.numel() and x.shape[-1:] == value.shape[-1:] for x in self.record.states
        ):
            return None
        number = version(value)
        if number is None:
            return value.clone()
        if (id(value), number) not in self._copies:
            self._copies[id(value), number] = value, value.clone()
        return self._copies[id(value), number][1]

    def finish(self, output: Any) -> None:
        """Called when the layer returns. Records attention of the layer's own forward that no other tap has seen."""
        self.record.output = output
        projected = self._inline_values.pop(id(self.record.layer), None)
        if projected and self._records_inline(self.record.layer):
            self._record_inline(self.record.layer, projected, output)
        named = [one for one in self.record.attentions if one.inline is not None]
        if self.record.given is None or not named:
            return
        # An attention that sums the very values that the user names can be read as well as without them.
        read = [one for one in self.record.attentions if one.inline is None]
        summed = any(_same(one.values.transpose(1, 2), named[0].values.to(one.values.dtype)) for one in read)
        self.record.attentions[:] = read if summed and not any(one.repeated for one in read) else named

    def _records_inline(self, module: nn.Module) -> bool:
        """Whether to record what `module` projects: the user names it, or no other tap has seen the attention."""
        return self.record.given is not None or all(one.module is not module for one in self.record.attentions)

    def _follow_context(
        self, attention: AttentionRecord, module: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> None:
        """Follow the context from the attention function to what the attention module returns."""
        result = first_tensor(output)
        if attention.output is not None or attention.context is None:
            return
        if module is not attention.module:
            # A submodule with more inputs (a gate's) does not project the context alone.
            later = any(_is_view(made, inputs[0]) for _, made in self._projections if inputs)
            if result is not None and len(inputs) == 1 and not later and self._is_context(attention.context, inputs[0]):
                self._projections.append((module, VersionedTensor(result)))
            return
        attention.output = output
        if isinstance(module, nn.MultiheadAttention):  # projects without calling its submodule
            projected = VersionedTensor(module.out_proj(attention.context.flatten(2)))
            self._projections.append((module.out_proj, projected))
        if result is not None:
            self._find_projection(attention, attention.batch_first(result))
        self._projections.clear()

    def _find_projection(self, attention: AttentionRecord, result: Tensor) -> None:
        """Note whether `result (batch, out, d)` is the context, or what a submodule made of it."""
        assert attention.context is not None and self._context is not None
        made: list[tuple[nn.Module | None, VersionedTensor]] = [(None, self._context), *self._projections]
        # Mostly the result is one of these tensors, which no number has to show.
        found = [module for module, tensor in made if _is_view(tensor, result)]
        if not found:
            numbers = [(None, attention.context), *((module, tensor.value) for module, tensor in self._projections)]
            found = [module for module, value in numbers if _same(value, result)][:1]
        if found:
            attention.projection, attention.replaceable = found[0], True

    def _is_context(self, context: Tensor, found: Any) -> bool:
        return (self._context is not None and _is_view(self._context, found)) or _same(context, found)

    def _record_inline(self, module: nn.Module, projected: list[Tensor], output: Any) -> None:
        given = self.record.given
        row, values, result = given or family_of(module), projected[0], first_tensor(output)
        # A module that projects several times projects something else too, or projects in parts.
        if row is not None and len(projected) > 1 and row.second_projection is None:
            self.record.projects_more = module
            return
        if row is None or values.dim() not in (2, 3, 4) or result is None or result.dim() not in (2, 3, 4):
            return
        columns, values = row.columns(module, values), row.rows(values)
        tokens = result.shape[:1] if row.sequence_first or result.dim() == 2 else result.shape[1:-1]
        shape = AttentionShape(len(values), len(columns), tokens.numel(), values.shape[1])
        arguments = [*self.record.args, *self.record.kwargs.values()]
        arguments = arguments[::-1] if self.record.attentions else arguments  # a cross-attention's mask comes last
        self.record.attentions.append(
            AttentionRecord(
                module,
                shape,
                values,
                # What an argument of unknown code means is unknown. Values of hidden sources change nothing.
                visible_by_argument(arguments, shape.batch, shape.out, shape.sources, row) if given is None else None,
                calls=len(projected),
                calls_before=sum(one.calls for one in self.record.attentions if one.inline is None),
                tokens_first=row.sequence_first,
                model_pads=row.pads,
                inline=InlineValues(
                    row,
                    attrgetter(row.projection)(module if given is None else self.record.layer),
                    None if row.second_projection is None else getattr(module, row.second_projection),
                    columns,
                    row.zero(module),
                ),
                output=output,
            )
        )


def _hides(visible: Tensor | None, weights: Weights) -> bool:
    """Whether hidden sources have no weight, except for tokens that see nothing."""
    if visible is None:
        return False
    return not all_weights(weights).masked_fill(visible | ~visible.any(-1, keepdim=True), 0).any()


def _is_view(tensor: VersionedTensor, found: Any) -> bool:
    return isinstance(found, Tensor) and tensor.value.shape[:2] == found.shape[:2] and tensor.is_seen_in(found)


def _same(expected: Tensor, found: Any) -> bool:
    """Whether two tensors hold the same numbers, whatever their shapes: heads are merged on the way."""
    if not isinstance(found, Tensor) or expected.numel() != found.numel() or expected.shape[:2] != found.shape[:2]:
        return False
    return same_numbers(expected.flatten(2), found.flatten(2), PROJECTED)
