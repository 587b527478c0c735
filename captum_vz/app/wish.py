"""What a user asks about one input, and which requests are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Final

from captum_vz.errors import ArgumentError
from captum_vz.methods import Method
from captum_vz.subjects.heads import (
    ANSWER,
    AUDIO,
    CAUSAL,
    CHOICE,
    ENCODER,
    IMAGE,
    MASKED,
    SENTENCE,
    SEQ2SEQ,
    SEQUENCE,
)

#: The methods that explain a model, unless the user chooses others.
MAPS, EFFECT, EFFECT_OF_LAYER = "value-zeroing", "value-zeroing-effect", "value-zeroing-effect-layer"
#: Tasks whose rows explain the state of a token, unless the user chooses a method, a target or a foil.
BY_MAPS: Final = (MASKED, CAUSAL, SEQ2SEQ, ENCODER)
#: Tasks whose prediction is of the whole input, so that no token chooses what is predicted.
OF_WHOLE: Final = (SEQUENCE, CHOICE, ANSWER, IMAGE, AUDIO, SENTENCE)


@dataclass(frozen=True)
class Wish:
    """What a user asks for, except the model and the text. See :func:`captum_vz.explain` for the meaning of each.

    Raises:
        ArgumentError: An argument is of another type.
    """

    method: Any = None
    target: int | str | None = None
    foil: int | str | None = None
    token: int | str | None = None
    layer: int | None = None
    words: bool = False
    window: Any = None
    stack: str | None = None

    def __post_init__(self) -> None:
        """Check the types."""
        for name in ("target", "foil", "token", "layer"):
            value, number = getattr(self, name), name == "layer"
            fits = isinstance(value, Integral if number else (Integral, str)) and not isinstance(value, bool)
            if value is not None and not fits:
                raise ArgumentError(
                    f"{name} is {value!r}, of type {type(value).__name__}: pass a whole number"
                    f"{'' if number else ', a string'} or None.",
                    name,
                )

    def default_method(self, task: str) -> str:
        """The name of the method that explains a model of this task, unless the user chooses one."""
        if task in BY_MAPS and self.target is None and self.foil is None:
            return MAPS
        return EFFECT if self.layer is None else EFFECT_OF_LAYER

    def of_method(self, method: Method, task: str) -> Wish:
        """This wish for one of several methods, without what changes no score of this method."""
        idle: dict[str, Any] = dict.fromkeys(self.unused(task, method))
        return replace(self, layer=self.layer if method.layered else None, **idle)

    def unused(self, task: str, method: Method) -> list[str]:
        """The names of what is asked for, but changes no score of this method. A user's code may read all of it."""
        if method.is_foreign:
            return []
        idle = [] if method.explains_output else ["target", "foil"]
        idle += ["token"] if task in OF_WHOLE and method.is_signed else []
        return [name for name in idle if getattr(self, name) is not None]

    def check(self, task: str, name: str, method: Method) -> None:
        """Refuse what changes no score of the method with this name."""
        for one in self.unused(task, method):
            number, row = "a number of the output", "the row of a token"
            if one == "token":
                number, row = row, number
            raise ArgumentError(
                f"{one} is {getattr(self, one)!r}, which chooses {number}, but {name} explains {row}: "
                f"leave it out, or choose another method, such as {MAPS if one == 'token' else EFFECT}.",
                one,
            )


def check_texts(text: Any, pair: Any) -> None:
    """Refuse what is no text in the place of one. Several answers are a list of texts."""
    if not isinstance(text, (str, Mapping)):
        raise ArgumentError(f"the text is of type {type(text).__name__}: pass a string.", "text")
    answers = pair if isinstance(pair, Sequence) and not isinstance(pair, (str, bytes)) else [pair]
    for one in answers:
        if one is not None and not isinstance(one, str):
            raise ArgumentError(f"text_pair has an object of type {type(one).__name__}: pass a string.", "text_pair")
