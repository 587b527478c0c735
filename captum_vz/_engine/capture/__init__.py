"""What one pass records of a layer and of its attentions, and the handler that records it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics import (
    ReturnedTensor,
    VersionedTensor,
    Weights,
    all_weights,
    budget_of,
    clone_tensor,
    first_tensor,
    hidden_states,
    keeping_weights,
    map_each,
    once_a_pass,
    tensors_in,
    version,
)
from captum_vz._engine.numerics.tolerance import PROJECTED, is_changed, same_numbers
from captum_vz._engine.taps.changes import ModuleState
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz._engine.taps.projection import (
    InlineValues,
    ValueProjection,
    family_of,
    is_value_projection,
    visible_by_argument,
)
from captum_vz._private import own_modules, own_parameters
from captum_vz.errors import UnsupportedLayerError


class AttentionShape(NamedTuple):
    """The sizes of one attention."""

    batch: int
    heads: int
    out: int
    sources: int


@dataclass(eq=False)
class AttentionRecord:
    """One attention of a layer in the clean pass."""

    module: nn.Module  # the module whose forward called the attention function
    shape: AttentionShape
    values: Tensor  # (batch, key-value head, in, d_head), inline what was projected (batch, in, features)
    visible: Tensor | None  # the sources that the mask lets through, bool, broadcastable to the weights. None: all
    weights: Weights | None = None  # after the softmax, (batch, head, out, in). None: they cannot be read
    context: Tensor | None = None  # sums of weighted values, (batch, out, head, d_head). None: they cannot be read
    dropout: float = 0.0
    calls: int = 1  # of the attention function, or of value projections. Values and context are those of the first
    calls_before: int = 0  # calls of the attention function for other attentions of the layer
    repeated: bool = False  # whether the record before this one is of the same run of `module`
    tokens_first: bool = False  # whether the layer's tensors are (tokens, batch, d), as torch.nn's are by default
    model_pads: bool = False  # whether the model may add padding after the inputs
    inline: InlineValues | None = None  # where the values are, if the module computes attention inline
    output: Any = None  # what `module` returned
    projection: nn.Module | None = None  # the submodule that made `output` of the context, if it is known
    replaceable: bool = False  # whether `output` is the context or its projection, and nothing else happened to it
    tap: str = "value projection"  # where the attention was read, in words
    causal: bool = False  # whether no token sees a later one, of as many sources as tokens. `visible` is None then

    def batch_first(self, value: Tensor) -> Tensor:
        """A tensor of the layer as `(batch, tokens, ...)`."""
        return value.transpose(0, 1) if self.tokens_first else value

    def is_seen(self) -> Tensor:
        """Whether the mask lets a target see a source with any head, `(batch, out, in)`. `causal` is left out."""
        batch, _, out, sources = self.shape
        if self.visible is None:
            return torch.ones(batch, out, sources, dtype=torch.bool, device=self.values.device)
        return once_a_pass(_seen_with_any_head, self.visible, self.shape)


def _seen_with_any_head(visible: Tensor, shape: AttentionShape) -> Tensor:
    return visible.any(1).expand(shape.batch, shape.out, shape.sources)


@dataclass(frozen=True)
class Step:
    """One run of a submodule. Tensors are copied, because layers may write into them."""

    module: nn.Module
    given: VersionedTensor | None  # the first input itself. None: there are several positional inputs, or none
    input: Tensor | None  # a copy of the first input. None: it has another size than the layer's hidden states
    output: Tensor | None  # a copy of the first output. None: it has another size


@dataclass(eq=False)
class LayerRecord:
    """One run of a layer in the clean pass."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int = 0  # its place among the layers that are explained
    number: int = 0  # how often it ran before in this pass
    output: Any = None
    attentions: list[AttentionRecord] = field(default_factory=list)  # in the order in which they were called
    modules_run: list[nn.Module] = field(default_factory=list)  # submodules, in the order in which they began
    # How many vectors each submodule with parameters was given in each of its runs, by id.
    module_rows: dict[int, list[int]] = field(default_factory=dict)
    # Input and output of each innermost submodule with parameters that ran after the attention, by id.
    module_io: dict[int, tuple[VersionedTensor, VersionedTensor]] = field(default_factory=dict)
    keep_module_io: bool = False  # whether `module_io` is filled
    steps: list[Step] | None = None  # runs of submodules, in the order in which they returned. None: none are kept
    state: ModuleState = field(default_factory=ModuleState)  # what the layer's modules held before this run
    writes_arguments: bool = False  # whether it writes into its arguments, so that each run needs its own
    # The user's hooks if they changed what its forward returned, each with whether it takes keyword arguments.
    hooks: list[tuple[Callable[..., Any], bool]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # for the user
    given: ValueProjection | None = None  # where the user says that the values are
    layout: str = "tokens"  # how the attention sees them: "tokens", "streams" (several vectors each) or "windows"
    inputs: tuple[Any, ...] = ()  # what the user's call was given, if it is known
    kind: tuple[Any] | None = None  # by `once_a_kind`, when it is first asked
    projects_more: nn.Module | None = None  # an attention module that projects more than values by the same weights

    @property
    def name(self) -> str:
        return type(self.layer).__name__

    @property
    def modules(self) -> list[nn.Module]:
        """The layer and all its submodules."""
        return self.state.modules

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        own = [x for module in self.modules for x in own_parameters(module).values() if x is not None]
        return list({id(x): x for x in own}.values())

    def rows_in_chunk(self, output: Tensor) -> int:
        """How many positions one chunk holds, by the layer's widest activation."""
        shapes = [parameter.shape[-2:] for parameter in self.parameters if parameter.dim() > 1]
        width = max([output.shape[-1], *[size for shape in shapes for size in shape]])
        return budget_of(output.device).items_in_chunk(output, width)

    @property
    def states(self) -> list[Tensor]:
        return hidden_states(self.args, self.kwargs)

    @property
    def first_output(self) -> Tensor:
        """The tensor that the layer returned, the first of several. UnsupportedLayerError: it returned none."""
        output = first_tensor(self.output)
        if output is None:
            raise UnsupportedLayerError(
                f"The layer {self.name} returned {type(self.output).__name__}, whose first entry is no tensor: "
                "expected the hidden states there. Pass a Transformer block that returns them first."
            )
        return output

    def forward(self, layer: nn.Module, arguments: tuple[Any, Any]) -> Any:
        """What the user's hooks make of what the forward of `layer`, the layer or a copy, returns."""
        args, kwargs = map_each(clone_tensor, arguments) if self.writes_arguments else arguments
        output = layer.forward(*args, **kwargs)
        for hook, with_kwargs in self.hooks:
            changed = hook(self.layer, args, *([kwargs] if with_kwargs else []), output)
            output = output if changed is None else changed
        return output

    def is_given(self, returned: ReturnedTensor) -> bool:
        """Whether the layer's input is `returned`: the first argument of this shape holds the same numbers."""
        # A decoder's first layer is also given what the encoder's last layer returned, but after its own hidden states.
        hidden, tensors = returned.copy, tensors_in((self.args, self.kwargs))
        given = next((x for x in tensors if x.is_floating_point() and x.shape == hidden.shape), None)
        if given is None or returned.is_seen_in(given):
            return given is not None
        hidden = hidden.to(given)
        return given.equal(hidden) or not bool(is_changed(given, hidden).any())

    def rearranges(self, attention: AttentionRecord) -> bool:
        """Whether the layer's output is not `(batch, out, d)` with one vector for each row of its attention."""
        output = first_tensor(self.output)
        batch, _, out, _ = attention.shape
        return output is None or output.dim() != 3 or attention.batch_first(output).shape[:2] != (batch, out)

    def encoder_sources(self, attention: AttentionRecord) -> int:
        """How many sources, the last ones, are an encoder's tokens that self-attention reads too (T5Gemma 2).

        The first token sees these sources. Of its own later tokens it sees none, unless all tokens see all. Their
        states are an argument of the layer, and no second attention reads them.
        """
        _, _, out, sources = attention.shape
        if sources <= out or len(self.attentions) > 1 or not attention.is_seen()[:, 0, -1].any():
            return 0
        lengths = [attention.batch_first(x).shape[1] for x in self.states[1:] if x.dim() == 3]
        return max((length for length in lengths if length <= sources - out), default=0)

    def merge(self, number: int) -> None:
        """Merge attention `number` into the one before it: they have some heads each, or are terms of a difference."""
        part, attention = self.attentions.pop(number), self.attentions[number - 1]
        if attention.shape != part.shape:
            raise UnsupportedLayerError(
                f"The layer {self.name} calls attention in parts of different sizes, {tuple(attention.shape)} and "
                f"{tuple(part.shape)} (batch, heads, out, in), from one forward. Say where its values are: "
                "ValueZeroing(model, layer, values=layer.attn.to_v)."
            )
        attention.calls += part.calls
        attention.weights = None  # two softmaxes have no common weights
        visible = None if attention.visible is None or part.visible is None else attention.visible | part.visible
        attention.visible, attention.causal = visible, attention.causal and part.causal


class Recorder(AttentionHandler):
    """Computes each attention call as the model does, and fills a `LayerRecord`."""

    def __init__(self, record: LayerRecord) -> None:
        self.record = record
        self._running: list[nn.Module] = []  # submodules that have begun, innermost last
        self._inline_values: dict[int, list[tuple[Any, Tensor]]] = {}  # by the id of the module that uses the values
        # The last context, as the model was given it, and what modules made of it.
        self._made: list[tuple[nn.Module | None, VersionedTensor]] = []
        # Tensors of steps and their copies, by id and version. Most tensors are of several steps.
        self._copies: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Weights]:
        record = self.record
        with keeping_weights(record.steps is not None):
            context, weights = call.compute(call.values)
        module = call.module or (self._running[-1] if self._running else record.layer)
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
        self._made = [(None, VersionedTensor(context))]
        shape, visible = AttentionShape(*weights.shape), call.visible
        if visible is not None and not call.obeys_mask:
            seen = visible | ~visible.any(-1, keepdim=True)  # a token that sees nothing shows nothing
            visible = None if all_weights(used).masked_fill(seen, 0).any() else visible
        values = call.values if len(call.values) == shape.batch else call.values.expand(shape.batch, -1, -1, -1)
        record.attentions.append(
            AttentionRecord(
                module,
                shape,
                values.clone(),  # some layers write over them
                visible,
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
        values, attention = first_tensor(output), self._running[-1] if self._running else record.layer
        holder = attention if record.given is None else record.layer
        if values is not None and is_value_projection(module, holder, record.given):
            user = record.layer if record.given is not None and record.given.others else attention
            self._inline_values.setdefault(id(user), []).append((module, values))
        if isinstance(module, nn.Parameter):
            return
        if record.steps is not None:
            given = first_tensor(inputs)
            alone = None if given is None or len(inputs) > 1 else VersionedTensor(given)
            record.steps.append(Step(module, alone, self._copied(given), self._copied(values)))
        if own_parameters(module) and inputs and isinstance(inputs[0], Tensor):
            record.module_rows.setdefault(id(module), []).append(inputs[0].shape[:-1].numel())
            if record.keep_module_io and record.attentions and not own_modules(module) and isinstance(output, Tensor):
                record.module_io[id(module)] = VersionedTensor(inputs[0]), VersionedTensor(output)
        if not self._record_inline(module, output) and record.attentions:
            self._follow_context(record.attentions[-1], module, inputs, output)

    def _copied(self, value: Tensor | None) -> Tensor | None:
        """A copy of hidden states. None: the tensor has another size."""
        states = self.record.states  # some layers flatten batch and tokens
        if value is None or not any(x.numel() == value.numel() and x.shape[-1:] == value.shape[-1:] for x in states):
            return None
        key = id(value), version(value)
        if key[1] is None:  # in inference mode, no write is counted
            return value.clone()
        if key not in self._copies:
            self._copies[key] = value, value.clone()
        return self._copies[key][1]

    def finish(self, output: Any) -> None:
        """Called when the layer returns. Records attention of the layer's own forward that no other tap has seen."""
        self.record.output = output
        self._record_inline(self.record.layer, output)
        if self.record.given is None:
            return
        named = [one for one in self.record.attentions if one.inline is not None]
        if not named:
            return
        # An attention that sums the very values that the user names can be read as well as without them.
        read = [one for one in self.record.attentions if one.inline is None]
        summed = any(_same(one.values.transpose(1, 2), named[0].values.to(one.values.dtype)) for one in read)
        self.record.attentions[:] = read if summed and not any(one.repeated for one in read) else named

    def _follow_context(
        self, attention: AttentionRecord, module: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> None:
        """Follow the context from the attention function to what the attention module returns."""
        result, context = first_tensor(output), attention.context
        if attention.output is not None or context is None:
            return
        given, *projections = self._made
        if module is not attention.module:
            # A submodule with more inputs (a gate's) does not project the context alone.
            if result is None or len(inputs) != 1 or any(_is_view(made, inputs[0]) for _, made in projections):
                return
            if _is_view(given[1], inputs[0]) or _same(context, inputs[0]):
                self._made.append((module, VersionedTensor(result)))
            return
        attention.output = output
        if isinstance(module, nn.MultiheadAttention):  # projects without calling its submodule
            projections.append((module.out_proj, VersionedTensor(module.out_proj(context.flatten(2)))))
        if result is not None:
            result = attention.batch_first(result)
            # Mostly the result is one of these tensors, which no number has to show.
            found = [one for one, made in (given, *projections) if _is_view(made, result)]
            if not found:
                numbers = [(None, context), *((one, made.value) for one, made in projections)]
                found = [one for one, value in numbers if _same(value, result)][:1]
            if found:
                attention.projection, attention.replaceable = found[0], True
        del self._made[1:]

    def _record_inline(self, module: nn.Module, output: Any) -> bool:
        """Record the attention of a module that projected values, unless another tap has. Whether it projected some."""
        record, given, projected = self.record, self.record.given, self._inline_values.pop(id(module), None)
        if projected is None or (given is None and any(one.module is module for one in record.attentions)):
            return False
        row, values, result = given or family_of(module), projected[0][1], first_tensor(output)
        # A module that projects several times projects something else too, or projects in parts.
        each_once = row is not None and len(dict(projected)) == len(projected) == len(row.parts)
        if row is not None and row.second_projection is None and not each_once:
            record.projects_more = module
            return True
        if row is None or values.dim() not in (2, 3, 4) or result is None or result.dim() not in (2, 3, 4):
            return True
        inline, values = row.in_run(module, module if given is None else record.layer, projected)
        tokens = result.shape[:1] if row.sequence_first or result.dim() == 2 else result.shape[1:-1]
        shape = AttentionShape(len(values), len(inline.columns), tokens.numel(), values.shape[1])
        arguments = [*record.args, *record.kwargs.values()]
        arguments = arguments[::-1] if record.attentions else arguments  # a cross-attention's mask comes last
        record.attentions.append(
            AttentionRecord(
                module,
                shape,
                values,
                # What an argument of unknown code means is unknown. Values of hidden sources change nothing.
                visible_by_argument(arguments, shape.batch, shape.out, shape.sources, row) if given is None else None,
                calls=len(projected),
                calls_before=sum(one.calls for one in record.attentions if one.inline is None),
                tokens_first=row.sequence_first,
                model_pads=row.pads,
                inline=inline,
                output=output,
            )
        )
        return True


def _is_view(tensor: VersionedTensor, found: Any) -> bool:
    return isinstance(found, Tensor) and tensor.value.shape[:2] == found.shape[:2] and tensor.is_seen_in(found)


def _same(expected: Tensor, found: Any) -> bool:
    """Whether two tensors hold the same numbers, whatever their shapes: heads are merged on the way."""
    if not isinstance(found, Tensor) or expected.numel() != found.numel() or expected.shape[:2] != found.shape[:2]:
        return False
    return same_numbers(expected.flatten(2), found.flatten(2), PROJECTED)
