"""The batch of examples that metrics evaluate, and the ways to remove a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, Literal

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics import Bounds, MaskedSentences, Prediction, blank_out
from captum_vz.study.examples import Example
from captum_vz.study.examples.encoding import Encoded, pad
from captum_vz.study.scoring.rows import Row

#: What probabilities sum to 1 over.
Over = Literal["forms", "vocabulary"]

_REMOVALS: Final = ("unk", "mask", "delete")


class EvaluationBatch:
    """A batch of examples with what the metrics need: cues, content tokens, and the effects of blanking out.

    Attributes:
        method: The name of the method whose rows are evaluated.
        kept: What metrics of one method keep for the next method.

    Args:
        examples: The examples.
        rows: A row of scores of each example, with its `target`, its `cue` and its `content`.
        encoded: The examples as tokens, if the metrics run the model; otherwise empty.
        load: Gives the model and its tokenizer.
        content_only: Whether cue alignment is over the content tokens only.
        removal: The token in the place of a removed token, "unk" or "mask"; or "delete".
        score: Gives rows of scores: of a method by its name, for examples, with a changed copy of the model.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        rows: Sequence[Row],
        encoded: Sequence[Encoded],
        load: Callable[[], tuple[Any, Any]],
        content_only: bool,
        removal: str,
        score: Callable[[str, Sequence[Example], Any], Sequence[Row]],
    ) -> None:
        self.examples = examples
        self.encoded = encoded
        self.content_only = content_only
        self.removal = removal
        self.method = ""
        self.kept: dict[Any, Any] = {}
        self._rows = rows
        self._load = load
        self._score = score
        self._predictions: dict[str, Prediction] = {}
        self._effects: dict[tuple[str, str], Tensor] = {}
        self._bounds: dict[Any, Bounds] = {}

    @property
    def model(self) -> Any:
        """The model."""
        return self._load()[0]

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._load()[1]

    # Tensors are made at each use, so that a metric that changes them harms no other one.

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The padded batch, on the model's device. Only for metrics that run the model."""
        return pad(self.tokenizer, self.encoded, self.model.device)

    def rows_of(self, changed: Any) -> Tensor:
        """The rows of the method for a changed copy of the model, `(rows, batch, tokens)`. NaN where there are none.

        Raises:
            ArgumentError: The method fails with this copy for all examples.
        """
        found: dict[str, list[Row]] = {example.id: [] for example in self.examples}
        rows = self._score(self.method, self.examples, changed)
        for row in rows:
            if row["skipped"] is None:
                found[row["example"]].append(row)
        if not any(found.values()):
            raise ArgumentError(f"{self.method} fails with a changed copy of the model: {rows[0]['skipped']}")
        return stacked(list(found.values()), torch.full(self.attended.shape, torch.nan))

    @property
    def targets(self) -> list[int]:
        """The position of each example's target."""
        return [row["target"] for row in self._rows]

    @property
    def cues(self) -> Tensor:
        """Which tokens are cues, booleans `(batch, tokens)`."""
        return self._at("cue")

    @property
    def content(self) -> Tensor:
        """Booleans `(batch, tokens)`: all except special tokens, padding and the target."""
        return self._at("content")

    @property
    def attended(self) -> Tensor:
        """Booleans `(batch, tokens)`: all except padding."""
        counts = torch.tensor([len(row["scores"]) for row in self._rows])
        return torch.arange(int(counts.max())) < counts[:, None]

    def _at(self, name: str) -> Tensor:
        """Booleans `(batch, tokens)`: the positions in a column of the rows."""
        found = torch.zeros_like(self.attended)
        for one, row in zip(found, self._rows, strict=True):
            one[list(row[name])] = True
        return found

    @property
    def prediction(self) -> Prediction:
        """The model's choice between the two forms, with tokens removed as the study says."""
        return self.prediction_of(self.removal)

    def prediction_of(self, removal: str, over: Over = "forms") -> Prediction:
        """The model's prediction, with tokens removed in this way. What it computes is kept for all metrics.

        Args:
            removal: "unk", "mask" or "delete".
            over: What the probabilities sum to 1 over: the two "forms", or the "vocabulary".
        """
        if removal not in self._predictions:
            self._predictions[removal] = Prediction(self.model, self._sentences, removal_of(self.tokenizer, removal))
        return self._predictions[removal].among(over)

    @cached_property
    def _sentences(self) -> MaskedSentences:
        inputs = self.inputs
        return MaskedSentences(
            ids=inputs["input_ids"],
            mask=inputs["attention_mask"],
            target=self.targets,
            content=self.content,
            forms=torch.tensor([one.forms for one in self.encoded]),
        )

    @property
    def effects(self) -> Tensor:
        """The effect of blanking out each token, `(batch, tokens)`."""
        return self.effects_of(self.removal)

    def effects_of(self, removal: str, over: Over = "forms") -> Tensor:
        """The effect of blanking out each token in this way, `(batch, tokens)`, see :meth:`prediction_of`."""
        if (removal, over) not in self._effects:
            self._effects[removal, over] = blank_out(self.prediction_of(removal, over))
        return self._effects[removal, over].clone()

    def bounds(self, of: Callable[[Prediction], Bounds]) -> Bounds:
        """What the best and the worst order of the tokens give, such as those of :func:`deletion_bounds`."""
        if of not in self._bounds:
            self._bounds[of] = of(self.prediction)
        return self._bounds[of]


def stacked(rows: Sequence[Sequence[Row]], missing: Tensor) -> Tensor:
    """Scores `(rows, batch, tokens)` of rows for each example, in float64.

    Args:
        rows: The rows of each example.
        missing: The scores of an example without rows, `(batch, tokens)`.
    """
    found = missing.double().expand(max(map(len, rows)), -1, -1).clone()
    for place, of_example in enumerate(rows):
        for number, row in enumerate(of_example):
            found[number, place] = 0
            found[number, place, : len(row["scores"])] = torch.tensor(row["scores"], dtype=torch.float64)
    return found


def check_removal(removal: str) -> None:
    """Check the name of a way to remove a token.

    Raises:
        ValueError: The name is unknown.
    """
    if removal not in _REMOVALS:
        raise ValueError(f"removal is {removal!r}: pass one of {', '.join(map(repr, _REMOVALS))}.")


def removal_of(tokenizer: Any, removal: str) -> int | Literal["delete"]:
    """The id in the place of a removed token, or "delete".

    Raises:
        ValueError: The name is unknown, or the tokenizer does not have the token.
    """
    check_removal(removal)
    if removal == "delete":
        return "delete"
    number = getattr(tokenizer, f"{removal}_token_id", None)
    if number is None:
        raise ValueError(f"removal is {removal!r}, but the tokenizer has no such token: pass 'delete'.")
    return int(number)
