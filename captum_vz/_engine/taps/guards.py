"""Refuse attention functions and function modes of the user that compute something else than torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from captum_vz._engine.numerics.tolerance import is_same_attention
from captum_vz._private import BUILTIN_ATTENTION, function_modes, without_function_modes
from captum_vz.errors import RefusedError


def check_attention_not_overridden(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    """Check that `function`, and each active function mode of the user, computes torch's attention of these arguments.

    Small differences, such as those of a quantised attention, are accepted. No attention handler may be active.

    Raises:
        RefusedError: The function or a mode computes something else.
    """
    modes = [mode for mode in function_modes() if not type(mode).__module__.startswith("captum_vz.")]
    if function is BUILTIN_ATTENTION and not modes:
        return
    with without_function_modes():
        expected = BUILTIN_ATTENTION(*args, **kwargs)
        results = [("Another function", function(*args, **kwargs))]
        for mode in modes:
            # A mode may compare with torch's own function, or with the current value of the public name.
            for known in (BUILTIN_ATTENTION, functional.scaled_dot_product_attention):
                result = mode.__torch_function__(known, (), args, kwargs)
                results.append((f"The function mode {type(mode).__name__}", result))
    for name, result in results:
        if not is_same_attention(result, expected):
            raise RefusedError(
                f"{name} replaces torch.nn.functional.scaled_dot_product_attention and computes something else. "
                "Expected torch's own attention, because the weights cannot be read otherwise. Restore torch's "
                "function, or pass a model that calls it."
            )
