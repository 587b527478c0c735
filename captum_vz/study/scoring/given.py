"""What a user passes as methods, as rows of the registry, and the check of the scores that methods return."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, isclass, signature
from pathlib import Path
from traceback import extract_tb
from types import CodeType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from captum_vz.attr import LayerMaps, MapAggregation, ModelFreeAttribution, TokenAttribution
from captum_vz.attr._call.layers import check_class, check_function, is_captums, required, unwrapped
from captum_vz.errors import ArgumentError
from captum_vz.functional import normalize_rows
from captum_vz.study.methods import METHODS, Method, baseline_method, check_methods, layer_method
from captum_vz.study.scoring import Batch, explained_classes, gradient_rows

#: How the names of the modules of plugins begin.
PLUGIN: Final = "captum_vz_plugin_"

#: By how much the sum of shares may differ from 1; half precision rounds by less.
_ROUNDING = 1e-2


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
        pairs = [(_name_of(one), one) for one in ([methods] if single else methods)]
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


def named_method(method: Any) -> tuple[str, Method]:
    """One method that a user passes, and its name."""
    return _name_of(method), as_method(method)


def as_method(method: Any, *, layered: bool = False) -> Method:
    """What a user passes, as a row of the registry.

    - a name of :data:`~captum_vz.study.METHODS`;
    - a :class:`~captum_vz.study.Method`;
    - a class: of this package, of Captum, or one that is built with the model and its layers and has `attribute`;
    - an object with `attribute`, which gets the inputs of a batch and, by the names of its arguments, `token`, `target`
      and `foil`. An object of Captum gets the token ids, `target`, and the attention mask as
      `additional_forward_args`;
    - a function of a :class:`~captum_vz.study.Batch` that returns scores;
    - a function of the model and its layers that returns an object with `attribute`.

    Scores may have any size and sign: their sizes become shares. Vectors for each token, as Captum returns them, become
    their Euclidean norms.

    Args:
        method: One of these.
        layered: Whether a function returns one tensor for each layer.

    Raises:
        ArgumentError: It is none of these.
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        return METHODS[check_methods([method])[0]]
    name = _name_of(method)
    made = partial(Method, name, layered=layered, own=True, source=method)
    inner: Any = unwrapped(method)
    if isclass(inner):
        check_class(method)
        if issubclass(inner, LayerMaps) and not inner.explains_output:
            return replace(layer_method(name, method), own=True, source=method)
        if issubclass(inner, ModelFreeAttribution):
            return replace(baseline_method(name, method), own=True, source=method)
        if is_captums(inner):
            return made(partial(gradient_rows, method), explains_output=True)
        attribute: Any = getattr(inner, "attribute", None)
        joins = issubclass(inner, (LayerMaps, MapAggregation))
        explains = "target" in signature(attribute).parameters and not issubclass(inner, MapAggregation)
        return made(
            lambda batch: _object_rows(_built(method, batch), batch),
            layered=layered or joins,
            explains_output=explains,
        )
    if callable(getattr(method, "attribute", None)):
        joins = isinstance(method, (LayerMaps, MapAggregation))
        explains = "target" in signature(method.attribute).parameters and not joins
        explains = explains or _explains_output(method)
        return made(partial(_object_rows, method), layered=layered or joins, explains_output=explains)
    if callable(method):
        of_model = len(required(method)) >= 2
        check_function(method, "one argument, a Batch, or of two, the model and its layers", 1 + of_model)
        if of_model:
            return made(lambda batch: _object_rows(_built(method, batch), batch))
        return made(lambda batch: _shares(method(batch), batch))
    raise ArgumentError(
        f"method is of type {type(method).__name__}: pass a name, a class or object with 'attribute', a Method, or a "
        "function of a Batch."
    )


def checked_rows(name: str, method: Method, batch: Batch, examples: Sequence[str]) -> Tensor:
    """The scores of a method for a batch, `(layers, batch, tokens)` in float64 on the CPU.

    NaN is an answer: it says that the method is undefined for an example.

    Args:
        name: The method's name, for the error.
        method: The method.
        batch: The batch.
        examples: The names of its examples, for the error.

    Raises:
        ArgumentError: The method returned something else than shares `(batch, tokens)`, one tensor or one a layer.
    """
    shape = batch.inputs["input_ids"].shape
    expected = f"expected {'tensors' if method.layered else 'one tensor'} (batch, tokens) of shape {tuple(shape)}"

    def refuse(came: str, places: Sequence[int] = range(len(examples))) -> ArgumentError:
        named = ", ".join(repr(examples[place]) for place in list(places)[:3])
        return ArgumentError(f"method {name!r}, example {named}: the method returned {came}; {expected}.")

    found = method.rows(batch.copy())
    tensors = list(found) if isinstance(found, (list, tuple)) else [found]
    if not tensors or (len(tensors) > 1 and not method.layered):
        raise refuse(f"{len(tensors)} tensors")
    rows = []
    for one in tensors:
        if not isinstance(one, (Tensor, np.ndarray)):
            raise refuse(f"an object of type {type(one).__name__}")
        try:
            row = torch.as_tensor(one).detach().cpu()
        except TypeError as error:
            raise refuse(f"{tuple(one.shape)} of {one.dtype}") from error
        if row.shape != shape or row.is_complex() or row.dtype == torch.bool:
            raise refuse(f"{tuple(row.shape)} of {row.dtype}")
        rows.append(row.double())
    stacked = torch.stack(rows)
    known = stacked.nan_to_num(nan=0.0)
    total = known.sum(-1)
    wrong = (known < 0).any(-1) | known.isinf().any(-1) | _has_padding(known, batch)
    wrong |= ((total - 1).abs() > _ROUNDING) & (total != 0) & ~stacked.isnan().any(-1)
    if wrong.any():
        layer, place = wrong.nonzero()[0].tolist()
        sums, low = float(stacked[layer, place].sum()), float(stacked[layer, place].min())
        expected = "expected shares, which are not negative, sum to 1 (or are all 0), and are 0 for padding"
        raise refuse(f"a row with the sum {sums:.4g} and the smallest entry {low:.4g}", [place])
    return stacked


def _has_padding(rows: Tensor, batch: Batch) -> Tensor:
    """Whether padding has scores, `(layers, batch)`."""
    mask = batch.inputs.get("attention_mask")
    if mask is None:
        return torch.zeros(rows.shape[:2], dtype=torch.bool)
    return (rows.masked_fill(mask.cpu().bool(), 0) != 0).any(-1)


def _name_of(method: Any) -> str:
    """The name of what a user passes without one."""
    if isinstance(method, str):
        return method
    if isinstance(method, Method):
        registered = [name for name, one in METHODS.items() if one is method]
        return registered[0] if registered else method.title
    inner = unwrapped(method)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _explains_output(method: Any) -> bool:
    """Whether a method has maps of a number of the output, or joins such maps."""
    return bool(getattr(getattr(method, "maps", method), "explains_output", False))


def _built(kind: Callable[..., Any], batch: Batch) -> Any:
    """The object of a class, or of a function that builds it: with the model, its layers and its tokenizer."""
    inner = unwrapped(kind)
    of_layers = not (isclass(inner) and issubclass(inner, TokenAttribution))
    # `layer` may be left out, but the layers of the batch are known.
    count = 2 if of_layers and "layer" in signature(kind).parameters else len(required(kind))
    given = [batch.model, batch.layers][:count]
    needs = signature(kind).parameters.get("tokenizer")
    is_missing = needs is not None and needs.kind is Parameter.KEYWORD_ONLY and needs.default is Parameter.empty
    return kind(*given, **({"tokenizer": batch.tokenizer} if is_missing else {}))


def _object_rows(method: Any, batch: Batch) -> list[Tensor]:
    """The scores of an object with `attribute`, as shares."""
    model = getattr(method, "forward_func", None)
    if isinstance(model, nn.Module) and model is not batch.model:
        raise ArgumentError(
            f"the object was made for another model ({type(model).__name__}): pass its class, which is built for each "
            "model."
        )
    if not hasattr(method, "attribute"):
        raise ArgumentError(f"method returned a {type(method).__name__}: expected an object with 'attribute'.")
    asked: dict[str, Any] = {}
    if _explains_output(method):
        asked["target"], asked["foil"] = explained_classes(batch)
    if isinstance(method, LayerMaps):
        return _shares([one[:, 0] for _, one in method.run(batch.inputs, token=batch.token, **asked).maps], batch)
    if isinstance(method, MapAggregation):
        run = method.maps.run(batch.inputs, find_other_mixing=True, **asked)
        return _shares(method.join_run(run, token=batch.token, all_layers=True), batch)
    accepted = signature(method.attribute).parameters
    options: dict[str, Any] = {}
    if "target" in accepted:
        options["target"], options["foil"] = explained_classes(batch)
    if is_captums(type(method)):
        mask = batch.inputs.get("attention_mask")
        options["additional_forward_args"] = None if mask is None else (mask,)
        try:
            found = method.attribute(batch.inputs["input_ids"], **_named(options, accepted))
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"the {type(method).__name__} of Captum fails on token ids ({error}). Pass its class, which is made on "
                "the embeddings, or make the object of a function of token ids that returns all logits of the model."
            ) from error
        found = found[0] if isinstance(found, tuple) and len(found) == 1 else found
        vectors = isinstance(found, Tensor) and found.ndim == 3
        return _shares(found.norm(dim=-1) if vectors else found, batch)
    options["token"] = batch.token
    return _shares(method.attribute(batch.inputs, **_named(options, accepted)), batch)


def _named(options: Mapping[str, Any], accepted: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in accepted}


def _shares(found: Any, batch: Batch) -> list[Any]:
    """The sizes of scores as shares of their sum, without padding. Scores of a wrong shape stay as they are."""
    shape, mask = batch.inputs["input_ids"].shape, batch.inputs.get("attention_mask")
    several = isinstance(found, (list, tuple)) and all(isinstance(one, (Tensor, np.ndarray)) for one in found)
    shares: list[Any] = []
    for one in found if several and found else [found]:
        row = one
        if isinstance(one, (Tensor, np.ndarray, list, tuple)):
            try:
                row = torch.as_tensor(one).detach().cpu()
            except (TypeError, ValueError, RuntimeError):  # of objects, of rows of several lengths, of huge integers
                shares.append(one)
                continue
            if row.shape == shape and not row.is_complex() and not row.isinf().any():
                kept = row if mask is None else row.masked_fill(~mask.cpu().bool(), 0)
                row = normalize_rows(kept.double().abs())
        shares.append(row)
    return shares
