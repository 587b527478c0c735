"""Methods of a user: functions, objects with `attribute`, and functions that build such objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, isclass, signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_vz import TokenAttribution
from captum_vz.attr._call.layers import is_captums, required, unwrapped
from captum_vz.errors import ArgumentError
from captum_vz.methods.method import Method, WrongScoresError, added, check_model
from captum_vz.methods.question import Question
from captum_vz.subjects import Subject


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
        targets, foils = (_classes(one) for one in (question.target, question.foil))
        run, layers = (subject.forward, subject.tokenizer), list(subject.layers)
        return cls(*run, layers, inputs, list(question.places), targets, foils, (subject, question))

    def scores(self, method: Method) -> Tensor:
        """The scores of another method for the batch, `(layers, batch, tokens)`, raw and with their signs."""
        return method.scores(*self._asked)


def _classes(decided: Any) -> list[int] | None:
    if decided is None or callable(decided):
        return None
    return [one[-1] if isinstance(one, tuple) else one for one in decided]


@dataclass(frozen=True, eq=False)
class ForeignMethod(Method):
    """The base of methods whose scores come from code of a user. They may have any form, which is checked.

    Attributes:
        in_layers: Whether there is a tensor for each layer.
    """

    is_foreign = True

    in_layers: bool = field(default=False, kw_only=True)

    @property
    def layered(self) -> bool:
        """As the user says."""
        return self.in_layers

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The scores, those of a feature added up."""
        found = self.found(subject, question)
        ids = question.inputs.get("input_ids")
        rows = found if ids is None else checked(found, tuple(ids.shape), self.layered)
        return [added(one, features) for one in rows]

    def found(self, subject: Subject, question: Question) -> Any:
        """What the user's code returns."""
        raise NotImplementedError


def checked(found: Any, shape: tuple[int, ...], layered: bool) -> list[Tensor]:
    """The scores of a user's method in float64: one tensor `(rows, tokens)`, or one for each layer.

    Raises:
        WrongScoresError: It is something else.
    """
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
            came = (
                f"{one.shape} of {one.dtype}"
                if isinstance(one, np.ndarray)
                else f"an object of type {type(one).__name__}"
            )
            raise WrongScoresError(f"the method returned {came}; {expected}.") from error
        if row.shape != shape or row.is_complex() or row.dtype == torch.bool:
            raise WrongScoresError(f"the method returned {tuple(row.shape)} of {row.dtype}; {expected}.")
        rows.append(row.double())
    return rows


@dataclass(frozen=True, eq=False)
class FunctionMethod(ForeignMethod):
    """A function of a :class:`Batch`.

    Attributes:
        function: Returns scores `(batch, tokens)`, as a tensor, an array or lists.
    """

    function: Callable[..., Any]

    def found(self, subject: Subject, question: Question) -> Any:
        """What the function returns."""
        return self.function(Batch.of(subject, question), **self.options)


@dataclass(frozen=True, eq=False)
class ObjectMethod(ForeignMethod):
    """An object with `attribute`. It gets the inputs and, by the names of its arguments, `token`, `target` and `foil`.

    Attributes:
        kind: The object, or its class.
    """

    kind: Any

    @property
    def explains_output(self) -> bool:
        """Whether it takes a target."""
        return "target" in signature(self.kind.attribute).parameters

    def found(self, subject: Subject, question: Question) -> Any:
        """What its `attribute` returns."""
        made, batch = self.kind, Batch.of(subject, question)
        if isclass(unwrapped(made)):
            made = built(made, subject)
        check_model(made, subject)
        options: dict[str, Any] = {"token": batch.token}
        if self.explains_output:
            decision = question.decision(subject)
            options |= {"target": decision.target, "foil": decision.foil}
        accepted = signature(made.attribute).parameters
        if not is_captums(type(made)):
            return made.attribute(batch.inputs, **_named(options, accepted), **self.options)
        mask = batch.inputs.get("attention_mask")
        options["additional_forward_args"] = None if mask is None else (mask,)
        try:
            found = made.attribute(batch.inputs["input_ids"], **_named(options, accepted), **self.options)
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"the {type(made).__name__} of Captum fails on token ids ({error}). Pass its class, which is made on "
                "the embeddings, or make the object of a function of token ids that returns all logits of the model."
            ) from error
        found = found[0] if isinstance(found, tuple) and len(found) == 1 else found
        return found.sum(-1) if isinstance(found, Tensor) and found.ndim == 3 else found


def _named(options: Mapping[str, Any], accepted: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in accepted}


@dataclass(frozen=True, eq=False)
class BuiltMethod(Method):
    """A function of the model and its layers that builds the method.

    Attributes:
        build: The function.
        as_method: Makes a method of what the function returns.
    """

    build: Callable[..., Any]
    as_method: Callable[[Any], Method]

    def of(self, subject: Subject) -> Method:
        """The method for this model."""
        return self.as_method(built(self.build, subject))

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The rows of the method for this model."""
        return self.of(subject).rows(subject, question, features)


def built(kind: Callable[..., Any], subject: Subject) -> Any:
    """The object of a class, or of a function that builds it: with the model, its layers and its tokenizer.

    Raises:
        ArgumentError: It is no object with `attribute`.
    """
    inner: Any = unwrapped(kind)
    of_layers = not (isclass(inner) and issubclass(inner, TokenAttribution))
    # `layer` may be left out, but the layers of the subject are known.
    count = 2 if of_layers and "layer" in signature(kind).parameters else len(required(kind))
    given = [subject.forward, list(subject.layers)][:count]
    needs = signature(kind).parameters.get("tokenizer")
    is_missing = needs is not None and needs.kind is Parameter.KEYWORD_ONLY and needs.default is Parameter.empty
    made = kind(*given, **({"tokenizer": subject.tokenizer} if is_missing else {}))
    if not callable(getattr(made, "attribute", None)):
        raise ArgumentError(f"method returned a {type(made).__name__}: expected an object with 'attribute'.")
    return made
