"""What a user passes as methods, and files that register them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isclass
from pathlib import Path
from traceback import extract_tb
from types import CodeType
from typing import Any, Final

from captum_vz.attr import ALTILogit, AttnLRP, LayerMaps, MapAggregation, ModelFreeAttribution, TokenAttribution
from captum_vz.attr import ValueZeroingEffect as Effect
from captum_vz.attr._call.layers import check_class, check_function, is_captums, required, unwrapped
from captum_vz.errors import ArgumentError
from captum_vz.methods.maps import JoinedMethod, LayerMethod
from captum_vz.methods.method import Method
from captum_vz.methods.output import BaselineMethod, EffectMethod, GradientMethod, LogitMethod, RelevanceMethod
from captum_vz.methods.own import BuiltMethod, FunctionMethod, ObjectMethod
from captum_vz.methods.registry import METHODS, check_methods

#: How the names of the modules of plugins begin.
PLUGIN: Final = "captum_vz_plugin_"

#: The method of each class of this package.
_KINDS: Final[dict[type, Any]] = {
    LayerMaps: LayerMethod,
    MapAggregation: JoinedMethod,
    ModelFreeAttribution: BaselineMethod,
    Effect: EffectMethod,
    ALTILogit: LogitMethod,
    AttnLRP: RelevanceMethod,
    TokenAttribution: GradientMethod,
}


def as_method(method: Any, *, layered: bool = False) -> Method:
    """What a user passes, as a method.

    - a name of :data:`~captum_vz.study.METHODS`;
    - a :class:`~captum_vz.study.Method`;
    - a class: of this package, of Captum, or one that is built with the model and its layers and has `attribute`;
    - an object with `attribute`, which gets the inputs of a batch and, by the names of its arguments, `token`, `target`
      and `foil`. An object of Captum gets the token ids, `target`, and the attention mask as
      `additional_forward_args`;
    - a function of a :class:`~captum_vz.study.Batch` that returns scores;
    - a function of the model and its layers that returns an object with `attribute`.

    Scores may have any size and sign. Vectors for each token, as Captum returns them, become their sums.

    Args:
        method: One of these.
        layered: Whether a function, or code of your own with `attribute`, returns one tensor for each layer.

    Raises:
        ArgumentError: It is none of these.
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        return METHODS[check_methods([method])[0]]
    name, inner = name_of(method), unwrapped(method)
    own: dict[str, Any] = {"own": True, "source": method}
    if isclass(inner):
        check_class(method)
    kind = inner if isclass(inner) else type(inner)
    for base, made in _KINDS.items():
        if issubclass(kind, base):
            found: Method = made(name, method, **own)
            return found
    if isclass(inner) and is_captums(inner):
        registered = (one for one in METHODS.values() if isinstance(one, GradientMethod) and one.kind is inner)
        return GradientMethod(name, method, next((one.reduce for one in registered), "sum"), **own)
    if callable(getattr(inner, "attribute", None)):
        return ObjectMethod(name, method, in_layers=layered, **own)
    if callable(method):
        of_model = len(required(method)) >= 2
        check_function(method, "one argument, a Batch, or of two, the model and its layers", 1 + of_model)
        if of_model:
            return BuiltMethod(name, method, partial(as_method, layered=layered), **own)
        return FunctionMethod(name, method, in_layers=layered, **own)
    raise ArgumentError(
        f"method is of type {type(method).__name__}: pass a name, a class or object with 'attribute', a Method, or a "
        "function of a Batch."
    )


def register_method(
    name: str, method: Any, *, title: str | None = None, layered: bool = False, version: str | None = None
) -> Method:
    """Adds a method of your own to :data:`~captum_vz.study.METHODS`, by a name that studies and the command take.

    Args:
        name: Its name.
        method: Any of the forms of :func:`as_method`.
        title: Its name in a figure. None: `name`.
        layered: Whether a function returns one tensor for each layer.
        version: Names the code. A study whose folder holds another version computes the method again. None: a digest
            of its file, and of the data, weights and functions of its module that it holds or names. A changed comment
            then counts as a change. A change in another file of yours does not: give a new version for it.

    Raises:
        ArgumentError: The name is taken by a method of this package, or `method` has none of these forms.

    >>> import torch
    >>> from captum_vz.study import METHODS, register_method
    >>> def longest(batch):  # the scores of each example's tokens, (batch, tokens), of any size
    ...     words = [batch.tokenizer.convert_ids_to_tokens(ids) for ids in batch.inputs["input_ids"]]
    ...     return [[len(word) for word in row] for row in words]
    >>> register_method("longest", longest).title
    'longest'
    >>> del METHODS["longest"]
    """
    before = METHODS.get(name)
    if before is not None and not before.own:
        raise ArgumentError(f"name is {name!r}, which is a method of captum_vz: pass another name.")
    made = as_method(method, layered=layered)
    METHODS[name] = replace(made, title=title or name, version=version or made.version, own=True)
    return METHODS[name]


class _Compiled(SourceFileLoader):
    """Compiles the file each time. Python's cache would take it for unchanged within the second, at the same length."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load_plugin(path: str | Path) -> None:
    """Runs a Python file that registers methods or metrics of your own.

    Args:
        path: The file. It calls :func:`register_method` or :func:`~captum_vz.study.register_metric`.

    Raises:
        ArgumentError: There is no such file, or it fails. The message says at which line.
    """
    path = Path(path).absolute()
    name = f"{PLUGIN}{path.stem}"
    while getattr(sys.modules.get(name), "__file__", str(path)) != str(path):  # a plugin of another folder
        name += "_"
    spec = spec_from_file_location(name, path, loader=_Compiled(name, str(path)))
    if spec is None or spec.loader is None or path.suffix != ".py" or not path.is_file():
        raise ArgumentError(f"plugin is {path.name}: expected a Python file, whose name ends with .py.")
    module = module_from_spec(spec)
    sys.modules[name] = module  # where `inspect` and `pickle` look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [place.lineno for place in extract_tb(error.__traceback__) if place.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise ArgumentError(f"{path.name}{where}: {type(error).__name__}: {error}") from error


def given_methods(methods: Any) -> dict[str, Method]:
    """The methods that a user passes, by their names.

    Args:
        methods: None for the default methods. A name, or anything that :func:`as_method` takes. A list of these. Or a
            mapping from names to them.

    Raises:
        ArgumentError: A name is unknown or used twice, or something is no method.
    """
    if methods is None or isinstance(methods, str):
        return {name: METHODS[name] for name in check_methods(methods)}
    if isinstance(methods, Mapping):
        pairs = list(methods.items())
    else:
        single = isinstance(methods, Method) or callable(methods) or hasattr(methods, "attribute")
        pairs = [(name_of(one), one) for one in ([methods] if single else methods)]
    check_methods([one for _, one in pairs if isinstance(one, str)] or (None if pairs else []))
    found: dict[str, Method] = {}
    for name, one in pairs:
        method = as_method(one)
        if method is METHODS.get(name):
            found[name] = method
        elif name in found or name in METHODS:
            raise ArgumentError(
                f"methods has {name!r} twice, or it is a registered method: pass a mapping from new names to methods."
            )
        else:
            found[name] = method
    return found


def name_of(method: Any) -> str:
    """The name of what a user passes without one."""
    if isinstance(method, str):
        return method
    if isinstance(method, Method):
        registered = [name for name, one in METHODS.items() if one is method]
        return registered[0] if registered else method.title
    inner = unwrapped(method)
    return str(getattr(inner, "__name__", type(inner).__name__))
