"""What a user passes as methods: names, classes, objects, functions, and files that register them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, isclass, signature
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from captum_vz._names import known_name
from captum_vz.attr import ALTILogit, AttnLRP, LayerMaps, MapAggregation, ModelFreeAttribution, TokenAttribution
from captum_vz.attr import ValueZeroingEffect as Effect
from captum_vz.attr._call import is_captums, required, unwrapped
from captum_vz.errors import ArgumentError
from captum_vz.methods import kinds
from captum_vz.methods.method import Method, Question, WrongScoresError, added, check_model
from captum_vz.methods.registry import METHODS, check_methods, known_methods
from captum_vz.subjects import Subject

PLUGIN: Final = "captum_vz_plugin_"  #: how the names of the modules of plugins begin

#: The method of each class of this package.
_KINDS: Final[dict[type, Any]] = {
    LayerMaps: kinds.LayerMethod,
    MapAggregation: kinds.JoinedMethod,
    ModelFreeAttribution: kinds.BaselineMethod,
    Effect: kinds.EffectMethod,
    ALTILogit: kinds.LogitMethod,
    AttnLRP: kinds.RelevanceMethod,
    TokenAttribution: kinds.GradientMethod,
}
_MODEL = ("forward_func", "model")  # what stands for the model in the classes of Captum and of this package


@dataclass
class Batch:
    """What a function of a user is given: a model, some of its inputs, and the token that is explained in each.

    Attributes:
        model: What is run on the inputs by keyword.
        tokenizer: Its tokenizer.
        layers: The layers that are explained, in the order in which they run.
        inputs: What the model takes, by keyword; `input_ids` among them.
        token: The position of one token in each example, not negative.
        targets: The class (a token id) that is explained by methods that explain the model's output, one for each
            example. None: the class that the model predicts.
        foils: The class whose logit is subtracted from the target's logit, one for each example. None: no class.
    """

    model: Any
    tokenizer: Any
    layers: list[nn.Module]
    inputs: dict[str, Any]
    token: list[int]
    targets: list[int] | None
    foils: list[int] | None
    _asked: tuple[Subject, Question] = field(repr=False)

    @classmethod
    def of(cls, subject: Subject, question: Question) -> Batch:
        """The batch of a question. Its tensors and lists are its own: a method that changes them harms no other one."""
        inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in question.inputs.items()}
        targets, foils = (
            None if rows is None or callable(rows) else [one[-1] if isinstance(one, tuple) else one for one in rows]
            for rows in (question.target, question.foil)
        )
        run, layers = (subject.forward, subject.tokenizer), list(subject.layers)
        return cls(*run, layers, inputs, list(question.places), targets, foils, (subject, question))

    def scores(self, method: Method) -> Tensor:
        """The scores of another method for the batch, `(layers, batch, tokens)`, raw and with their signs."""
        return method.scores(*self._asked)


@dataclass(frozen=True, eq=False)
class ForeignMethod(kinds.MadeMethod):
    """Scores from code of a user, which may have any form, and are checked: from a function of a :class:`Batch`."""

    is_foreign = True

    layered: bool = field(default=False, kw_only=True)  #: whether there is a tensor for each layer

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The scores. The scores of a feature's tokens are added up."""
        found, ids = self.found(subject, question), question.inputs.get("input_ids")
        rows = found if ids is None else checked(found, tuple(ids.shape), self.layered)
        return [added(one, features) for one in rows]

    def found(self, subject: Subject, question: Question) -> Any:
        """What the user's code returns."""
        return self.kind(Batch.of(subject, question), **self.options)


def checked(found: Any, shape: tuple[int, ...], layered: bool) -> list[Tensor]:
    """The scores of a user's method in float64: one tensor `(rows, tokens)`, or one for each layer."""
    expected = f"expected {'tensors' if layered else 'one tensor'} (batch, tokens) of shape {shape}"
    several = isinstance(found, (list, tuple)) and all(isinstance(one, (Tensor, np.ndarray)) for one in found)
    each = list(found) if several and found else [found]
    if len(each) > 1 and not layered:
        raise WrongScoresError(f"the method returned {len(each)} tensors; {expected}.")
    rows = []
    for one in each:
        try:
            row = torch.as_tensor(one).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:  # of objects, of rows of several lengths, of a string
            is_array = isinstance(one, np.ndarray)
            came = f"{one.shape} of {one.dtype}" if is_array else f"an object of type {type(one).__name__}"
            raise WrongScoresError(f"the method returned {came}; {expected}.") from error
        if row.shape != shape or row.is_complex() or row.dtype == torch.bool:
            raise WrongScoresError(f"the method returned {tuple(row.shape)} of {row.dtype}; {expected}.")
        rows.append(row.double())
    return rows


@dataclass(frozen=True, eq=False)
class ObjectMethod(ForeignMethod):
    """An object with `attribute`, or its class. It gets `token`, `target` and `foil` if it has such arguments."""

    @property
    def explains_output(self) -> bool:
        """Whether it takes a target."""
        return "target" in signature(self.kind.attribute).parameters

    def found(self, subject: Subject, question: Question) -> Any:
        """What its `attribute` returns."""
        batch = Batch.of(subject, question)
        made = built(self.kind, subject) if isclass(unwrapped(self.kind)) else self.kind
        check_model(made, subject)
        given: dict[str, Any] = {"token": batch.token}
        if self.explains_output:
            given |= question.asked(subject)
        of_captum = is_captums(type(made))
        if of_captum:
            mask = batch.inputs.get("attention_mask")
            given["additional_forward_args"] = None if mask is None else (mask,)
        accepted = signature(made.attribute).parameters
        given = {name: value for name, value in given.items() if name in accepted} | dict(self.options)
        if not of_captum:
            return made.attribute(batch.inputs, **given)
        try:
            found = made.attribute(batch.inputs["input_ids"], **given)
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"the {type(made).__name__} of Captum fails on token ids ({error}). Pass its class, which is made on "
                "the embeddings, or make the object of a function of token ids that returns all logits of the model."
            ) from error
        found = found[0] if isinstance(found, tuple) and len(found) == 1 else found
        return found.sum(-1) if isinstance(found, Tensor) and found.ndim == 3 else found


@dataclass(frozen=True, eq=False)
class BuiltMethod(Method):
    """A function of the model and its layers that builds the method."""

    build: Callable[..., Any]
    each_layer: bool = False  #: whether what it builds returns one tensor for each layer, if it is code of a user

    def of(self, subject: Subject) -> Method:
        """The method for this model."""
        return as_method(built(self.build, subject), layered=self.each_layer)

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The rows of the method for this model."""
        return self.of(subject).rows(subject, question, features)


def built(kind: Callable[..., Any], subject: Subject) -> Any:
    """The object of a class, or of a function that builds it: with the model, its layers and its tokenizer."""
    inner: Any = unwrapped(kind)
    of_layers = not (isclass(inner) and issubclass(inner, TokenAttribution))
    known = signature(kind).parameters
    # `layer` may be left out, but the layers of the subject are known.
    count = 2 if of_layers and "layer" in known else len(required(kind))
    given = [subject.forward, list(subject.layers)][:count]
    needs = known.get("tokenizer")
    is_missing = needs is not None and needs.kind is Parameter.KEYWORD_ONLY and needs.default is Parameter.empty
    made = kind(*given, **({"tokenizer": subject.tokenizer} if is_missing else {}))
    if not callable(getattr(made, "attribute", None)):
        raise ArgumentError(f"method returned a {type(made).__name__}: expected an object with 'attribute'.")
    return made


def as_method(method: Any, *, layered: bool = False) -> Method:
    """What a user passes, as a method.

    - a name of :data:`~captum_vz.study.METHODS`. "NAME:deciding", for a method with a map for each layer, has for
      each example the row of the layer in which the token reads what the decision rests on, see
      :func:`~captum_vz.functional.deciding_layer`;
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
        known = known_methods()
        return known[known_name("method", method, known)]
    inner = unwrapped(method)
    own: dict[str, Any] = {"title": name_of(method), "own": True, "source": method}
    if isclass(inner):
        _check_class(method)
    kind = inner if isclass(inner) else type(inner)
    for base, made in _KINDS.items():
        if issubclass(kind, base):
            return made(kind=method, **own)
    if isclass(inner) and is_captums(inner):
        registered = (one for one in METHODS.values() if isinstance(one, kinds.GradientMethod) and one.kind is inner)
        return kinds.GradientMethod(kind=method, reduce=next((one.reduce for one in registered), "sum"), **own)
    if callable(getattr(inner, "attribute", None)):
        return ObjectMethod(kind=method, layered=layered, **own)
    if callable(method):
        of_model = len(required(method)) >= 2
        _check_function(method, 1 + of_model)
        if of_model:
            return BuiltMethod(build=method, each_layer=layered, **own)
        return ForeignMethod(kind=method, layered=layered, **own)
    raise ArgumentError(
        f"method is of type {type(method).__name__}: pass a name, a class or object with 'attribute', a Method, or a "
        "function of a Batch."
    )


def _check_class(method: Any) -> None:
    """Refuse a class, or a partial of one, that is not made of a model, or of a model and its layers, alone."""
    kind = unwrapped(method)
    name = kind.__name__
    if not callable(getattr(kind, "attribute", None)):
        raise ArgumentError(
            f"method is the class {name}, which has no 'attribute': pass a class that has one, such as ValueZeroing."
        )
    of_captum, needed = is_captums(kind), required(method)
    if of_captum and "layer" in signature(kind).parameters:
        needed = [*dict.fromkeys([*needed, "layer"])]
    if of_captum or kind.__module__.startswith("captum_vz."):
        missing = [one for one in needed if one not in _MODEL and (of_captum or one != "layer")]
    else:
        missing = needed[2:]
    if missing:
        raise ArgumentError(
            f"method is the class {name}, which is made of {' and '.join(missing)} too: pass an object of it, a "
            f"function of (model, layers) that makes one, or TokenAttribution(model, {name}, tokenizer, layer)."
        )


def _check_function(method: Callable[..., Any], count: int) -> None:
    """Refuse a function that cannot be called with a Batch, or with the model and its layers: `count` arguments."""
    try:
        signature(method).bind(*[None] * count)
    except ValueError:  # functions written in C have no signature
        return
    except TypeError as error:
        name = getattr(unwrapped(method), "__name__", type(method).__name__)
        raise ArgumentError(
            f"method is the function {name}{signature(method)}: pass a function of one argument, a Batch, or of two, "
            "the model and its layers, a name, or a class such as ValueZeroing."
        ) from error


def name_of(method: Any) -> str:
    """The name of what a user passes without one."""
    if isinstance(method, str):
        return method
    if isinstance(method, Method):
        return next((name for name, one in METHODS.items() if one is method), method.title)
    inner = unwrapped(method)
    return str(getattr(inner, "__name__", type(inner).__name__))


def given_methods(methods: Any) -> dict[str, Method]:
    """The methods that a user passes, by their names: anything that :func:`as_method` takes, a list or a mapping.

    None: the default methods.
    """
    if methods is None or isinstance(methods, str):
        return {name: as_method(name) for name in check_methods(methods)}
    single = isinstance(methods, Method) or callable(methods) or hasattr(methods, "attribute")
    if isinstance(methods, Mapping):
        pairs = list(methods.items())
    else:
        pairs = [(name_of(one), one) for one in ([methods] if single else methods)]
    check_methods([one for _, one in pairs if isinstance(one, str)] or (None if pairs else []))
    found: dict[str, Method] = {}
    for name, one in pairs:
        method = as_method(one)
        if method is not METHODS.get(name) and (name in found or name in METHODS):
            raise ArgumentError(
                f"methods has {name!r} twice, or it is a registered method: pass a mapping from new names to methods."
            )
        found[name] = method
    return found


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


def load_plugin(path: str | Path) -> None:
    """Runs a Python file that calls :func:`register_method` or :func:`~captum_vz.study.register_metric`.

    Raises:
        ArgumentError: There is no such file, or it fails. The message says at which line.
    """
    path = Path(path).absolute()
    if path.suffix != ".py" or not path.is_file():
        raise ArgumentError(f"plugin is {path.name}: expected a Python file, whose name ends with .py.")
    name = f"{PLUGIN}{path.stem}"
    while getattr(sys.modules.get(name), "__file__", str(path)) != str(path):  # a plugin of another folder
        name += "_"
    # Not imported: Python's cache takes a file for unchanged within the second, at the same length.
    sys.modules[name] = module = ModuleType(name)  # where `inspect` and `pickle` look for it
    module.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except Exception as error:
        lines = [place.lineno for place in extract_tb(error.__traceback__) if place.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise ArgumentError(f"{path.name}{where}: {type(error).__name__}: {error}") from error
