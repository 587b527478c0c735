"""Run a recorded layer once more and record input and output of each of its submodules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.float32 import check_no_tokens_in_cache
from captum_vz._engine.capture.layer_runner import run_again, without_caches
from captum_vz._engine.capture.recorder import Recorder
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.numerics.tolerance import is_close_up_to_tf32
from captum_vz._engine.taps.changes import without_autocast
from captum_vz.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from captum_vz._engine.structure.site import AttentionSite


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
