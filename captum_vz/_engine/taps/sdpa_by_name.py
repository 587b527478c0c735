"""`scaled_dot_product_attention` imported by name: a call that does not go through torch.nn.functional."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from captum_vz._engine.taps.changes import Changes
from captum_vz._engine.taps.handler import current_handler
from captum_vz._private import BUILTIN_ATTENTION, modules_of


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is BUILTIN_ATTENTION and current_handler() is not None:
            return functional.scaled_dot_product_attention(*args, **(kwargs or {}))  # SdpaTap's, while a pass runs
        return func(*args, **(kwargs or {}))


class SdpaByNameTap:
    """Sees attention whose caller imported torch's function by name.

    A function mode is asked at every function of torch, which takes time. So the mode is on only if a layer's code
    holds the function under a name of its own.
    """

    def attach(self, layers: Sequence[nn.Module], changes: Changes) -> None:
        if _holds_function(module for layer in layers for module in modules_of(layer)):
            changes.enter(_Mode())


def _holds_function(modules: Iterable[nn.Module]) -> bool:
    """Whether torch's function is an attribute of a module or of its class, or a global name of a method's file."""
    found = {id(module): module for module in modules}.values()
    classes = {cls for kind in set(map(type, found)) for cls in kind.__mro__ if cls not in nn.Module.__mro__}
    methods = [one for cls in classes for one in vars(cls).values() if isinstance(one, FunctionType)]
    files = {id(one.__globals__): one.__globals__ for one in methods}.values()
    static = [one.__func__ for cls in classes for one in vars(cls).values() if type(one) is staticmethod]
    held = chain(static, *(list(scope.values()) for scope in (*map(vars, found), *map(vars, classes), *files)))
    return id(BUILTIN_ATTENTION) in map(id, held)  # a thousand names, so without a loop in Python
