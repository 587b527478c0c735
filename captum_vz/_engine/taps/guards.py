"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from captum_vz._engine.numerics.tolerance import is_same_attention

# Torch's own function, and how far from it, relative to its largest number, one in its place may be (a quantised one).
BUILTIN = torch._C._nn.scaled_dot_product_attention


def check_attention_not_overridden(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    """Refuse a function in the place of torch's attention, or a mode, that makes something else of these arguments.

    No one is to listen to attention meanwhile.

    Raises:
        AssertionError: One does.
    """
    modes = [mode for mode in _get_current_function_mode_stack() if not type(mode).__module__.startswith("captum_vz.")]
    if function is BUILTIN and not modes:
        return
    with torch._C.DisableTorchFunction():
        expected = BUILTIN(*args, **kwargs)
        found = {"Another function": function(*args, **kwargs)}
        for mode in modes:
            # It may know the function as torch's own, or by the name where ours stands now.
            for known in (BUILTIN, functional.scaled_dot_product_attention):
                found[f"{type(mode).__name__}, for {known}"] = mode.__torch_function__(known, (), args, kwargs)
    for name, one in found.items():
        assert is_same_attention(one, expected), (
            f"{name.partition(',')[0]} stands in the place of torch.nn.functional.scaled_dot_product_attention, and "
            "computes something else. Its weights cannot be read: put torch's own back, or pass a model that calls it."
        )
