"""TODO."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from captum_vz._engine.capture.layer_runner import LAYER_ERRORS, _is_cache, without_caches
from captum_vz._engine.capture.records import LayerRecord
from captum_vz._engine.numerics.tensors import first_tensor, map_each
from captum_vz._engine.numerics.tolerance import is_close_in_half
from captum_vz._engine.taps.handler import handled_by

HALF = (torch.float16, torch.bfloat16)
Module = TypeVar("Module", bound=nn.Module)


def is_half(recording: LayerRecord) -> bool:
    """Whether any number of this layer's run was held in half precision, by its own dtype or by autocast."""
    output = first_tensor(recording.output)
    # Autocast leaves no trace where a residual or a cache in float32 is added afterwards.
    if output is not None and output.dtype == torch.float32 and torch.is_autocast_enabled(output.device.type):
        return True
    tensors = [output, *recording.parameters]
    tensors += [tensor for call in recording.calls for tensor in (call.weights, call.values)]
    return any(tensor is not None and tensor.dtype in HALF for tensor in tensors)


def in_float32(module: Module) -> Module:
    """A float32 copy of a module, sharing its configs, which are no part of the numbers.

    It shares, too, what accelerate loads offloaded weights from, which holds those of the whole model.
    """
    configs = [getattr(m, "config", None) for m in module.modules()]
    offloaded = [getattr(getattr(m, "_hf_hook", None), "weights_map", None) for m in module.modules()]
    shared = {id(one): one for one in (*configs, *offloaded) if one is not None}
    copied = copy.deepcopy(module, shared).float()
    # A replica of DataParallel holds plain tensors where its original holds parameters.
    for m in copied.modules():
        vars(m).update({name: _float32(value) for name, value in vars(m).items()})
    return copied


def rerun_in_float32(recording: LayerRecord) -> LayerRecord:
    """The same layer on the same input, run and recorded in float32."""
    missing = cached_only(recording)
    assert not missing, (
        f"{recording.name} is in half precision and has to be run again in float32, but {missing} of "
        "its tokens are in the key-value cache only: pass the whole sequence at once, or load the model in float32."
    )
    _check_runs_again(recording)
    try:
        layer = in_float32(recording.layer)
        args, kwargs = map_each(_float32, without_caches((recording.args, recording.kwargs)))
        again = LayerRecord(layer, args, kwargs, name=recording.name, keeps=recording.keeps)
        with handled_by(again), torch.autocast(_device_type(recording), enabled=False):
            again.output = layer.forward(*args, **kwargs)
            inside = is_half(again)
    except LAYER_ERRORS as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise AssertionError(
            f"{recording.name} is in half precision and has to be run again in float32, but a copy of it in float32 "
            f"fails: {error}. Load the model in float32."
        ) from error
    assert not inside and len(again.calls) >= len(recording.calls), (
        f"{recording.name} computes in half precision whatever its dtype is (torch.autocast in its own forward, a "
        "cast): what zeroing a value changes is smaller than that rounds. Run the model without, in float32."
    )
    for index, half in enumerate(recording.calls):
        while len(again.calls) > index + 1 and again.calls[index].parts < half.parts:
            again.join(index + 1)
    # Masks are made of their dtype's lowest number, and that of float16 means nothing in float32.
    for call, half in zip(again.calls, recording.calls, strict=True):
        call.visible = half.visible
    return again


def _check_runs_again(recording: LayerRecord) -> None:
    """Make sure that what is run again is all of the layer's run: no hook on the layer, nothing that a run changes.

    In its own precision, for some layers are far from it in float32: rounding chooses other experts.
    """
    clean = first_tensor(recording.output)
    args, kwargs = without_caches((recording.args, recording.kwargs))
    with handled_by(None):
        again = first_tensor(recording.layer.forward(*args, **kwargs))
    same = clean is None or (again is not None and again.shape == clean.shape and is_close_in_half(again, clean))
    assert same, (
        f"The layer {recording.name} cannot be replayed: run again on its own clean input, it does not return its "
        "clean output, so that no distance could be trusted. A hook on the layer itself that changes its output, or "
        "what it keeps from run to run, is no part of its forward: take it away, or let it be one."
    )


def cached_only(recording: LayerRecord) -> int:
    """How many of the tokens that a layer attends to were not in its input, but in its key-value cache."""
    first = recording.calls[0]
    _, _, out, sources = first.size
    cached = any(map(_is_cache, tree_leaves((recording.args, recording.kwargs), is_leaf=_is_cache)))
    return max(sources - out - recording.read_beside(first), 0) if cached else 0


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def _device_type(recording: LayerRecord) -> str:
    output = first_tensor(recording.output)
    return "cpu" if output is None else output.device.type
