"""The maps of one pass, and whether its layers ran once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import AttentionSite, OtherMixing


@dataclass(frozen=True)
class MapRun:
    """The maps of one pass.

    Attributes:
        maps: (index of the layer, its map), in the order in which the layers ran.
        tokens: For each layer that ran, how many output tokens it has. Empty if the model was not run.
        output: What `forward_func` returned.
        mixing: Where tokens are mixed by anything but the attention of the layers; None: it was not looked for.
        restart: (layer, layer) where the layers began a second run; None: they ran once.
        there: Which output tokens of the first layer that ran are not padding, `(batch, out)`; None: not known.
    """

    maps: list[tuple[int, Tensor]]
    tokens: dict[int, int]
    output: Any = None
    mixing: OtherMixing | None = None
    restart: tuple[int, int] | None = None
    there: Tensor | None = None


class RunOrder:
    """Whether a stack of layers begins a second run in one pass."""

    def __init__(self) -> None:
        self.restart: tuple[int, int] | None = None
        self.there: Tensor | None = None
        self._before: tuple[int, Tensor] | None = None

    def note(self, site: AttentionSite, end: int | None) -> None:
        """A layer whose index is not larger than that of the layer before continues only what that layer returned."""
        before, layer = self._before, site.layer
        if getattr(layer.layer, "_is_replica", False):
            return  # replicas run side by side
        self.there = site.target_mask[:, :end] if self.there is None else self.there
        if before is not None and layer.index <= before[0] and not layer.is_given(before[1]):
            self.restart = self.restart or (before[0], layer.index)
        # A copy, because models write into their tensors.
        self._before = layer.index, layer.first_output.clone()


def mark_unreached(scores: Tensor, there: Tensor) -> Tensor:
    """A map in which rows of zeros are padding only: other such tokens get a number on the diagonal that adds nothing.

    A gradient reaches few tokens of the last layer; the others keep themselves by the residual connection.
    """
    unreached = there & (scores == 0).all(-1)
    return scores + torch.diag_embed(unreached.to(scores) * torch.finfo(scores.dtype).tiny)
