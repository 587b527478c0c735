"""What code a method or a metric is: a name that changes when its source does."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch

_PLAIN: Final = (str, int, float, complex, bool, bytes, type(None))
#: Values whose `repr` says all of them.
_WRITTEN: Final = (*_PLAIN, bytearray, range, slice, PurePath, np.generic, np.dtype, torch.dtype, torch.device)
_GROUPS: Final = (list, tuple, deque)
_SETS: Final = (set, frozenset)
#: Values that a function may name in its module. Objects of other classes belong to the modules of these classes.
_DATA: Final = (*_WRITTEN, *_GROUPS, *_SETS, dict, partial, np.ndarray, torch.Tensor)
#: Packages whose version names their code.
_PACKAGES: Final = ("captum_vz", "captum", "torch", "transformers", "numpy", "scipy", "builtins", "functools")


def code_identity(thing: Any, given: str | None = None) -> str:
    """The qualified name of a class, object or function, with a digest of its source.

    The digest also covers what it names in its own module (functions, classes, data), its base classes there, what it
    encloses, the state of objects, and the arguments of partials. Code of other modules is not covered: a version that
    the user gives stands for all of it. So it does for code that changes its own data, such as a cache in its module.

    Args:
        thing: A class, an object or a function.
        given: A version that the user gives, in the place of the digest.
    """
    name = _qualified(_core(thing))
    if given is not None:
        return f"{name} version {given}"
    digest = hashlib.sha256("\n".join(_parts(thing, {})).encode())
    return f"{name} {digest.hexdigest()[:16]}"


def _core(thing: Any) -> Any:
    """The class or function of a thing."""
    while isinstance(thing, partial):
        thing = thing.func
    if inspect.ismethod(thing):
        thing = thing.__func__
    return thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing)


def _qualified(thing: Any) -> str:
    module = getattr(thing, "__module__", None) or "builtins"
    return f"{module}.{getattr(thing, '__qualname__', repr(thing))}"


def _parts(thing: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Lines that describe a thing, and what it uses."""
    if isinstance(thing, _WRITTEN):
        yield repr(thing)
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing  # held, so that no other object gets its id
    if isinstance(thing, partial):
        for one in (thing.func, *thing.args, *(part for pair in sorted(thing.keywords.items()) for part in pair)):
            yield from _parts(one, seen)
    elif isinstance(thing, _GROUPS):
        for one in thing:
            yield from _parts(one, seen)
    elif isinstance(thing, _SETS):
        # The order of a set differs from process to process.
        yield from sorted("\n".join(_parts(one, seen)) for one in thing)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield repr(key)
            yield from _parts(value, seen)
    elif isinstance(thing, np.ndarray) and thing.dtype.hasobject:
        yield from _parts(thing.tolist(), seen)
    elif isinstance(thing, (torch.Tensor, np.ndarray)):
        yield _numbers(thing)
    elif isinstance(thing, ModuleType):
        yield _qualified(type(thing))
    elif isinstance(thing, torch.nn.Module):
        yield from _of_module(thing, seen)
    elif inspect.ismethod(thing):
        yield from _parts(thing.__self__, seen)
        yield from _parts(thing.__func__, seen)
    elif inspect.isclass(thing) or inspect.isroutine(thing):
        yield from _source(thing, seen)
    else:
        yield from _source(type(thing), seen)
        for name, value in _state(thing):
            yield name
            yield from _parts(value, seen)


def _numbers(array: Any) -> str:
    """Shape, type and a digest of all numbers of an array or a tensor."""
    if isinstance(array, torch.Tensor):
        flat = array.detach().to_dense().cpu().flatten().contiguous()
        data = flat.view(torch.uint8).numpy().tobytes()
    else:
        data = array.tobytes()
    return f"{tuple(array.shape)} {array.dtype} {hashlib.sha256(data).hexdigest()}"


def _of_module(module: torch.nn.Module, seen: dict[int, Any]) -> Iterator[str]:
    """The classes of a module's parts, with attributes that are data, and 64 numbers of each parameter."""
    for part in module.modules():
        yield from _parts(type(part), seen)
        if not _is_packaged(type(part)):
            yield from _parts({name: value for name, value in vars(part).items() if isinstance(value, _WRITTEN)}, seen)
    for name, values in module.state_dict().items():
        if isinstance(values, torch.Tensor):
            flat = values.detach().flatten()
            yield f"{name} {tuple(values.shape)} {_numbers(flat[:: max(1, len(flat) // 64)])}"


def _state(thing: Any) -> list[tuple[str, Any]]:
    """The attributes of an object, with those in slots."""
    named = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                named[name] = getattr(thing, name)
    return sorted(named.items())


def _is_packaged(thing: Any) -> bool:
    """Whether the version of a package names the code of a class or function."""
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0] in _PACKAGES


def _source(thing: Any, seen: dict[int, Any]) -> Iterator[str]:
    """The source of a class or function, or the version of its package; and what it names in its own module."""
    yield _qualified(thing)
    functions = _functions(thing)
    if _is_packaged(thing):
        package = (getattr(thing, "__module__", None) or "builtins").partition(".")[0]
        try:
            yield version(package.replace("_", "-"))
        except PackageNotFoundError:
            yield package
        functions = [thing] if isinstance(thing, FunctionType) else []
    else:
        try:
            # Of a decorated function, `getsource` would skip the decorator's own function.
            yield inspect.getsource(getattr(thing, "__code__", thing))
        except (OSError, TypeError):  # typed into a session that keeps no source
            for function in functions:
                yield from _compiled(function.__code__)
        if getattr(thing, "__name__", "") == "<lambda>":  # several of one line have the same source
            yield from _compiled(thing.__code__)
        for function in functions:
            for name in _names(function.__code__):
                used = function.__globals__.get(name)
                is_own = getattr(used, "__module__", None) == function.__module__
                if is_own or (isinstance(used, _DATA) and not _is_in_package(name, used)):
                    yield from _parts(used, seen)
        if inspect.isclass(thing):
            yield from _inherited(thing, seen)
    for function in functions:
        yield from _parts([*_enclosed(function), function.__defaults__ or (), function.__kwdefaults__ or {}], seen)


def _enclosed(function: FunctionType) -> Iterator[Any]:
    """What a function encloses."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing yet
            yield cell.cell_contents


def _inherited(kind: type, seen: dict[int, Any]) -> Iterator[str]:
    """The base classes of a class in its module, and its attributes that are data."""
    for base in kind.__mro__[1:]:
        if base.__module__ == kind.__module__:
            yield from _parts(base, seen)
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, _DATA) and not name.startswith("__"):
            yield name
            yield from _parts(value, seen)


def _is_in_package(name: str, value: Any) -> bool:
    """Whether data was imported from one of the packages, whose version names it, such as a registry."""
    modules = [module for key, module in list(sys.modules.items()) if key.partition(".")[0] in _PACKAGES]
    return not isinstance(value, _PLAIN) and any(vars(module).get(name) is value for module in modules if module)


def _functions(thing: Any) -> list[FunctionType]:
    """The function itself, or the functions of a class, without what wraps them."""
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    found = []
    for one in members:
        for name in ("__func__", "fget", "func", "__wrapped__"):  # methods, properties, cached ones, other caches
            one = one if isinstance(one, FunctionType) else getattr(one, name, one)
        found.append(one)
    return [one for one in found if isinstance(one, FunctionType)]


def _names(code: CodeType) -> Iterator[str]:
    """The global names that code uses, also inside of the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _compiled(code: CodeType | None) -> Iterator[str]:
    """The compiled code, for functions without a source."""
    if code is not None:
        yield code.co_code.hex()
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _compiled(constant)
            else:
                yield repr(constant)
