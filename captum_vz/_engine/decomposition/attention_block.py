"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from captum_vz._engine.capture.float32 import tokens_in_cache
from captum_vz._engine.capture.layer_runner import without_caches
from captum_vz._engine.capture.recorder import Recorder
from captum_vz._engine.capture.records import LayerRecord
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_close_up_to_tf32, is_same_sum
from captum_vz._engine.structure.modules import matrix, read_norm
from captum_vz._engine.taps.handler import handled_by
from captum_vz.errors import RefusedError, UnsupportedLayerError

if TYPE_CHECKING:
    from captum_vz._engine.structure.modules import Norm
    from captum_vz._engine.structure.site import AttentionSite

# How many positions the structure is looked for at: it is the same at all.
SAMPLE = 16


@dataclass(frozen=True)
class FrozenNorm:
    """A norm with the statistics that it found in the clean pass: `scale * norm.direction(u)`; its bias is left out."""

    norm: Norm
    scale: Tensor  # (batch, out, 1): one over the deviation of what the norm was given


@dataclass(frozen=True)
class _Step:
    """A submodule's run: what it was given and what it made of it, `(batch, out, d)`; None: nothing of that shape."""

    module: nn.Module
    given: Tensor | None
    made: Tensor | None


class _StepRecorder(Recorder):
    """Records a layer's run with all its steps, in the order in which they returned."""

    def __init__(self, record: LayerRecord, number: int, shape: torch.Size) -> None:
        super().__init__(record)
        self.steps: list[_Step] = []
        self.projection: nn.Module | None = None  # the first submodule that made something of the context
        self.projected: Tensor | None = None
        self._number = number  # of the attention
        self._shape = shape  # of the layer's output

    def on_exit(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> None:
        super().on_exit(module, inputs, output)
        if isinstance(module, nn.Parameter):
            return
        given, made = first_tensor(inputs), first_tensor(output)
        self.steps.append(_Step(module, self._tokens(given), self._tokens(made)))
        if given is None or made is None or len(inputs) > 1 or self.projection is not None:
            return
        if len(self.record.attentions) > self._number:
            context = self.record.attentions[self._number].context
            if context is not None and _holds(given, context) and not _holds(made, context):
                self.projection, self.projected = module, self._tokens(made)

    def _tokens(self, value: Tensor | None) -> Tensor | None:
        """A copy, because layers may write into their tensors. Some layers lay all positions side by side."""
        fits = value is not None and value.shape[-1:] == self._shape[-1:] and value.numel() == self._shape.numel()
        return value.reshape(self._shape).clone() if fits and value is not None else None


class AttentionBlock:
    """The parts of a recorded layer around one of its attentions, in float32 if the layer is in half precision.

    All tensors are `(batch, out, d)`, whatever the layer's layout.
    """

    def __init__(self, site: AttentionSite) -> None:
        self.name = site.layer.name
        self.rows, self.sources = site.target_mask, site.source_mask
        output = site.layer.first_output
        if not output.isfinite().all():
            raise RefusedError(
                f"{self.name} returned values that are not finite (NaN or infinity) in {output.dtype}. float16 "
                "overflows above 65504: load the model in bfloat16 or float32, and check its weights and inputs."
            )
        number, recorder = _record_steps(site)
        record = recorder.record
        self.attention = record.attentions[number]
        self.steps = [
            _Step(step.module, self._batch_first(step.given), self._batch_first(step.made)) for step in recorder.steps
        ]
        self.output = self.attention.batch_first(record.output)
        self.inputs = [
            self.attention.batch_first(value)
            for value in tree_leaves((record.args, record.kwargs))
            if isinstance(value, Tensor) and value.shape == record.output.shape
        ]
        # A second attention reads what the first one made of the layer's input.
        self.second = number > 0
        if self.second:
            self.inputs = [step.given for step in self.steps if step.given is not None]
        self._sample = self.rows.nonzero()[:: max(1, int(self.rows.sum()) // SAMPLE)][:SAMPLE].unbind(1)
        self._projection, self._projected = recorder.projection, self._batch_first(recorder.projected)
        if self.attention.projection is not None:
            self._projection = self.attention.projection
            self._projected = self._batch_first(first_tensor(self.attention.output))
        self.matrix, self.projected = self._project()

    def _batch_first(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else self.attention.batch_first(value)

    def _project(self) -> tuple[Tensor, Tensor]:
        """The output projection `(head * d_head, d)`, its bias left out, and what it made of the context."""
        assert self.attention.context is not None
        context = self.attention.context.flatten(2)
        advice = "so that what each head's value adds to the output is not known."
        assert self._projection is not None and self._projected is not None, (
            f"The layer {self.name} has no output projection that can be recognised: looked for a submodule that is "
            f"given the attention's context {tuple(context.shape)}, {advice}"
        )
        matrix, bias = _affine(self._projection, context.shape[-1], context)
        assert is_close_up_to_tf32(context[self._sample] @ matrix + bias, self._projected[self._sample]), (
            f"The layer {self.name} hands its attention's context to a {type(self._projection).__name__}, looked for "
            f"was a linear projection; this is none, {advice}"
        )
        return matrix, self._projected

    def residual(self) -> Tensor:
        """What the layer adds to its attention's output: its own input, or what its first attention made of that."""
        for value in self.inputs:
            total = value + self.projected
            if self._is_carried_on(total) or self._is(self.output, total) or any(self._is_given(total)):
                return value
        raise AssertionError(
            f"The layer {self.name} has no residual connection that can be recognised: looked for its input plus its "
            "attention's output, as something that a later submodule is given or that its own output is made of "
            "(scaled, gated or normed outputs are neither). include='attention' needs none."
        )

    def norm_after(self) -> tuple[FrozenNorm, Tensor] | None:
        """The norm of the sum of residual and attention, and what it made of it; None where nothing norms that sum.

        A pre-norm layer has a norm there too, but carries the sum itself on: to its output, or to its next attention.
        """
        total = self.residual() + self.projected
        for step in self._is_given(total):
            norm = self._as_norm(step)
            if norm is not None and step.made is not None and self._leads_on(step.made):
                return norm, step.made
        if self._is_carried_on(total) or self._leads_on(total):
            return None
        raise AssertionError(
            f"The layer {self.name} does something to the sum of its residual and its attention's output that is not "
            "recognised: looked for a norm whose output the layer goes on with (post-norm), and for that sum in its "
            "own output (pre-norm). include='residual' needs neither."
        )

    def norm_at_end(self, normed: Tensor) -> FrozenNorm:
        """The norm whose output is the layer's, of `normed` and the feed-forward's output."""
        for step in reversed(self.steps):
            if self._is(step.made, self.output) and any(self._adds(step.given, normed, s.made) for s in self.steps):
                norm = self._as_norm(step)
                if norm is not None:
                    return norm
        raise AssertionError(
            f"The layer {self.name} does not end in a norm that can be recognised: looked for one whose output is the "
            "layer's, and which is given the output of the norm after the attention plus that of the feed-forward. "
            "include='layer_norm' needs none."
        )

    def _leads_on(self, value: Tensor) -> bool:
        """Whether the layer returns `value`, or adds something to it and hands the sum to a submodule."""
        sums = (self._adds(later.given, value, other.made) for later in self.steps for other in self.steps)
        return self._is(self.output, value) or any(sums)

    def _is_carried_on(self, value: Tensor) -> bool:
        """Whether the layer's output is `value` plus what some submodule made."""
        return any(self._adds(self.output, value, step.made) for step in self.steps)

    def _is_given(self, value: Tensor) -> Iterator[_Step]:
        """The submodules that are given `value`."""
        return (step for step in self.steps if self._is(step.given, value))

    def _is(self, value: Tensor | None, other: Tensor | None) -> bool:
        return value is not None and other is not None and is_same_sum(value[self._sample], other[self._sample])

    def _adds(self, total: Tensor | None, value: Tensor, other: Tensor | None) -> bool:
        if total is None or other is None:
            return False
        value, other = value[self._sample], other[self._sample]
        return is_same_sum(total[self._sample], value + other, value.abs() + other.abs())

    def _as_norm(self, step: _Step) -> FrozenNorm | None:
        """The norm that a submodule applied, or None if it did something else."""
        if step.given is None or step.made is None or list(step.module.children()):
            return None
        try:
            norm = read_norm(step.module, step.given[self._sample], step.made[self._sample])
        except CannotReplayError:
            return None
        return FrozenNorm(norm, norm.scale(step.given))


def _record_steps(site: AttentionSite) -> tuple[int, _StepRecorder]:
    """Run the layer again on its own input, and record each step."""
    site.weights()  # or an error that says why they cannot be read
    name, attention = site.layer.name, site.attention
    if attention.calls != 1 or attention.context is None:
        raise UnsupportedLayerError(
            f"The attention of {name} takes its values in {attention.calls} parts, which norm-based methods do not "
            "support. ValueZeroing can explain it."
        )
    missing = tokens_in_cache(site.layer)
    if missing:
        raise RefusedError(
            f"The layer {name} has to be run again to see what becomes of its attention, but {missing} of its tokens "
            "are in the key-value cache only. Pass the whole sequence at once."
        )
    number = site.layer.attentions.index(attention)
    layer = site.in_float32().layer
    args, kwargs = without_caches((layer.args, layer.kwargs))
    output = layer.first_output
    recorder = _StepRecorder(LayerRecord(layer.layer, args, kwargs), number, output.shape)
    with handled_by(recorder), torch.autocast(output.device.type, enabled=False):
        recorder.record.output = first_tensor(layer.layer.forward(*args, **kwargs))
    return number, recorder


def _affine(module: nn.Module, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Matrix `(width, d)` and bias `(d,)` of a submodule that is linear: what it makes of unit vectors shows them."""
    project: Callable[[Tensor], Any] = module
    bias = first_tensor(project(like.new_zeros(1, width)))
    assert bias is not None  # it projected before
    weight = matrix(module)
    if weight is not None:
        return weight, bias
    units = first_tensor(project(torch.eye(width, dtype=like.dtype, device=like.device)))
    assert units is not None
    return units - bias, bias


def _holds(value: Tensor, context: Tensor) -> bool:
    """Whether `value` holds the numbers of a context `(batch, out, head, d_head)`, tokens or examples first."""
    if value.numel() != context.numel() or value.shape[-1] != context.shape[2] * context.shape[3]:
        return False
    flat = context.flatten(2)
    layouts = [flat, flat.transpose(0, 1)]
    return any(is_close_up_to_tf32(value.reshape(-1, flat.shape[-1]), layout.flatten(0, 1)) for layout in layouts)
