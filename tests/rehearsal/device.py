"""A device made of CPU memory, to meet on any machine what a GPU would meet. Its times mean nothing.

Its tensors say that they are on `ELSEWHERE`. They are plain tensors, like those of CUDA: DLPack hands over CPU memory
under another device type, and a backend in Python computes on this memory. As on CUDA, no operation takes tensors of
two devices, and `numpy` refuses. torch registers the device for the whole process when this file is imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
NAME = "elsewhere"
AVAILABLE = hasattr(backend_registration, "_DummyDeviceGuard")  # since torch 2.9
ON_CPU, ON_ELSEWHERE = 1, 12  # DLPack's numbers of the device types

# Views share the storage of their tensor. The CPU's kernels of these views read sizes only, for tensors of any device.
VIEWS = {aten.view.default, aten.as_strided.default, aten._reshape_alias.default, aten.unfold.default}
VIEWS |= {aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor}
COPIES = {aten._copy_from.default, aten._copy_from_and_resize.default}
# As on CUDA, these take indices of the CPU.
INDEXED = {aten.index.Tensor, aten.index.Tensor_out, aten._index_put_impl_.default, aten._unsafe_index.Tensor}
# On CUDA, the host waits for the result of these, because a shape or a number in Python depends on it.
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten._linalg_check_errors.default,
    aten.bincount.default,
}


def _histogram(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """CUDA counts integers too."""
    return torch.histc(x.double(), *args, **kwargs).to(x.dtype)


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    return aten.convolution_backward(gradient, x, weight, [weight.shape[0]], *rest)  # the sizes of a bias


# What torch calls on other devices only.
REPLACED = {
    aten.convolution_overrideable.default: aten.convolution.default,
    aten.convolution_backward_overrideable.default: _convolution_backward,
    aten.histc.default: _histogram,
}


class Traffic:
    """What passed between host and device so far.

    Attributes:
        reads: How often the host waited for numbers of the device.
        uploads: How often numbers of the host were copied to the device.
    """

    reads = 0
    uploads = 0


class _Tensor(ctypes.Structure):
    """The first fields of DLPack's `DLTensor`."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


_content = ctypes.pythonapi.PyCapsule_GetPointer
_content.restype, _content.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _seen_from(x: Tensor, device_type: int) -> Tensor:
    """The same memory as a tensor of another device."""
    capsule = torch._C._to_dlpack(x)
    _Tensor.from_address(_content(capsule, b"dltensor")).device_type = device_type
    return torch._C._from_dlpack(capsule)


def _is_elsewhere(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME


def _kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute one operation on the tensors of the device."""
    if func in VIEWS:
        return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
    if func in COPIES:
        return _copy(*args)
    _check_devices(func, args, kwargs)
    Traffic.reads += func in READS or _finds_places(func, args) or _measures_repeats(func, args, kwargs)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "cpu"}
    given: dict[int, Tensor] = {}

    def near(x: Any) -> Any:
        if not _is_elsewhere(x):
            return x
        seen = _seen_from(x, ON_CPU)
        seen = seen.clone() if not x.numel() or func is aten.resize_.default else seen  # memory that can grow
        given[id(seen)] = x
        return seen

    def far(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        fresh = _seen_from(x, ON_ELSEWHERE)
        if id(x) not in given:
            return fresh
        written = given[id(x)]
        return written if written.shape == x.shape else written.set_(fresh)

    args, kwargs = tree_map(near, (args, kwargs))
    # A tensor that stands for a number of Python arrives as this number.
    wanted = [isinstance(argument.type, torch.TensorType) for argument in func._schema.arguments]
    args = [_as_tensor(x) if is_wanted else x for x, is_wanted in zip(args, wanted, strict=False)]
    return tree_map(far, REPLACED.get(func, func)(*args, **kwargs))


def _as_tensor(x: Any) -> Any:
    return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None) if isinstance(x, (int, float)) else x


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within the device, to the host or from it."""
    Traffic.reads += not _is_elsewhere(target)
    Traffic.uploads += not _is_elsewhere(source)
    near, onto = (_seen_from(x, ON_CPU) if _is_elsewhere(x) else x for x in (source, target))
    onto.copy_(near)
    return target


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raise where CUDA raises: for tensors of two devices, and for random numbers of the CPU's generator."""
    leaves = tree_leaves((args, kwargs))
    # A number on the CPU is passed to a kernel by value. What is written must be on the device.
    tensors = [x for number, x in enumerate(leaves) if isinstance(x, Tensor) and (x.dim() or _is_written(func, number))]
    tensors = tensors[:1] if func in INDEXED else tensors
    if not all(_is_elsewhere(x) for x in tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and cpu! ({func} of {[(tuple(x.shape), str(x.device)) for x in tensors]})"
        )
    if any(isinstance(x, torch.Generator) for x in leaves):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu' ({func})")


def _is_written(func: Any, number: int) -> bool:
    arguments = func._schema.arguments
    info = arguments[number].alias_info if number < len(arguments) else None
    return info is not None and info.is_write


def _finds_places(func: Any, args: Any) -> bool:
    """Whether numbers are written by a mask, whose positions are counted first. Reading calls `nonzero` itself."""
    by_mask = func is aten._index_put_impl_.default
    return by_mask and any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _measures_repeats(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether `repeat_interleave` has to sum the repeats for the size of its result."""
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None and len(args) < 2


def _copied(clone: Any) -> Any:
    """`UntypedStorage.clone`, which copies tensors deeply. The method of torch needs an allocator written in C++."""

    def cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != NAME:
            return clone(storage)
        numbers = torch.empty(0, dtype=torch.uint8, device=ELSEWHERE)
        return numbers.set_(storage, 0, (storage.nbytes(),), (1,)).clone().untyped_storage()

    return cloned


class _Hooks(backend_registration._DummyPrivateUse1Hook if AVAILABLE else object):  # type: ignore[misc]
    def is_available(self) -> bool:
        return False


def _register() -> Iterator[Any]:
    """Tell torch of the device. torch keeps this for the whole process; the handles must be kept as long."""
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = backend_registration._DummyBackendModule()
    module._lazy_init, module.get_amp_supported_dtype = lambda: None, lambda: [torch.bfloat16, torch.float16]
    # Other tests of this process must not take it for an accelerator that they should use.
    module.is_available, module.device_count = lambda: False, lambda: 0
    torch._register_device_module(NAME, module)
    guard, hooks = backend_registration._DummyDeviceGuard(), _Hooks()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    torch._C._acc.register_python_privateuseone_hook(hooks)
    others, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(_kernel, "PrivateUse1")
    for func in REPLACED:
        kernels.impl(func, partial(_kernel, func), "PrivateUse1")
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) copies where modes see the copy
    torch.UntypedStorage.clone = _copied(torch.UntypedStorage.clone)
    yield from (guard, hooks, others, kernels)


_HANDLES = list(_register()) if AVAILABLE else []  # a library without a handle is taken back
ELSEWHERE = torch.device(NAME if AVAILABLE else "cpu", 0)
