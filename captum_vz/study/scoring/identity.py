"""What code a method or a metric is: a name that changes when its source does."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import torch

_PLAIN: Final = (str, int, float, complex, bool, bytes, type(None))
#: Packages whose version names their code.
_PACKAGES: Final = ("captum_vz", "captum", "torch", "transformers", "numpy", "scipy", "builtins", "functools")


def code_identity(thing: Any, given: str | None = None) -> str:
    """The qualified name of a class, object or function, with a digest of its source.

    The digest also covers what it names in its own module, what it encloses, and the arguments of partials. Code of
    other modules is not covered: a version that the user gives stands for all of it.

    Args:
        thing: A class, an object or a function.
        given: A version that the user gives, in the place of the digest.
    """
    name = _qualified(_core(thing))
    if given is not None:
        return f"{name} version {given}"
    digest = hashlib.sha256("\n".join(_parts(thing, set())).encode())
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


def _parts(thing: Any, seen: set[int]) -> Iterator[str]:
    """Lines that describe a thing, and what it uses."""
    if isinstance(thing, _PLAIN):
        yield repr(thing)
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, partial):
        for one in (thing.func, *thing.args, *(part for pair in sorted(thing.keywords.items()) for part in pair)):
            yield from _parts(one, seen)
    elif isinstance(thing, (list, tuple)):
        for one in thing:
            yield from _parts(one, seen)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield repr(key)
            yield from _parts(value, seen)
    elif isinstance(thing, torch.Tensor):
        flat = thing.detach().flatten()
        yield f"{tuple(thing.shape)} {thing.dtype} {flat[:: max(1, len(flat) // 64)].tolist()}"
    elif isinstance(thing, (torch.nn.Module, ModuleType)):
        yield _qualified(type(thing))  # the weights of a model have a fingerprint of their own
    elif inspect.ismethod(thing):
        yield from _parts(thing.__self__, seen)
        yield from _parts(thing.__func__, seen)
    elif inspect.isclass(thing) or inspect.isroutine(thing):
        yield from _source(thing, seen)
    else:
        yield from _source(type(thing), seen)
        for name, value in sorted(getattr(thing, "__dict__", {}).items()):
            yield name
            yield from _parts(value, seen)


def _source(thing: Any, seen: set[int]) -> Iterator[str]:
    """The source of a class or function, or the version of its package; and what it names in its own module."""
    yield _qualified(thing)
    package = (getattr(thing, "__module__", None) or "builtins").partition(".")[0]
    if package in _PACKAGES:
        try:
            yield version(package.replace("_", "-"))
        except PackageNotFoundError:
            yield package
    else:
        try:
            yield inspect.getsource(thing)
        except (OSError, TypeError):  # typed into a session that keeps no source
            yield from _compiled(getattr(thing, "__code__", None))
        if getattr(thing, "__name__", "") == "<lambda>":  # several of one line have the same source
            yield from _compiled(thing.__code__)
        for function in _functions(thing):
            for name in _names(function.__code__):
                used = function.__globals__.get(name)
                if isinstance(used, _PLAIN) or getattr(used, "__module__", None) == function.__module__:
                    yield from _parts(used, seen)
    if isinstance(thing, FunctionType):
        for cell in thing.__closure__ or ():
            yield from _parts(cell.cell_contents, seen)
        for default in (thing.__defaults__ or ()), (thing.__kwdefaults__ or {}):
            yield from _parts(default, seen)


def _functions(thing: Any) -> list[FunctionType]:
    """The function itself, or the functions of a class."""
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    plain = [getattr(one, "__func__", getattr(one, "fget", one)) for one in members]
    return [one for one in plain if isinstance(one, FunctionType)]


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
