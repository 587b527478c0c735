"""Everything about a model that an attribution could leave behind, in a form that can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.taps.handler import current_handler

HOOKS = [name for name in vars(nn.Module()) if "hook" in name]


def footprint(model: nn.Module) -> dict[str, Any]:
    """Hooks, wrapped forwards, modes, configs and listeners as they are now."""
    modules = dict(model.named_modules())
    configs = {id(config): config for m in modules.values() if (config := getattr(m, "config", None)) is not None}
    return {
        "modules": {name: id(module) for name, module in modules.items()},
        "hooks": {(n, hook): list(getattr(m, hook) or ()) for n, m in modules.items() for hook in HOOKS},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "forward": {name: "forward" in vars(module) for name, module in modules.items()},
        "training": {name: module.training for name, module in modules.items()},
        "attention": {key: config._attn_implementation for key, config in configs.items()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "listener": current_handler(),
        "grad mode": torch.is_grad_enabled(),
    }


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_numbers(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    assert not changed
