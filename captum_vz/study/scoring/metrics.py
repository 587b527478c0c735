"""The list of metrics, and the batch of examples that they evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from captum_vz.metrics import (
    MaskedSentences,
    Prediction,
    blank_out,
    comprehensiveness,
    content_tokens,
    cue_average_precision,
    cue_dot_product,
    spearman,
    sufficiency,
)
from captum_vz.study.examples.encoding import Encoded
from captum_vz.study.methods import chosen_names


@dataclass(frozen=True)
class Metric:
    """One row of the registry.

    Attributes:
        title: Its name in a figure.
        values: Its values `(rows, batch)` for rows of scores `(rows, batch, tokens)`.
        needs_cue: Whether it needs examples with a cue.
        needs_forms: Whether it needs the probabilities of the right and the wrong form.
    """

    title: str
    values: Callable[[EvaluationBatch, Tensor], Tensor]
    needs_cue: bool = False
    needs_forms: bool = False


class EvaluationBatch:
    """A batch of examples with what the metrics need: cues, content tokens, and the effects of blanking out.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        inputs: The padded batch.
        examples: The examples in it.
        content_only: Whether cue alignment is over the content tokens only.
        removal: The token in the place of a removed token, "unk" or "mask"; or "delete".
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        inputs: dict[str, Tensor],
        examples: Sequence[Encoded],
        content_only: bool,
        removal: str,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.inputs = inputs
        self.examples = examples
        self.content_only = content_only
        self.removal = removal

    @cached_property
    def cues(self) -> Tensor:
        """Which tokens are cues, booleans `(batch, tokens)`."""
        cues = torch.zeros(self.inputs["input_ids"].shape, dtype=torch.bool)
        for row, example in zip(cues, self.examples, strict=True):
            row[list(example.cue)] = True
        return cues

    @cached_property
    def content(self) -> Tensor:
        """Booleans `(batch, tokens)`: all except special tokens, padding and the target."""
        names = ("cls", "sep", "bos", "eos", "pad")
        special = [getattr(self.tokenizer, f"{name}_token_id", None) for name in names]
        content = content_tokens(self.inputs["input_ids"].cpu(), special) & self.attended
        content[torch.arange(len(self.examples)), [example.target for example in self.examples]] = False
        return content

    @property
    def attended(self) -> Tensor:
        """Booleans `(batch, tokens)`: all except padding."""
        return self.inputs["attention_mask"].cpu().bool()

    @cached_property
    def prediction(self) -> Prediction:
        """The model's choice between the two forms."""
        sentences = MaskedSentences(
            ids=self.inputs["input_ids"],
            mask=self.inputs["attention_mask"],
            target=[example.target for example in self.examples],
            content=self.content,
            forms=torch.tensor([example.forms for example in self.examples]),
        )
        return Prediction(self.model, sentences, removal_of(self.tokenizer, self.removal))

    @cached_property
    def effects(self) -> Tensor:
        """The effect of blanking out each token, `(batch, tokens)`."""
        return blank_out(self.prediction)


def _alignment(measure: Callable[..., Tensor], batch: EvaluationBatch, rows: Tensor) -> Tensor:
    keep = batch.content if batch.content_only else batch.attended
    each = len(rows)
    values = measure(rows.flatten(0, 1), batch.cues.repeat(each, 1), keep.repeat(each, 1))
    return values.view(each, -1)


def _blank_out(batch: EvaluationBatch, rows: Tensor) -> Tensor:
    each = len(rows)
    values = spearman(rows.flatten(0, 1), batch.effects.repeat(each, 1), batch.content.repeat(each, 1))
    return values.view(each, -1)


def _eraser(measure: Callable[[Prediction, Tensor], Tensor], batch: EvaluationBatch, rows: Tensor) -> Tensor:
    return torch.stack([measure(batch.prediction, row).mean(-1) for row in rows])


#: All metrics by their names. To add a metric, add one row.
METRICS: Final[dict[str, Metric]] = {
    "cue_dot": Metric("cue alignment, dot product", partial(_alignment, cue_dot_product), needs_cue=True),
    "cue_ap": Metric("cue alignment, average precision", partial(_alignment, cue_average_precision), needs_cue=True),
    "blank_out": Metric("Spearman with blank-out", _blank_out, needs_forms=True),
    "comprehensiveness": Metric("comprehensiveness (AOPC)", partial(_eraser, comprehensiveness), needs_forms=True),
    "sufficiency": Metric("sufficiency (AOPC)", partial(_eraser, sufficiency), needs_forms=True),
}

#: The metrics of `metrics=None`.
DEFAULT_METRICS: Final = ("cue_dot", "cue_ap", "blank_out")

_REMOVALS: Final = ("unk", "mask", "delete")


def check_metrics(metrics: Iterable[str] | None) -> tuple[str, ...]:
    """The names, in the order given; None: cue alignment and blank-out.

    Raises:
        ValueError: A name is not in :data:`METRICS`, or there is no name.
    """
    return chosen_names("metrics", metrics, METRICS, DEFAULT_METRICS)


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
