"""The variants of faithfulness to blanking out: how a token is removed, and how its effect is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from captum_vz.metrics import spearman
from captum_vz.study.scoring.metrics.batch import EvaluationBatch, Over


@dataclass(frozen=True)
class Variant:
    """One way to blank out tokens, and to read their effects.

    Attributes:
        removal: "unk", "mask" or "delete".
        over: What the probabilities sum to 1 over: the two "forms", or the "vocabulary".
        by_size: Whether only the size of an effect counts, and not whether the probability falls or rises.
    """

    removal: str
    over: Over = "forms"
    by_size: bool = False

    @property
    def name(self) -> str:
        """The name of its metric."""
        return f"blank_out_{self.removal}_{self.over}{'_size' if self.by_size else ''}"

    def __str__(self) -> str:
        """In words, such as "MASK, vocabulary, size"."""
        how = "deletion" if self.removal == "delete" else self.removal.upper()
        return f"{how}, {self.over}{', size' if self.by_size else ''}"

    def values(self, batch: EvaluationBatch, rows: Tensor) -> Tensor:
        """Spearman's correlation of rows with the effects."""
        return blank_out_values(batch, rows, batch.effects_of(self.removal, self.over), self.by_size)


OVERS: Final[tuple[Over, ...]] = ("forms", "vocabulary")

#: All ways to blank out tokens.
VARIANTS: Final = tuple(
    Variant(removal, over, by_size)
    for removal in ("unk", "mask", "delete")
    for over in OVERS
    for by_size in (False, True)
)


def blank_out_values(batch: EvaluationBatch, rows: Tensor, effects: Tensor, by_size: bool = False) -> Tensor:
    """Spearman's correlation of rows of scores with effects, over the content tokens, `(rows, batch)`."""
    each, effects = len(rows), effects.abs() if by_size else effects
    values = spearman(rows.flatten(0, 1), effects.repeat(each, 1), batch.content.repeat(each, 1))
    return values.view(each, -1)
