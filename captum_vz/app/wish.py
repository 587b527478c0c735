"""What a user asks about one input: which requests are refused, and which number of the output a row explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Final

from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.methods import DECIDING, DEEP, MAPS, Method
from captum_vz.subjects import Subject, heads

#: The methods that explain a label, and the part of a layer in it.
EFFECT, EFFECT_OF_LAYER = "value-zeroing-effect", "value-zeroing-effect-layer"
#: Tasks whose rows explain the state of a token, unless the user chooses a method, a target or a foil.
BY_MAPS: Final = (heads.MASKED, heads.CAUSAL, heads.SEQ2SEQ, heads.ENCODER)
#: Tasks whose prediction is of the whole input, so that no token chooses what is predicted.
OF_WHOLE: Final = (heads.SEQUENCE, heads.CHOICE, heads.ANSWER, heads.IMAGE, heads.AUDIO, heads.SENTENCE)
#: What a user passes as `token` for a row of each word.
EVERY_WORD = "*"
#: What a user passes as `words`.
GROUPS: Final = (False, True, "words", "clauses", "sentences")


@dataclass(frozen=True)
class Wish:
    """What a user asks for, except the model and the text. See :func:`captum_vz.explain` for the meaning of each."""

    method: Any = None
    target: int | str | None = None
    foil: int | str | None = None
    token: int | str | None = None
    layer: int | str | None = None
    words: bool | str = False
    window: Any = None

    def __post_init__(self) -> None:
        """Check the types."""
        if self.words not in GROUPS:
            raise ArgumentError(f"words is {self.words!r}: pass True for words, or 'clauses' or 'sentences'.", "words")
        for name in ("target", "foil", "token", "layer"):
            value, number = getattr(self, name), name == "layer"
            fits = isinstance(value, Integral if number else (Integral, str)) and not isinstance(value, bool)
            if value is not None and not fits and not (number and value == DECIDING):
                raise ArgumentError(
                    f"{name} is {value!r}, of type {type(value).__name__}: pass a whole number, "
                    f"{repr(DECIDING) if number else 'a string'} or None.",
                    name,
                )

    def asks_decision(self, subject: Subject) -> bool:
        """Whether the answer is what a next word rests on: the last of many layers mostly shows the first token."""
        is_open = self.method is None and self.window is None and self.layer in (None, DECIDING)
        return is_open and subject.task == heads.CAUSAL and subject.depth >= DEEP

    def asks_embedding(self, subject: Subject, text: Any) -> bool:
        """Whether a folder of a sentence encoder is asked about nothing but a text without a mask."""
        marks = {"[MASK]", getattr(subject.tokenizer, "mask_token", None) or "[MASK]"}
        return self == Wish(words=self.words) and isinstance(text, str) and not any(mark in text for mark in marks)

    def default_method(self, task: str) -> str:
        """The name of the method that explains a model of this task, unless the user chooses one."""
        if self.layer == DECIDING or (task in BY_MAPS and self.target is None and self.foil is None):
            return MAPS
        return EFFECT if self.layer is None else EFFECT_OF_LAYER

    def of_method(self, method: Method, task: str) -> Wish:
        """This wish for one of several methods, without what changes no score of this method."""
        idle: dict[str, Any] = dict.fromkeys(self.unused(task, method))
        return replace(self, layer=self.layer if self.has_layer(method) else None, **idle)

    def has_layer(self, method: Method) -> bool:
        """Whether this method has the layer that is asked for. A layer can decide if the method has its map alone."""
        if self.layer == DECIDING:
            return method.shows_layers
        return method.layered

    def unused(self, task: str, method: Method) -> list[str]:
        """The names of what is asked for, but changes no score of this method. A user's code may read all of it."""
        if method.is_foreign:
            return []
        decides = self.layer == DECIDING and self.has_layer(method)
        idle = [] if method.explains_output or decides else ["target", "foil"]
        idle += ["token"] if task in OF_WHOLE and method.is_signed else []
        return [name for name in idle if getattr(self, name) is not None]

    def numbers(self, number: Callable[[Any, str], int]) -> tuple[int | None, int | None]:
        """The numbers of the target and of the foil, by a function of what is asked for and its argument's name."""
        target = None if self.target is None else number(self.target, "target")
        return target, None if self.foil is None else number(self.foil, "foil")


@dataclass(frozen=True)
class Target:
    """What a row of an explanation explains.

    Attributes:
        name: A label, a word and its label, the start of an answer.
        token: The position of the token whose row methods with maps show.
        field: The tensor of the model's output that holds the explained number; empty for a model without a head.
        entry: The class in that tensor. None: the tensor has one number for each token.
        foil: The class whose number is subtracted.
        of_token: Whether the tensor has an axis of tokens.
        read: A function that reads the explained number from an output, `(batch,)`. None: it is in the tensor.
        value: The explained number. None: nobody asked the model.
    """

    name: str
    token: int
    field: str = "logits"
    entry: int | None = None
    foil: int | None = None
    of_token: bool = True
    read: Callable[[Any], Tensor] | None = None
    value: float | None = None

    def index(self, place: int, entry: int | None) -> tuple[int, ...]:
        """The index of a number in one example's part of the tensor, for the token at `place`."""
        own = () if entry is None else (entry,)
        return (place, *own) if self.of_token else own

    def reader(self, place: int) -> Callable[[Any], Tensor]:
        """A function that reads the explained number from an output, `(batch,)`."""

        def of_field(output: Any) -> Tensor:
            numbers = getattr(output, self.field)
            found: Tensor = numbers[(slice(None), *self.index(place, self.entry))]
            return found if self.foil is None else found - numbers[(slice(None), *self.index(place, self.foil))]

        return of_field if self.read is None else self.read

    def asked(self, place: int) -> dict[str, Any]:
        """The target and the foil of a method's question, for the token at `place`."""
        if self.field == "logits" and self.read is None:
            foil = None if self.foil is None else [self.index(place, self.foil)]
            return {"target": [self.index(place, self.entry)], "foil": foil}
        return {"target": self.reader(place) if self.field else None, "foil": None}
