"""What a layer does with its attention's context: the output projection, the residual connection, the norms after them.

These are found in one more run of the layer, by the inputs and outputs of its submodules and not by their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import check_no_tokens_in_cache, run_again, without_caches
from captum_vz._engine.capture.recorder import Recorder
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_close_up_to_tf32, is_same_sum
from captum_vz._engine.structure.modules import Norm, matrix, read_norm
from captum_vz._engine.taps.changes import without_autocast
from captum_vz._private import tree_leaves
from captum_vz.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from captum_vz._engine.structure.site import AttentionSite

# How many positions are compared. The structure is the same at all positions.
SAMPLE = 16


# A norm with its `scale (batch, out, 1)` in the clean pass, as the linear function `scale * norm.direction(u)`.
FrozenNorm: TypeAlias = tuple[Norm, Tensor]


class AttentionBlock:
    """The parts of a recorded layer around one of its attentions, in float32 if the layer is in half precision.

    All tensors are `(batch, out, d)`.

    Attributes:
        rows: Which rows are no padding, bool `(batch, out)`.
        sources: Which sources are no padding, bool `(batch, in)`.
        weights: The attention's weights, `(batch, head, out, in)`.
        is_second: Whether another attention comes before this one.
        matrix: The output projection without bias, `(head * d_head, d)`.
        projected: The projection's output, with bias.
    """

    def __init__(self, site: AttentionSite) -> None:
        self.name = site.layer.name
        self.rows, self.sources = site.target_mask, site.source_mask
        number, recorder = record_steps(site)
        record = recorder.record
        self.attention = record.attentions[number]
        weights, context = self.attention.weights, self.attention.context
        assert weights is not None and context is not None  # narrows the types: `record_steps` refuses such layers
        self.weights, self._context = weights, context.flatten(2)
        self._steps = recorder.steps
        self.output = self.attention.batch_first(record.output)
        given = (x for x in tree_leaves((record.args, record.kwargs)) if isinstance(x, Tensor))
        self._inputs = [self.attention.batch_first(x) for x in given if x.shape == record.output.shape]
        # The residual of a second attention is not the layer's input, but includes the first attention's output.
        self.is_second = number > 0
        if self.is_second:
            self._inputs = [step.input for step in self._steps if step.input is not None]
        self._sample = self.rows.nonzero()[:: max(1, int(self.rows.sum()) // SAMPLE)][:SAMPLE].unbind(1)
        self._projection, self._projected = recorder.projection, recorder.projected
        if self.attention.projection is not None:
            self._projection = self.attention.projection
            output = first_tensor(self.attention.output)
            self._projected = None if output is None else self.attention.batch_first(output)
        self.matrix, self.projected = self._project()

    def _project(self) -> tuple[Tensor, Tensor]:
        """The output projection `(head * d_head, d)` without bias, and its output with bias."""
        context, advice = self._context, "ValueZeroing can explain the layer, because it needs no projection."
        if self._projection is None or self._projected is None:
            raise UnsupportedLayerError(
                f"The layer {self.name} has no output projection that can be recognised. Expected: a submodule whose "
                f"input is the attention's context {tuple(context.shape)}. {advice}"
            )
        matrix, bias = _affine(self._projection, context.shape[-1], context)
        if not is_close_up_to_tf32(context[self._sample] @ matrix + bias, self._projected[self._sample]):
            raise UnsupportedLayerError(
                f"The layer {self.name} hands its attention's context to a {type(self._projection).__name__}, which is "
                f"not linear. Expected: a linear output projection. {advice}"
            )
        return matrix, self._projected

    def residual(self) -> Tensor:
        """The vectors that the layer adds to the attention's output.

        They are the layer's input, or for a second attention the sum after the first one. UnsupportedLayerError: no
        such sum is found.
        """
        for value in self._inputs:
            total = value + self.projected
            if self._is_carried_on(total) or self._is(self.output, total) or any(self._is_given(total)):
                return value
        raise UnsupportedLayerError(
            f"The layer {self.name} has no residual connection that can be recognised. Expected: the sum of its input "
            "and its attention's output, without a scale, gate or norm, as the input of a later submodule or as a term "
            "of the layer's output. Pass include='attention', which needs no residual."
        )

    def norm_after(self) -> tuple[FrozenNorm, Tensor] | None:
        """The norm of the sum of residual and attention, with its output (post-norm). None for pre-norm layers.

        A pre-norm layer has a norm there too, but adds the sum itself to its output or hands it to its next attention.
        UnsupportedLayerError: the layer does neither.
        """
        total = self.residual() + self.projected
        for step in self._is_given(total):
            norm = self._as_norm(step)
            if norm is not None and step.output is not None and self._leads_on(step.output):
                return norm, step.output
        if self._is_carried_on(total) or self._leads_on(total):
            return None
        raise UnsupportedLayerError(
            f"The layer {self.name} does something to the sum of its residual and its attention's output that is not "
            "recognised. Expected: a norm whose output the rest of the layer uses (post-norm), or the sum as a term of "
            "the layer's output (pre-norm). Pass include='residual', which needs neither."
        )

    def norm_at_end(self, normed: Tensor) -> FrozenNorm:
        """The norm at the end of the layer, whose input is `normed` plus the feed-forward's output.

        UnsupportedLayerError: there is no such norm.
        """
        for step in reversed(self._steps):
            if self._is(step.output, self.output) and any(
                self._adds(step.input, normed, other.output) for other in self._steps
            ):
                norm = self._as_norm(step)
                if norm is not None:
                    return norm
        raise UnsupportedLayerError(
            f"The layer {self.name} does not end in a norm that can be recognised. Expected: a norm that returns the "
            "layer's output, and whose input is the feed-forward's output plus the output of the norm after the "
            "attention. Pass include='layer_norm', which needs no norm at the end."
        )

    def _leads_on(self, value: Tensor) -> bool:
        """Whether the layer returns `value`, or hands `value` plus a submodule's output to a submodule."""
        sums = (self._adds(later.input, value, other.output) for later in self._steps for other in self._steps)
        return self._is(self.output, value) or any(sums)

    def _is_carried_on(self, value: Tensor) -> bool:
        """Whether the layer's output is `value` plus the output of a submodule."""
        return any(self._adds(self.output, value, step.output) for step in self._steps)

    def _is_given(self, value: Tensor) -> Iterator[Step]:
        """The submodules whose input is `value`."""
        return (step for step in self._steps if self._is(step.input, value))

    def _is(self, value: Tensor | None, other: Tensor | None) -> bool:
        return value is not None and other is not None and is_same_sum(value[self._sample], other[self._sample])

    def _adds(self, total: Tensor | None, value: Tensor, other: Tensor | None) -> bool:
        if total is None or other is None:
            return False
        value, other = value[self._sample], other[self._sample]
        return is_same_sum(total[self._sample], value + other, value.abs() + other.abs())

    def _as_norm(self, step: Step) -> FrozenNorm | None:
        """The norm that a submodule applied, or None if it did something else."""
        if step.input is None or step.output is None or list(step.module.children()):
            return None
        try:
            norm = read_norm(step.module, step.input[self._sample], step.output[self._sample])
        except CannotReplayError:
            return None
        return norm, norm.scale(step.input)


def _affine(module: nn.Module, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Matrix `(width, d)` and bias `(d,)` of a linear submodule, read from its outputs for zero and unit vectors."""

    def project(x: Tensor) -> Tensor:
        output = first_tensor(module(x))
        assert output is not None  # narrows the type: it returned a tensor for the context
        return output

    bias = project(like.new_zeros(1, width))
    weight = matrix(module)
    if weight is not None:
        return weight, bias
    return project(torch.eye(width, dtype=like.dtype, device=like.device)) - bias, bias


@dataclass(frozen=True)
class Step:
    """One run of a submodule. Input and output are `(batch, out, d)`, or None if they have another shape."""

    module: nn.Module
    input: Tensor | None
    output: Tensor | None


class StepRecorder(Recorder):
    """Records a layer's run and all steps in it, in the order in which they returned.

    `projection` is the first submodule that returned something else than the context it was given, `projected` its
    output.
    """

    def __init__(self, record: LayerRecord, number: int, attention: AttentionRecord, shape: torch.Size) -> None:
        super().__init__(record)
        self.steps: list[Step] = []
        self.projection: nn.Module | None = None
        self.projected: Tensor | None = None
        self._number, self._attention = number, attention  # which attention of the layer
        self._shape = shape  # of the layer's output

    def on_exit(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> None:
        super().on_exit(module, inputs, output)
        if isinstance(module, nn.Parameter):
            return
        given, returned = first_tensor(inputs), first_tensor(output)
        self.steps.append(Step(module, self._tokens(given), self._tokens(returned)))
        if given is None or returned is None or len(inputs) > 1 or self.projection is not None:
            return
        if len(self.record.attentions) > self._number:
            context = self.record.attentions[self._number].context
            if context is not None and _holds(given, context) and not _holds(returned, context):
                self.projection, self.projected = module, self._tokens(returned)

    def _tokens(self, value: Tensor | None) -> Tensor | None:
        """A copy `(batch, out, d)`, because layers may write into their tensors."""
        # Some layers flatten batch and tokens.
        fits = value is not None and value.shape[-1:] == self._shape[-1:] and value.numel() == self._shape.numel()
        if value is None or not fits:
            return None
        return self._attention.batch_first(value.reshape(self._shape).clone())


def record_steps(site: AttentionSite) -> tuple[int, StepRecorder]:
    """Run the layer again on its own input and record each step. Also returns which attention of the layer is meant."""
    site.finite_output()  # raises an error if it is not finite
    site.weights()  # raises an error if they cannot be read
    name, attention = site.layer.name, site.attention
    if attention.calls != 1 or attention.context is None:
        raise UnsupportedLayerError(
            f"The attention of {name} is computed in {attention.calls} parts, which norm-based methods do not support. "
            "ValueZeroing can explain it."
        )
    if site.layer.hooks:
        hooks = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in site.layer.hooks)
        advice = "Make it a forward_pre_hook of the next layer, or remove it. ValueZeroing can explain the layer."
        raise UnsupportedLayerError(f"A hook on the layer {name} changes its output ({hooks}). {advice}")
    check_no_tokens_in_cache(site.layer, "has to be run again to show its residual connection and norms")
    number = site.layer.attentions.index(attention)
    layer = site.in_float32().layer
    args, kwargs = without_caches((layer.args, layer.kwargs))
    output = layer.first_output
    recorder = StepRecorder(LayerRecord(layer.layer, args, kwargs), number, attention, output.shape)
    with without_autocast(output.device):
        recorder.record.output = first_tensor(run_again(layer, recorder))
    return number, recorder


def _holds(value: Tensor, context: Tensor) -> bool:
    """Whether `value` equals a context `(batch, out, head, d_head)`, batch or tokens first, heads concatenated."""
    if value.numel() != context.numel() or value.shape[-1] != context.shape[2] * context.shape[3]:
        return False
    flat = context.flatten(2)
    layouts = [flat, flat.transpose(0, 1)]
    return any(is_close_up_to_tf32(value.reshape(-1, flat.shape[-1]), layout.flatten(0, 1)) for layout in layouts)
