"""The metrics by their names, and what they need to know of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from captum_vz.metrics import (
    Prediction,
    blank_out,
    comprehensiveness,
    content_tokens,
    cue_average_precision,
    cue_dot_product,
    spearman,
    sufficiency,
)
from captum_vz.study.encoding import Encoded


@dataclass(frozen=True)
class Metric:
    """One row of the registry.

    Attributes:
        title: What it is called in a figure.
        values: Its values `(rows, batch)` for rows of scores `(rows, batch, tokens)`.
        needs_cue: Whether it is about the cue.
        needs_forms: Whether it asks the model for the right and the wrong form.
    """

    title: str
    values: Callable[[Evidence, Tensor], Tensor]
    needs_cue: bool = False
    needs_forms: bool = False


class Evidence:
    """A batch as the metrics see it.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        inputs: The padded batch.
        examples: The examples in it.
        content_only: Whether cue alignment is over the content tokens only.
        removal: What becomes of a token that is removed: "unk" or "mask" takes its place, or it is "delete"d.
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
        """Booleans `(batch, tokens)`."""
        cues = torch.zeros(self.inputs["input_ids"].shape, dtype=torch.bool)
        for row, example in zip(cues, self.examples, strict=True):
            row[list(example.cue)] = True
        return cues

    @cached_property
    def content(self) -> Tensor:
        """Booleans `(batch, tokens)`: neither special tokens, nor padding, nor the target."""
        names = ("cls", "sep", "bos", "eos", "pad")
        special = [getattr(self.tokenizer, f"{name}_token_id", None) for name in names]
        content = content_tokens(self.inputs["input_ids"].cpu(), special) & self.attended
        content[torch.arange(len(self.examples)), [example.target for example in self.examples]] = False
        return content

    @property
    def attended(self) -> Tensor:
        """Booleans `(batch, tokens)`: all but padding."""
        return self.inputs["attention_mask"].cpu().bool()

    @cached_property
    def prediction(self) -> Prediction:
        """What the model chooses of the two forms."""
        return Prediction(
            self.model,
            self.inputs["input_ids"],
            [example.target for example in self.examples],
            torch.tensor([example.forms for example in self.examples]),
            self.content,
            removal_of(self.tokenizer, self.removal),
            attention_mask=self.inputs["attention_mask"],
        )

    @cached_property
    def effects(self) -> Tensor:
        """Of each token, when it is blanked out, `(batch, tokens)`."""
        return blank_out(self.prediction)


def _alignment(measure: Callable[..., Tensor], evidence: Evidence, rows: Tensor) -> Tensor:
    keep = evidence.content if evidence.content_only else evidence.attended
    each = len(rows)
    values = measure(rows.flatten(0, 1), evidence.cues.repeat(each, 1), keep.repeat(each, 1))
    return values.view(each, -1)


def _blank_out(evidence: Evidence, rows: Tensor) -> Tensor:
    each = len(rows)
    values = spearman(rows.flatten(0, 1), evidence.effects.repeat(each, 1), evidence.content.repeat(each, 1))
    return values.view(each, -1)


def _eraser(measure: Callable[[Prediction, Tensor], Tensor], evidence: Evidence, rows: Tensor) -> Tensor:
    return torch.stack([measure(evidence.prediction, row).mean(-1) for row in rows])


#: All metrics by their names. A new one is a new row.
METRICS: Final[dict[str, Metric]] = {
    "cue_dot": Metric("cue alignment, dot product", partial(_alignment, cue_dot_product), needs_cue=True),
    "cue_ap": Metric("cue alignment, average precision", partial(_alignment, cue_average_precision), needs_cue=True),
    "blank_out": Metric("Spearman with blank-out", _blank_out, needs_forms=True),
    "comprehensiveness": Metric("comprehensiveness (AOPC)", partial(_eraser, comprehensiveness), needs_forms=True),
    "sufficiency": Metric("sufficiency (AOPC)", partial(_eraser, sufficiency), needs_forms=True),
}

#: What is judged if nothing else is said.
DEFAULT_METRICS: Final = ("cue_dot", "cue_ap", "blank_out")

_REMOVALS: Final = ("unk", "mask", "delete")


def check_metrics(metrics: Iterable[str] | None) -> tuple[str, ...]:
    """The names, in the order given; None: cue alignment and blank-out.

    Raises:
        ValueError: A name that is none of :data:`METRICS`, or none at all.
    """
    if metrics is None:
        return DEFAULT_METRICS
    names = (metrics,) if isinstance(metrics, str) else tuple(dict.fromkeys(metrics))
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        raise ValueError(f"metrics is {list(names)}: pass some of {', '.join(METRICS)}.")
    return names


def check_removal(removal: str) -> None:
    """Refuse what is no way of removing a token.

    Raises:
        ValueError: Another word.
    """
    if removal not in _REMOVALS:
        raise ValueError(f"removal is {removal!r}: pass one of {', '.join(map(repr, _REMOVALS))}.")


def removal_of(tokenizer: Any, removal: str) -> int | Literal["delete"]:
    """The id that takes the place of a removed token, or "delete".

    Raises:
        ValueError: Another word, or a token that the tokenizer does not have.
    """
    check_removal(removal)
    if removal == "delete":
        return "delete"
    number = getattr(tokenizer, f"{removal}_token_id", None)
    if number is None:
        raise ValueError(f"removal is {removal!r}, but the tokenizer has no such token: pass 'delete'.")
    return int(number)
