"""A second device for tests. Its tensors compute on the CPU, but not together with tensors of the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
ELSEWHERE = torch.device("privateuseone", 0)
MOVES = {aten._to_copy.default, aten.copy_.default}


class There(Tensor):
    """A tensor of the second device. `here` holds its numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor, requires_grad: bool = False) -> There:
        if isinstance(here, There):
            return here
        there = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), dtype=here.dtype, device=ELSEWHERE, requires_grad=requires_grad
        )
        there.here = here
        return there

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.here.tolist()


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `func` returns, on the device of its tensors or on the device that it was given."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    # As in torch, single numbers and indices into a tensor of the second device may be on the CPU.
    bound = [x for x in tensors if x.dim()]
    bound = bound[:1] if func is aten.index.Tensor and isinstance(bound[0], There) else bound
    if func not in MOVES and len({x.device for x in bound}) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": "cpu"}
        there = torch.device(device).type == ELSEWHERE.type
    else:
        there = isinstance(tensors[0], There) if func in MOVES else any(isinstance(x, There) for x in tensors)
    known = {id(x.here): x for x in tensors if isinstance(x, There)}  # a tensor written in place stays the same tensor
    args, kwargs = tree_map(lambda x: x.here if isinstance(x, There) else x, (args, kwargs))
    output = func(*args, **kwargs)
    return tree_map(lambda x: known.get(id(x), There(x)) if there and isinstance(x, Tensor) else x, output)


class _Everywhere(TorchDispatchMode):
    """Sees tensors that are moved to the second device or made on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


@cache
def _guard() -> None:
    """Register the guard that torch needs for a device. torch keeps one for the whole process."""
    torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())


def _placed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A replacement of `torch.tensor` and the like, which allocate on a device without asking modes."""

    def made(numbers: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        return make(numbers, **kwargs) if device is None else make(numbers, **kwargs).to(device)

    return made


@contextmanager
def second_device() -> Iterator[torch.device]:
    """Provide a second device inside a `with` block."""
    module: Any = backend_registration._DummyBackendModule()
    module._lazy_init, module.get_amp_supported_dtype = lambda: None, list
    _guard()
    sys.modules["torch.privateuseone"] = module  # torch imports it to ask for its device
    try:
        made = {name: _placed(getattr(torch, name)) for name in ("tensor", "as_tensor")}
        with patch.multiple(torch, privateuseone=module, **made, create=True), _Everywhere():
            yield ELSEWHERE
    finally:
        del sys.modules["torch.privateuseone"]
