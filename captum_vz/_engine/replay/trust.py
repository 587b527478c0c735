"""TODO."""

from __future__ import annotations

import inspect
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.perturbation import fixed_normal
from captum_vz._engine.numerics.tensors import for_query_heads
from captum_vz._engine.numerics.tolerance import is_reproduced
from captum_vz._engine.structure.dependence import attention_answers
from captum_vz._engine.taps.handler import is_hooked

# Where classes of modules are known from, and their functions.
CLASSES = ("torch.nn.", "transformers.", "captum_vz._engine.")
FUNCTIONS = (*CLASSES, "torch.", "contextlib.", "accelerate.hooks.")


def is_library_code(recording: LayerRecord) -> bool:
    """Whether what a layer does is written in torch and transformers, and nowhere else."""
    modules = list(recording.layer.modules())
    return (
        all(map(_is_known_class, {type(module) for module in modules}))
        and all(map(_has_nothing_of_its_own, modules))
        and not any(is_hooked(module) for module in modules if module is not recording.layer)
    )


def _is_known_class(kind: type[nn.Module]) -> bool:
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = [x for one in classes for x in vars(one).values() if isinstance(x, FunctionType)]
    return all(f"{one.__module__}.".startswith(CLASSES) for one in classes) and all(map(_is_known_function, functions))


def _has_nothing_of_its_own(module: nn.Module) -> bool:
    """Whether no function was put into a module that is not known, nor another `forward`."""
    functions = [x for x in vars(module).values() if callable(x) and not isinstance(x, (nn.Module, Tensor, type))]
    hook = getattr(module, "_hf_hook", None)
    hooks = () if hook is None else (hook, *getattr(hook, "hooks", ()))
    return (
        all(map(_is_known_function, functions))
        # Accelerate's own move what goes in and out. What it released keeps its forward among its attributes.
        and all(type(one).__module__ == "accelerate.hooks" for one in hooks)
        and ("forward" not in vars(module) or _unwrapped(module.forward) is _unwrapped(type(module).forward))
    )


def _is_known_function(function: Any) -> bool:
    """Whether a function, and all that it wraps, is written where it may be. What it wraps gives it its own names."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, BuiltinFunctionType):
        return True
    is_function = isinstance(function, FunctionType)
    where = function.__globals__["__name__"] if is_function else type(function).__module__
    wrapped = getattr(function, "__wrapped__", None)
    known = f"{where}.".startswith(FUNCTIONS if is_function else CLASSES)
    return known and (wrapped is None or _is_known_function(wrapped))


def _unwrapped(function: Any) -> Any:
    function = inspect.unwrap(function)
    return getattr(function, "__func__", function)


def each_module_runs_once(recording: LayerRecord) -> bool:
    """Whether each module with parameters, but those of the attention, ran once and on all positions."""
    batch, _, out, _ = recording.calls[0].size
    inside = {id(module) for call in recording.calls for module in call.module.modules()}
    holders = [m for m in recording.layer.modules() if id(m) not in inside and m._parameters]
    matrices = all(x is None or x.dim() <= 2 for module in holders for x in module._parameters.values())
    return matrices and all(recording.rows.get(id(module)) == [batch * out] for module in holders)


def projects_any_context(recording: LayerRecord, call: AttentionRecord) -> bool:
    """Whether the attention module makes of any context what the submodule that projects it makes of that.

    Of the largest and the smallest entries that weighted sums of the values, or of some of them, may have.
    """
    if not call.answered or call.module is recording.layer:
        return True  # its own code runs in any case
    assert call.context is not None  # it was answered
    values = for_query_heads(call.values.nan_to_num(0, 0, 0), call.size[1]).transpose(1, 2)  # (batch, in, head, d_head)
    most, least = values.amax((0, 1)).clamp_min(0), values.amin((0, 1)).clamp_max(0)
    drawn = fixed_normal(call.context) < 0
    for corners in (drawn, ~drawn):
        context = torch.where(corners, most, least)
        found = attention_answers(recording, call, context)
        expected = context.flatten(2) if call.projection is None else call.projection(context.flatten(2))
        if found is None or found.shape != expected.shape:
            return False
        if not is_reproduced(found.flatten(0, 1), expected.flatten(0, 1)):
            return False
    return True
