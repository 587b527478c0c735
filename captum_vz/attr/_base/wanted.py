"""The rows and groups that a method computes in one layer, and the map made from its scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from captum_vz._engine import AttentionSite
from captum_vz.attr._call.target import gather_rows
from captum_vz.functional import normalize_rows

PADDED_TARGET = "the target token of an example is padding, so its row is zero"


@dataclass(frozen=True)
class Wanted:
    """The rows and groups that a method computes in one layer.

    Attributes:
        site: The attention that is explained.
        rows: The positions of the output tokens whose scores are wanted, `(batch, row)`. None: all tokens.
        groups: The group of each source token, `(batch, in)`, numbered from 0. None: each token is its own group.
        max_groups: The largest number of groups changed at a time (`perturbations_per_eval`). None: as many as fit.
        end: The number of tokens in the inputs, because a model may append padding. None: all tokens of the layer.
        leaf: The leaf of the graph, in methods that need gradients. None: there is no graph.
    """

    site: AttentionSite
    rows: Tensor | None
    groups: Tensor | None
    max_groups: int | None = None
    end: int | None = None
    leaf: Tensor | None = None

    def pool(self, scores: Tensor) -> Tensor:
        """Scores `(batch, out, in)` as `(batch, row, group)`: the wanted rows, sums of groups, 0 for padding."""
        there = self.site.target_mask[:, :, None] & self.site.source_mask[:, None, :]
        return self.pool_sources(gather_rows(scores * there, self.rows))

    def pool_sources(self, scores: Tensor) -> Tensor:
        """Scores `(batch, row, in)` as `(batch, row, group)`: the sum over the sources of each group."""
        if self.groups is None:
            return scores
        pooled = scores.new_zeros(*scores.shape[:2], int(self.groups.max()) + 1)
        return pooled.scatter_add(2, self.groups[:, None, :].expand_as(scores), scores)

    def finish(self, scores: Tensor, normalize: bool) -> Tensor:
        """The map `(batch, row, in)` of scores `(batch, row, group)`."""
        self.site.layer.warnings.extend(self._zero_rows(scores))
        scores = (normalize_rows(scores) if normalize else scores).detach()
        if self.groups is not None:
            spread = scores.gather(2, self.groups[:, None, :].expand(-1, scores.shape[1], -1))
            scores = spread * self.site.source_mask[:, None, :]
        scores = scores[:, : self.end if self.rows is None else None, : self.end]
        return pad(scores, (self.site.dropped_sources, 0))

    def _zero_rows(self, scores: Tensor) -> list[str]:
        """Warnings about wanted rows that are padding, and about tokens whose rows are zero."""
        tokens, zero = self.site.target_mask, scores.sum(-1) == 0
        warnings = []
        if self.rows is not None:
            tokens = tokens.gather(1, self.rows)
            if (zero & ~tokens).any():
                warnings.append(PADDED_TARGET)
        count = int((zero & tokens).sum())
        if count:
            dtype = str(scores.dtype).removeprefix("torch.")
            lost = f" in {dtype}. If their values are tiny, run the model in float64 (model.double())"
            warnings.append(
                f"{count} rows of layer {self.site.layer.index} ({self.site.layer.name}) are zero: no source changes "
                f"these tokens{'' if dtype == 'float64' else lost}"
            )
        return warnings
