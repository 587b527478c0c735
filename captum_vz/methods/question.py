"""What is asked about the inputs of a model: a token's row, and a number of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.subjects import Subject

#: An index of the output of one example: `(class,)`, or `(token, class)`.
Index = tuple[int, ...]
#: Reads the explained number of each example from an output, `(batch,)`.
Reader = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Question:
    """What a method is asked about some inputs of a model. It says whose rows are scored, and what is explained.

    There is a row for each example of a batch, or there are several rows of one text.

    Attributes:
        inputs: What the model takes, by keyword.
        token: The position of the token whose row is scored, not negative. A list: one for each row.
        target: What methods explain that explain the output. For each row a class, or a whole index of its logit. Or a
            function that reads the explained number from an output. None: the class that the model predicts.
        foil: What is subtracted from it, for each row a class or an index. None: nothing.
        attention: "self", or "cross": rows of a decoder, whose sources are the tokens of its encoder.
        grows: Whether the rows are steps of a text that grows, such as a generated one. Each row then explains the text
            up to its token.
        row_by_row: Whether each row needs its own run of the model: positions depend on the length of the text.
        kept: What one method computes for the others: maps, and the model's prediction. Questions about the same inputs
            share it.
    """

    inputs: Mapping[str, Any]
    token: int | Sequence[int]
    target: Reader | Sequence[int | Index] | None = None
    foil: Sequence[int | Index] | None = None
    attention: Literal["self", "cross"] = "self"
    grows: bool = False
    row_by_row: bool = False
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def places(self) -> list[int]:
        """The position of each row's token."""
        return [self.token] if isinstance(self.token, int) else list(self.token)

    @cached_property
    def examples(self) -> int:
        """How many examples the inputs have."""
        return next(len(one) for one in self.inputs.values() if isinstance(one, Tensor) and one.dim())

    @property
    def is_several_of_one(self) -> bool:
        """Whether it asks for several rows of one example."""
        return self.examples == 1 and len(self.places) > 1

    @property
    def rows(self) -> list[int] | list[list[int]]:
        """The wanted rows as `token` of the attribution classes: for each example a row, or a list of rows."""
        return [self.places] if self.is_several_of_one else self.places

    def select(self, maps: Tensor) -> Tensor:
        """The rows `(rows, in)` of whole maps `(batch, out, in)`."""
        return maps[[0] * len(self.places) if self.examples == 1 else range(self.examples), self.places]

    def about(self, row: int, features: Tensor | None = None) -> tuple[Question, Tensor | None]:
        """The question about one row of several of one text, and the features of its tokens."""
        one = replace(
            self,
            token=[self.places[row]],
            target=self.target if self.target is None or callable(self.target) else [self.target[row]],
            foil=None if self.foil is None else [self.foil[row]],
        )
        if not self.grows:
            return one, features
        stop, of_decoder = self.places[row] + 1, self.attention == "cross"
        inputs = {
            name: x[:, :stop] if isinstance(x, Tensor) and (name.startswith("decoder_") or not of_decoder) else x
            for name, x in self.inputs.items()
        }
        cut = features if features is None or of_decoder else features[:, :stop]
        return replace(one, inputs=inputs, kept={}), cut

    def asked(self, subject: Subject) -> dict[str, Any]:
        """The target and the foil as arguments of `attribute`: a function, or indices of the logits, one for each row.

        Of classes, one run of the model shows where the output has them.
        """
        if callable(self.target):
            return {"target": self.target, "foil": None}
        of_tokens, best = False, None
        if self.target is None or not all(isinstance(one, tuple) for one in (*self.target, *(self.foil or ()))):
            of_tokens, best = self._prediction(subject)
        places: list[Index] = [(place,) if of_tokens else () for place in self.places]
        classes = self.target
        if classes is None:
            assert best is not None  # a target that is not given is predicted
            examples = [0] * len(places) if self.examples == 1 else range(len(places))
            classes = [int(best[(example, *place)]) for example, place in zip(examples, places, strict=True)]
        targets, foils = (
            [one if isinstance(one, tuple) else (*place, one) for place, one in zip(places, rows, strict=True)]
            for rows in (classes, [()] * len(places) if self.foil is None else self.foil)
        )
        if any(one == other for one, other in zip(targets, foils, strict=True)):
            raise ArgumentError(
                "foil is the class that is explained, so all scores would be 0: pass another foil.", "foil"
            )
        return {"target": targets, "foil": None if self.foil is None else foils}

    def _prediction(self, subject: Subject) -> tuple[bool, Tensor]:
        """Whether the logits have an axis of tokens, and the class that is predicted for each example or token."""
        key = "prediction", subject.forward
        if key not in self.kept:
            with torch.no_grad():
                output = subject.forward(**self.inputs)
            logits = getattr(output, "logits", None)
            if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
                remedy = "pass a model with a head."
                if hasattr(output, "start_logits"):
                    remedy = "use captum_vz.explain, which takes answers."
                name = type(subject.model).__name__
                raise UnsupportedLayerError(f"{name} gives no logits, but the method explains a logit: {remedy}")
            self.kept[key] = logits.ndim == 3, logits.argmax(-1).cpu()
        found: tuple[bool, Tensor] = self.kept[key]
        return found
