"""What one pass recorded of a layer and of its attentions: data that later steps read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.attention import Weights
from captum_vz._engine.numerics.tensors import budget_of, first_tensor, is_changed, once_a_pass, tensors_in, version
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.taps.changes import ModuleState
from captum_vz._private import modules_of, own_parameters
from captum_vz.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from captum_vz._engine.taps.projection import ValueProjection


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments of a layer that may be hidden states: its own first, then those of other layers."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    return [x for x in given if x.is_floating_point() and x.dim() > 2]


class AttentionShape(NamedTuple):
    """The sizes of one attention."""

    batch: int
    heads: int
    out: int
    sources: int


class VersionedTensor:
    """A tensor of the clean pass. The layer's own code may write into it later."""

    def __init__(self, value: Tensor) -> None:
        # Inference tensors have no version counter, so they are cloned.
        self.value = value.clone() if value.is_inference() else value
        self._version = version(self.value)

    def is_unmodified(self) -> bool:
        """Whether nothing was written into the tensor since."""
        return version(self.value) == self._version

    def is_seen_in(self, found: Tensor) -> bool:
        """Whether `found` is a view of the tensor with the same numbers in the same order. No number is read."""
        value = self.value
        same_place = found.numel() == value.numel() and found.dtype == value.dtype and found.device == value.device
        in_order = found is value or (found.is_contiguous() and value.is_contiguous())
        return same_place and in_order and found.data_ptr() == value.data_ptr() and self.is_unmodified()


class ReturnedTensor(VersionedTensor):
    """The output of a layer, and a copy of it, because models may write into their tensors later."""

    def __init__(self, value: Tensor) -> None:
        super().__init__(value)
        self.copy = self.value if value.is_inference() else value.clone()


@dataclass(frozen=True)
class InlineValues:
    """Where the values are of an attention that its module computes inline."""

    row: ValueProjection  # where they are in the projection's output
    projection: nn.Module | nn.Parameter  # what projects them
    other_projection: nn.Module | None  # what projects values of the same tokens for some other rows, if it exists
    columns: list[slice]  # the features of each head's values
    zero: list[Tensor] | float  # what is projected for a value that is zero: for each head, or one number for all

    def by_head(self, rows: Tensor) -> Tensor:
        """The values of all heads in `rows (batch, in, features)`, `(batch, in, head * d_head)`."""
        return torch.cat([rows[..., columns] for columns in self.columns], dim=-1)

    def change(self, rows: Tensor, changed: Tensor, new: Callable[[Tensor], Tensor]) -> None:
        """Write into `rows (n, in, features)`, where `changed (n, head, in)` is True, what `new` makes of the values.

        `new` is given the values `(n, head, in, d_head)`. CannotReplayError: heads that share their values are not
        changed alike.
        """
        zero: list[Any] = [self.zero] * len(self.columns) if isinstance(self.zero, float) else self.zero
        parts = zip(self.columns, zero, strict=True)
        values = new(torch.stack([rows[..., columns] - one for columns, one in parts], dim=1))
        for head, columns in enumerate(self.columns):
            shared = (other for other in range(head) if self.columns[other] == columns)
            if any(not torch.equal(changed[:, head], changed[:, other]) for other in shared):
                raise CannotReplayError("its heads share their values, which cannot be zeroed for some heads alone")
            own = values[:, head] + zero[head]
            rows[..., columns] = torch.where(changed[:, head, :, None], own, rows[..., columns])


@dataclass(eq=False)
class AttentionRecord:
    """One attention of a layer in the clean pass."""

    module: nn.Module  # the module whose forward called the attention function
    shape: AttentionShape
    # (batch, key-value head, in, d_head), or inline the output of the value projection (batch, in, features).
    values: Tensor
    # Which sources the mask lets through, bool, broadcastable to the weights. None: all, or with `causal` all that are
    # not later.
    visible: Tensor | None
    weights: Weights | None = None  # after the softmax, (batch, head, out, in). None: they cannot be read
    context: Tensor | None = None  # sums of weighted values, (batch, out, head, d_head). None: they cannot be read
    dropout: float = 0.0
    # How many calls of the attention function, or runs of value projections, make up this attention. Values and context
    # are those of the first.
    calls: int = 1
    calls_before: int = 0  # calls of the attention function for other attentions of the layer
    repeated: bool = False  # whether the record before this one is of the same run of `module`
    tokens_first: bool = False  # whether the layer's tensors are (tokens, batch, d), as torch.nn's are by default
    model_pads: bool = False  # whether the model may add padding after the inputs
    inline: InlineValues | None = None  # where the values are, if the module computes attention inline
    output: Any = None  # what `module` returned
    projection: nn.Module | None = None  # the submodule that made `output` of the context, if it is known
    replaceable: bool = False  # whether `output` is the context or its projection, and nothing else happened to it
    tap: str = "value projection"  # where the attention was read, in words
    causal: bool = False  # whether no token sees a later one, of as many sources as tokens

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
    projects_more: nn.Module | None = None  # an attention module that projects more than values by the same weights

    @property
    def name(self) -> str:
        """The name of its class."""
        return type(self.layer).__name__

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The layer and all its submodules."""
        return modules_of(self.layer)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The layer's parameters."""
        own = [x for module in self.modules for x in own_parameters(module).values() if x is not None]
        return list({id(x): x for x in own}.values())

    def rows_in_chunk(self, output: Tensor) -> int:
        """How many positions one chunk holds, by the layer's widest activation."""
        shapes = [parameter.shape[-2:] for parameter in self.parameters if parameter.dim() > 1]
        width = max([output.shape[-1], *(size for shape in shapes for size in shape)])
        return budget_of(output.device).items_in_chunk(output, width)

    @property
    def states(self) -> list[Tensor]:
        """The arguments that may be hidden states: the layer's own first, then those of other layers."""
        return hidden_states(self.args, self.kwargs)

    @property
    def first_output(self) -> Tensor:
        """The tensor that the layer returned, the first if it returned several.

        UnsupportedLayerError: it returned none.
        """
        output = first_tensor(self.output)
        if output is None:
            raise UnsupportedLayerError(
                f"The layer {self.name} returned {type(self.output).__name__}, whose first entry is no tensor: "
                "expected the hidden states there. Pass a Transformer block that returns them first."
            )
        return output

    def after_hooks(self, args: Any, kwargs: Any, output: Any) -> Any:
        """What the user's hooks on the layer make of what its forward returned."""
        for hook, with_kwargs in self.hooks:
            changed = hook(self.layer, args, *([kwargs] if with_kwargs else []), output)
            output = output if changed is None else changed
        return output

    def is_given(self, returned: ReturnedTensor) -> bool:
        """Whether the layer's input is `returned`: the first argument of this shape holds the same numbers.

        A decoder's first layer is also given what the encoder's last layer returned, but after its own hidden states.
        """
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
        """Merge attention `number` into the one before it: they are parts of one attention.

        The parts have some of its heads each, or are the terms of a difference.
        """
        part, attention = self.attentions.pop(number), self.attentions[number - 1]
        if attention.shape != part.shape:
            raise UnsupportedLayerError(
                f"The layer {self.name} calls attention in parts of different sizes, {tuple(attention.shape)} and "
                f"{tuple(part.shape)} (batch, heads, out, in), from one forward. Which tokens belong to which part is "
                "unknown. Say where its values are: ValueZeroing(model, layer, values=layer.attn.to_v). Or compute it "
                "by one call, with a mask of what each part sees."
            )
        attention.calls += part.calls
        attention.weights = None  # two softmaxes have no common weights
        visible = None if attention.visible is None or part.visible is None else attention.visible | part.visible
        attention.visible, attention.causal = visible, attention.causal and part.causal
