"""Half precision: record such a layer once more in float32, without touching the model's own parameters.

Zeroing one value changes 1e-3 to 1e-6 of the output. This is smaller than bfloat16's rounding, so a replay in bfloat16
would measure noise.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import LAYER_ERRORS, is_cache, run_again, without_caches
from captum_vz._engine.capture.recorder import Recorder
from captum_vz._engine.capture.records import LayerRecord
from captum_vz._engine.numerics.budget import is_out_of_memory
from captum_vz._engine.numerics.tensors import first_tensor, inference_mode, map_each
from captum_vz._engine.numerics.tolerance import is_close_in_half
from captum_vz._engine.taps.changes import without_autocast
from captum_vz._engine.taps.handler import AttentionHandler, left_out_by_replays
from captum_vz._private import accelerate_hook, tree_leaves
from captum_vz.errors import RefusedError, UnsupportedLayerError

HALF = (torch.float16, torch.bfloat16)
Module = TypeVar("Module", bound=nn.Module)


def is_half(record: LayerRecord) -> bool:
    """Whether any number of this run was held in half precision, by the layer's dtype or by autocast."""
    output = first_tensor(record.output)
    # Autocast leaves no trace if a residual or a cache in float32 is added afterwards.
    if output is not None and output.dtype == torch.float32 and torch.is_autocast_enabled(output.device.type):
        return True
    tensors = [output, *record.parameters]
    tensors += [tensor for one in record.attentions for tensor in (one.weights, one.values)]
    return any(tensor is not None and tensor.dtype in HALF for tensor in tensors)


def in_float32(module: Module) -> Module:
    """A float32 copy of a module. It shares configs, and the weights map of modules that accelerate offloads."""
    configs = [getattr(m, "config", None) for m in module.modules()]
    offloaded = [getattr(accelerate_hook(m), "weights_map", None) for m in module.modules()]
    shared = {id(one): one for one in (*configs, *offloaded) if one is not None}
    with inference_mode(False):
        copied = copy.deepcopy(module, shared).float()
    # A replica of DataParallel holds plain tensors where its original holds parameters.
    for m in copied.modules():
        vars(m).update({name: _float32(value) for name, value in vars(m).items()})
    return copied


def recorded_in_float32(record: LayerRecord) -> LayerRecord:
    """The same layer on the same input, run and recorded in float32.

    RefusedError: the layer cannot be run again in float32.
    """
    remedy = ", or load the model in float32"
    check_no_tokens_in_cache(record, "is in half precision and has to be run again in float32", remedy)
    _check_runs_again(record)
    try:
        layer = in_float32(record.layer)
        args, kwargs = map_each(_float32, without_caches((record.args, record.kwargs)))
        empty: dict[str, Any] = {"attentions": [], "modules_run": [], "module_rows": {}, "module_io": {}}
        again = replace(record, layer=layer, args=args, kwargs=kwargs, **empty)
        recorder = Recorder(again)
        with without_autocast(record.first_output.device):
            recorder.finish(run_again(again, recorder))
            half = is_half(again)
    except LAYER_ERRORS as error:
        if is_out_of_memory(error):
            raise
        _check_runs_again(record)  # raises the layer's own error
        try:
            with without_autocast(record.first_output.device):
                run_again(again, None)
        except LAYER_ERRORS:
            pass
        else:
            raise  # it was not float32's
        raise RefusedError(
            f"{record.name} is in half precision and has to be run again in float32, but a copy of it in float32 "
            f"fails: {error}. {left_out_by_replays(record.layer)}Load the model in float32."
        ) from error
    if half or len(again.attentions) < len(record.attentions):
        raise RefusedError(
            f"{record.name} computes in half precision whatever its dtype is (torch.autocast in its own forward, a "
            "cast). Zeroing a value changes less than that rounds. Run the model in float32, without autocast."
        )
    for number, clean in enumerate(record.attentions):
        while len(again.attentions) > number + 1 and again.attentions[number].calls < clean.calls:
            again.merge(number + 1)
    # Masks hold their dtype's lowest number, and that of float16 hides nothing in float32.
    for one, clean in zip(again.attentions, record.attentions, strict=True):
        one.visible = clean.visible
    return again


def _check_runs_again(record: LayerRecord) -> None:
    """Check that running the layer's forward again gives its output at each position: no state that a run changes.

    In its own precision, because some layers are far from it in float32: rounding chooses other experts.
    """
    clean = first_tensor(record.output)
    again = first_tensor(run_again(record, AttentionHandler()))
    if clean is not None and (again is None or again.shape != clean.shape or not is_close_in_half(again, clean)):
        raise UnsupportedLayerError(
            f"{record.name} cannot be replayed: run again on its own clean input, it does not return its clean output. "
            f"{left_out_by_replays(record.layer)}State that a run changes, random numbers, and what is wrapped around "
            "its forward are no part of it. Make the layer's output depend on its input alone."
        )


def check_no_tokens_in_cache(record: LayerRecord, reason: str, remedy: str = "") -> None:
    """Refuse to run a layer again that attends to tokens in its key-value cache, which are not in its input."""
    first = record.attentions[0]
    missing = first.shape.sources - first.shape.out - record.encoder_sources(first)
    if missing > 0 and any(map(is_cache, tree_leaves((record.args, record.kwargs), is_leaf=is_cache))):
        raise RefusedError(
            f"{record.name} {reason}, but {missing} of its tokens are in the key-value cache only. Run the model "
            f"without a cache: pass the whole sequence at once{remedy}."
        )


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
