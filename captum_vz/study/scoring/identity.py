"""What code a method or a metric is: a name that changes when its file changes, or what it holds."""

from __future__ import annotations

import inspect
import pickle
import sys
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from captum_vz.errors import ArgumentError, needs_extra

with needs_extra("captum_vz.study", "study"):
    from joblib.hashing import NumpyHasher

#: Packages whose version names their code.
_PACKAGES: Final = ("captum_vz", "captum", "torch", "transformers", "numpy", "scipy", "joblib")
#: Values that a function may name in its module. Objects of other classes belong to the modules of these classes.
_DATA: Final = (str, int, float, complex, bytes, list, tuple, set, dict, partial, np.ndarray, torch.Tensor, nn.Module)


def code_identity(thing: Any, given: str | None = None) -> str:
    """The qualified name of a class, object or function, with a digest of its file and of what it holds.

    What it holds: the data, functions and classes of its module that it names, its base classes, what it encloses, the
    state of objects, and the arguments of partials. Files that it imports are not covered. A version that the user
    gives stands for all of it.

    Args:
        thing: A class, an object or a function.
        given: A version that the user gives, in the place of the digest.

    Raises:
        ArgumentError: It holds something that cannot be compared, such as an open file.
    """
    core = thing
    while isinstance(core, partial) or inspect.ismethod(core):
        core = core.func if isinstance(core, partial) else core.__func__
    name = _name(core if inspect.isclass(core) or inspect.isroutine(core) else type(core))
    if given is not None:
        return f"{name} version {given}"
    try:
        return f"{name} {_Hasher('sha1').hash(thing)[:16]}"
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError(
            f"{name} holds something that the next start of a study cannot compare ({error}). Register it with "
            "version=, and give another version when its scores change."
        ) from error


class _Hasher(NumpyHasher):
    """Joblib's digest of objects. Functions and classes count by their files and by what they hold."""

    def __init__(self, hash_name: str) -> None:
        super().__init__(hash_name)
        self.seen: dict[int, Any] = {}  # holds the objects, so that no other one gets such an id

    def save(self, obj: Any) -> None:
        """Add an object to the digest."""
        if isinstance(obj, torch.Tensor):
            flat = obj.detach().to_dense().cpu().flatten().contiguous()
            obj = [str(obj.dtype), list(obj.shape), flat.view(torch.uint8).numpy()]
        elif isinstance(obj, nn.Module):  # a run of the model may change its other attributes
            own = [vars(part) for part in obj.modules() if not _package(type(part))]
            plain = [{name: x for name, x in one.items() if isinstance(x, (str, int, float))} for one in own]
            obj = [[type(part) for part in obj.modules()], plain, dict(obj.state_dict())]
        elif isinstance(obj, ModuleType):
            obj = obj.__name__
        elif isinstance(obj, CodeType):
            obj = [obj.co_code, *obj.co_consts]
        elif isinstance(obj, (set, frozenset)):  # joblib orders some sets by hashes, which differ between processes
            obj = sorted(obj, key=repr)
        elif inspect.isclass(obj) or (_functions(obj) and not inspect.ismethod(obj)):
            known, self.seen[id(obj)] = id(obj) in self.seen, obj
            obj = _name(obj) if known else [_name(obj), *_held(obj)]
        super().save(obj)


def _held(thing: Any) -> list[Any]:
    """The package or the file of a class or function, and what it holds."""
    functions, package = _functions(thing), _package(thing)
    held: list[Any] = [package]
    if package:
        functions = functions if isinstance(thing, FunctionType) else []
    else:
        file = Path(getattr(sys.modules.get(thing.__module__), "__file__", None) or "")
        held.append(sha256(file.read_bytes()).hexdigest() if file.is_file() else "")
        if inspect.isclass(thing):
            held += [base for base in thing.__mro__[1:] if not _package(base)]
            held += [pair for pair in vars(thing).items() if isinstance(pair[1], _DATA) and pair[0][:2] != "__"]
        # The code itself counts in a session without files, and for lambdas, which have one name.
        held += [part for function in functions for part in (function.__code__, *_named(function))]
    for one in functions:
        full = [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
        held += [full, one.__defaults__, one.__kwdefaults__]
    return held


def _named(function: FunctionType) -> list[Any]:
    """The data, functions and classes of its module that a function names. The package's registries do not count."""
    found, codes = [], [function.__code__]
    package = [vars(module) for key, module in list(sys.modules.items()) if key.startswith("captum_vz.")]
    for code in codes:  # also of the functions that it defines
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        used = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        for name, value in used.items():
            registry = isinstance(value, dict) and any(module.get(name) is value for module in package)
            if getattr(value, "__module__", None) == function.__module__ or (isinstance(value, _DATA) and not registry):
                found.append(value)
    return found


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None) or 'builtins'}.{getattr(thing, '__qualname__', repr(thing))}"


def _package(thing: Any) -> str:
    """The package whose version names the code of a class or function; empty for other code."""
    package = _name(thing).partition(".")[0]
    if package in _PACKAGES:
        return f"{package} {version(package.replace('_', '-'))}"
    return "Python" if package in sys.stdlib_module_names else ""


def _functions(thing: Any) -> list[FunctionType]:
    """The function itself, or the functions of a class, without what wraps them."""
    found = []
    for one in vars(thing).values() if inspect.isclass(thing) else [thing]:
        for name in ("__func__", "fget", "func", "__wrapped__"):  # methods, properties, cached ones, other caches
            one = one if isinstance(one, (FunctionType, partial)) else getattr(one, name, one)
        found.append(one)
    return [one for one in found if isinstance(one, FunctionType)]
