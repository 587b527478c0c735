"""TODO."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.module_state import ModuleState, version
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.numerics.tolerance import same_numbers
from captum_vz._engine.taps.handler import Attend, AttentionHandler, weights_used
from captum_vz._engine.taps.projection import is_value_projection, visible_by_argument
from captum_vz._engine.taps.projection_table import family_of

if TYPE_CHECKING:
    from captum_vz._engine.structure.windows import Windows


class VersionedTensor:
    """A tensor of the clean pass, which the layer's own code may go on to write into."""

    def __init__(self, value: Tensor) -> None:
        # No writing into inference tensors is told of, which is why they are cloned.
        self.value = value.clone() if value.is_inference() else value
        self.version = version(self.value)

    def is_as_it_was(self) -> bool:
        return version(self.value) == self.version


@dataclass(eq=False)
class AttentionRecord:
    """What one attention of a layer computed in the clean pass.

    Weights and context are None where the family computes attention inline, out of sight, or in windows.
    """

    module: nn.Module  # whose forward called the attention function
    size: tuple[int, int, int, int]  # batch, heads, out, in
    values: Tensor  # (batch, key-value head, in, d_head); inline: the value projection's output (batch, in, features)
    visible: Tensor | None  # bool, broadcastable to (batch, head, out, in): what the mask lets through; None: all of it
    dropout: float = 0.0
    weights: Tensor | None = None  # (batch, head, out, in), after the softmax
    context: Tensor | None = None  # (batch, out, head, d_head)
    # How many calls of the attention function, or runs of value projections, make it up; values and context are those
    # of the first.
    parts: int = 1
    windows: Windows | None = None  # where the layer's positions are in it, if it sees them in another arrangement
    sequence_first: bool = False  # the layer's tensors are (tokens, batch, d), as torch.nn's are by default
    again: bool = False  # called by the same run of `module` as the call before it
    pads: bool = False  # the model may pad its inputs behind their end
    # Where attention is inline: the submodule or parameter that projects the values, the one that projects those for
    # some other rows, whether they return (in, batch, features), the features of each head's values, and what they hold
    # for a value that is zero (for each head, or one number).
    value_projection: nn.Module | nn.Parameter | None = None
    projection_beside: nn.Module | None = None
    transposed: bool = False
    value_columns: list[slice] = field(default_factory=list)
    zero: list[Tensor] | float = 0.0
    # What became of the context: the answer that `module` returned, and the submodule that made it (None: no such
    # submodule, the context itself was returned).
    answer: Any = None
    projection: nn.Module | None = None
    answered: bool = False  # `module` returned the context or its projection, and nothing else happened to it
    # The axis of the layer's tensors along which each token has several vectors; None: it has one.
    streams: int | None = field(default=None, init=False)
    # Which rows and sources are no padding, once that was asked for; not copied with the rest.
    valid: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)
    _projected: list[tuple[nn.Module, Tensor]] = field(default_factory=list, repr=False)

    def batch_first(self, value: Tensor) -> Tensor:
        """A tensor of the layer, as (batch, tokens, ...)."""
        return value.transpose(0, 1) if self.sequence_first else value

    def projects(self, module: nn.Module | nn.Parameter) -> bool:
        """Whether `module` projects values of this attention, which is inline."""
        return any(module is one for one in (self.value_projection, self.projection_beside))

    def sees(self) -> Tensor:
        """Whether a row sees a source with any head, `(batch, out, in)`."""
        batch, _, out, sources = self.size
        if self.visible is None:
            return torch.ones(batch, out, sources, dtype=torch.bool, device=self.values.device)
        return self.visible.any(1).expand(batch, out, sources)

    @property
    def why_no_weights(self) -> str:
        """What to say where weights are needed and there are none."""
        reason = "its family computes attention inline"
        if self.parts > 1:
            reason = f"it is computed in {self.parts} parts, each with weights of its own"
        elif self.windows is not None:
            reason = "it sees the layer's tokens in windows"
        return (
            f"The attention weights of {type(self.module).__name__} cannot be read: {reason}. "
            "ValueZeroing can explain it, for it needs no weights."
        )

    def continues(self, module: nn.Module, weights: Tensor) -> bool:
        """Whether `module`, still running, calls for another part of its values; if so, take note of it.

        For the same rows (DiffLlama), or for others (images of different sizes in one sequence).
        """
        if module is not self.module or self.answer is not None or self.value_projection is not None:
            return False
        self.parts += 1
        same = self.weights is not None and weights.shape == self.weights.shape
        self.weights = torch.maximum(self.weights, weights) if same and self.weights is not None else None
        return True

    def returned(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Follow the context from the attention function to what the attention module returns."""
        result = first_tensor(output)
        if self.answer is not None or self.context is None:
            return
        if module is not self.module:
            # What takes more beside it (a gate's input) is no projection of the context alone.
            if result is not None and len(inputs) == 1 and _same(self.context, inputs[0]):
                self._projected.append((module, result))
            return
        self.answer = output
        if isinstance(module, nn.MultiheadAttention):  # projects without calling its submodule
            self._projected.append((module.out_proj, module.out_proj(self.context.flatten(2))))
        candidates: list[tuple[nn.Module | None, Tensor]] = [(None, self.context), *self._projected]
        for projection, projected in candidates:
            if result is not None and _same(projected, self.batch_first(result)):
                self.projection, self.answered = projection, True
                break
        self._projected.clear()


def _same(expected: Tensor, found: Any) -> bool:
    """Whether the two hold the same numbers, whatever their shapes (heads are merged on the way)."""
    if not isinstance(found, Tensor) or expected.numel() != found.numel() or expected.shape[:2] != found.shape[:2]:
        return False
    return same_numbers(expected.flatten(2), found.flatten(2), 1e-5)


@dataclass
class LayerRecord(AttentionHandler):
    """A layer's run in the clean pass: what went in, what its attentions did, what came out."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: list[AttentionRecord] = field(default_factory=list)
    output: Any = None
    notes: list[str] = field(default_factory=list)  # what to tell the user
    ran: list[nn.Module] = field(default_factory=list, repr=False)  # submodules, in the order in which they began
    name: str = ""  # of the layer, that of its class
    keeps: bool = False  # whether to keep what innermost modules with parameters took and gave behind the attention
    state: ModuleState = field(default_factory=ModuleState, repr=False)  # of the layer, before this run
    made: dict[int, tuple[VersionedTensor, VersionedTensor]] = field(default_factory=dict, repr=False)  # that, by their id
    rows: dict[int, list[int]] = field(default_factory=dict, repr=False)  # how many vectors each such module took
    _running: list[nn.Module] = field(default_factory=list, repr=False)  # submodules that have begun, innermost last
    # What value projections gave, by the id of the attention module that runs.
    _projected_values: dict[int, list[Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.name = self.name or type(self.layer).__name__

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The layer's, of which torch makes a list in no short time."""
        return list(self.layer.parameters())

    @property
    def states(self) -> list[Tensor]:
        """What may be states among the layer's arguments, its own first."""
        given = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]
        return [x for x in given if x.is_floating_point() and x.dim() > 2]

    def read_beside(self, call: AttentionRecord) -> int:
        """How many sources, the last ones, are not the layer's own, but an encoder's read along with them (T5Gemma 2).

        A first token sees them, as it sees no later token of its own, unless all see all. Their states are given to
        the layer beside its own, and no second attention reads them.
        """
        _, _, out, sources = call.size
        if sources <= out or len(self.calls) > 1 or not call.sees()[:, 0, -1].any():
            return 0
        lengths = [call.batch_first(x).shape[1] for x in self.states[1:] if x.dim() == 3]
        return max((length for length in lengths if length <= sources - out), default=0)

    def asked_before(self, call: AttentionRecord) -> int:
        """How many calls of the attention function come before those of `call`."""
        before = self.calls[: self.calls.index(call)]
        return sum(one.parts for one in before if one.value_projection is None)

    def join(self, index: int) -> None:
        """Take a call for another part of the one before it: of its heads, or of a difference of two attentions."""
        part, call = self.calls.pop(index), self.calls[index - 1]
        assert call.size == part.size, (
            f"The layer {self.name} calls attention in parts of unlike sizes, {call.size} and {part.size} "
            "(batch, heads, out, in), from one forward: which tokens have which part is not known."
        )
        call.parts += part.parts
        call.weights = None  # of two softmaxes there is no one
        call.visible = None if call.visible is None or part.visible is None else call.visible | part.visible

    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        context, weights = attend(values)
        named = module is not None
        module = module or (self._running[-1] if self._running else self.layer)
        used = weights_used(module, attend, values, context, weights)
        if named and self.calls and self.calls[-1].continues(module, used):
            return context, weights
        # Called without a name, from one forward, it may be self- and cross-attention, or parts of one.
        again = not named and bool(self.calls) and self.calls[-1].module is module and self.calls[-1].answer is None
        self.calls.append(
            AttentionRecord(
                module,
                (weights.shape[0], weights.shape[1], weights.shape[2], weights.shape[3]),
                values.clone(),  # some layers write over them
                visible,
                dropout,
                used,
                context.clone(),  # some modules gate the context in place
                sequence_first=isinstance(module, nn.MultiheadAttention) and not module.batch_first,
                again=again,
            )
        )
        return context, weights

    def entered(self, module: nn.Module) -> None:
        self.ran.append(module)
        self._running.append(module)

    def returned(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()
        values = first_tensor(output)
        if values is not None and self._running and is_value_projection(module, self._running[-1]):
            self._projected_values.setdefault(id(self._running[-1]), []).append(values)
        if isinstance(module, nn.Parameter):
            return
        if module._parameters and inputs and isinstance(inputs[0], Tensor):
            self.rows.setdefault(id(module), []).append(inputs[0].shape[:-1].numel())
        kept = self.keeps and self.calls and module._parameters and not module._modules
        if kept and inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            self.made[id(module)] = VersionedTensor(inputs[0]), VersionedTensor(output)
        if id(module) in self._projected_values and not any(call.module is module for call in self.calls):
            self._note_inline(module, self._projected_values.pop(id(module)), output)
        elif self.calls:
            self.calls[-1].returned(module, inputs, output)

    def _note_inline(self, module: nn.Module, projected: list[Tensor], output: Any) -> None:
        row, values, answer = family_of(module), projected[0], first_tensor(output)
        assert row is not None  # its value projection was seen
        if len(projected) > 1 and row.beside is None:  # of what is no token as well, or of parts
            return
        if values.dim() not in (2, 3, 4) or answer is None or answer.dim() not in (2, 3, 4):
            return
        # Without an axis of examples, or with grids in place of sequences.
        values, answer = (x[None] if x.dim() == 2 else x.flatten(1, -2) for x in (values, answer))
        values = values.transpose(0, 1) if row.transposed else values
        columns = row.columns(module, values.shape[-1])
        tokens, examples = (0, 1) if row.sequence_first else (1, 0)
        batch, sources, out = values.shape[examples], values.shape[tokens], answer.shape[tokens]
        arguments = [*self.args, *self.kwargs.values()]
        arguments = arguments[::-1] if self.calls else arguments  # a cross-attention's mask comes last
        self.calls.append(
            AttentionRecord(
                module,
                (batch, len(columns), out, sources),
                values,
                visible_by_argument(arguments, batch, out, sources, row),
                parts=len(projected),
                sequence_first=row.sequence_first,
                value_projection=getattr(module, row.projection),
                answer=output,
                projection_beside=None if row.beside is None else getattr(module, row.beside),
                transposed=row.transposed,
                pads=row.pads,
                value_columns=columns,
                zero=row.zero(module),
            )
        )
