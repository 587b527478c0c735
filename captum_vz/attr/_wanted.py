"""What a method is asked for in one layer, and what becomes of its scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from captum_vz._engine import Ablation, AttentionSite
from captum_vz.attr._target import gather_rows
from captum_vz.functional import normalize_rows

PADDED_TARGET = "the target token of an example is padding, its row stays zero"


@dataclass(frozen=True)
class Wanted:
    """What a method is asked for in one layer.

    Attributes:
        site: The attention that is explained.
        rows: The positions of the output tokens whose scores are wanted, `(batch, row)`; None: all.
        groups: The group of each source token, `(batch, in)`, counted from 0; None: each is a group of its own.
        max_groups: How many groups may be changed at a time (`perturbations_per_eval`); None: as many as fit.
        end: How many tokens the inputs have; None: all that the layer has. A model may append padding to its inputs.
        leaf: The tensor that gradients go down to, in methods that need a graph; None: there is no graph.
    """

    site: AttentionSite
    rows: Tensor | None
    groups: Tensor | None
    max_groups: int | None = None
    end: int | None = None
    leaf: Tensor | None = None

    def pool(self, scores: Tensor) -> Tensor:
        """Scores `(batch, out, in)` as `(batch, row, group)`: the wanted rows, no padding, groups added up."""
        there = self.site.target_mask[:, :, None] & self.site.source_mask[:, None, :]
        return self.pool_sources(gather_rows(scores * there, self.rows))

    def pool_sources(self, scores: Tensor) -> Tensor:
        """Scores `(batch, row, in)` as `(batch, row, group)`: the sources of each group added up."""
        if self.groups is None:
            return scores
        pooled = scores.new_zeros(*scores.shape[:2], int(self.groups.max()) + 1)
        return pooled.scatter_add(2, self.groups[:, None, :].expand_as(scores), scores)

    def ablation(self, heads: tuple[int, ...] | None = None, bfloat16_changes: bool = False) -> Ablation:
        """What to zero in a replay of the layer: each group for each wanted row, in these heads (None: all)."""
        return Ablation(self.rows, self.groups, heads, self.max_groups, bfloat16_changes)

    def finish(self, scores: Tensor, normalize: bool) -> Tensor:
        """The map `(batch, row, in)` of scores `(batch, row, group)`."""
        self.site.layer.warnings.extend(self._zero_rows(scores))
        scores = (normalize_rows(scores) if normalize else scores).detach()
        if self.groups is not None:
            spread = scores.gather(2, self.groups[:, None, :].expand(-1, scores.shape[1], -1))
            scores = spread * self.site.source_mask[:, None, :]
        return scores[:, : self.end if self.rows is None else None, : self.end]

    def _zero_rows(self, scores: Tensor) -> list[str]:
        """What to warn of: wanted rows that are padding, and rows of tokens that are zero."""
        tokens, zero = self.site.target_mask, scores.sum(-1) == 0
        warnings = []
        if self.rows is not None:
            tokens = tokens.gather(1, self.rows)
            if (zero & ~tokens).any():
                warnings.append(PADDED_TARGET)
        count = int((zero & tokens).sum())
        if count:
            warnings.append(
                f"{count} rows of layer {self.site.layer.index} ({self.site.layer.name}) are zero: no source changes "
                "these tokens"
            )
        return warnings
