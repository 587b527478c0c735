"""Everything that an attribution could leave behind in the model, in torch, in this thread and in the process."""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_of_torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from captum_vz._engine.taps import changes, handler
from tests.captum.footprint import footprint

HOOKS_OF_ALL_MODULES = [name for name in vars(module_of_torch) if name.startswith("_global_") and "hook" in name]
PLAIN = (int, float, str, bool, list, tuple, type(None))


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that must be as before, bit for bit. Two of these compare by `==`."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        **footprint(model),
        "forwards": {name: vars(one).get("forward") for name, one in model.named_modules()},
        "values": {name: _bits(x) for name, x in model.state_dict().items()},
        "plain": {
            (name, key): list(value) if isinstance(value, list) else value
            for name, one in model.named_modules()
            for key, value in vars(one).items()
            if isinstance(value, PLAIN)
        },
        "torch's functions": [F.scaled_dot_product_attention, F.multi_head_attention_forward],
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "all modules": {name: list(getattr(module_of_torch, name) or ()) for name in HOOKS_OF_ALL_MODULES},
        "modes": [*function_modes(), *_get_current_dispatch_mode_stack()],
        "inference": torch.is_inference_mode_enabled(),
        "random": _bits(torch.get_rng_state()),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), nesting],
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compiler": None if dynamo is None else dynamo._stance.stance,
        "warnings": list(warnings.filters),
        "handler": handler.current_handler(),
        "pass": changes.current_pass.get(),
        "shared changes": dict(changes._shared),
        "threads": threading.active_count(),
    }


def function_modes() -> list[Any]:
    """This thread's function modes without the package's own, which do nothing while no pass runs.

    After an error in torch's own code, torch may put such a mode back when the pass is over.
    """
    return [mode for mode in _get_current_function_mode_stack() if not type(mode).__module__.startswith("captum_vz")]


def _bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes() if x.dim() else x.reshape(1).numpy().tobytes()


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is not as before."""
    return {name: (value, after[name]) for name, value in before.items() if after[name] != value}
