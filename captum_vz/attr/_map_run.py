"""The maps of one forward pass, and whether its layers ran once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import AttentionSite, OtherMixing


@dataclass(frozen=True)
class MapRun:
    """The maps of one forward pass.

    Attributes:
        maps: (index of the layer, its map), in the order in which the layers ran.
        tokens: The number of output tokens of each layer that ran. Empty if the model was not run.
        output: The output of `forward_func`.
        mixing: The places where something other than the layers' attention mixes tokens. None: not searched.
        restart: The last layer of the first run and the first layer of the second run. None: the layers ran once.
        there: Whether each output token of the first layer is not padding, `(batch, out)`. None: not known.
    """

    maps: list[tuple[int, Tensor]]
    tokens: dict[int, int]
    output: Any = None
    mixing: OtherMixing | None = None
    restart: tuple[int, int] | None = None
    there: Tensor | None = None


class RunOrder:
    """Detects whether a stack of layers begins a second run in one forward pass."""

    def __init__(self) -> None:
        self.restart: tuple[int, int] | None = None
        self.there: Tensor | None = None
        self._before: tuple[int, Tensor] | None = None

    def note(self, site: AttentionSite, end: int | None) -> None:
        """Record a run. A second run begins if the index does not grow and the input is not the last output."""
        before, layer = self._before, site.layer
        if getattr(layer.layer, "_is_replica", False):
            return  # replicas run in parallel
        self.there = site.target_mask[:, :end] if self.there is None else self.there
        if before is not None and layer.index <= before[0] and not layer.is_given(before[1]):
            self.restart = self.restart or (before[0], layer.index)
        # A copy, because models write into their tensors.
        self._before = layer.index, layer.first_output.clone()


def mark_unreached(scores: Tensor, there: Tensor) -> Tensor:
    """A map whose zero rows are padding only. Other zero rows get the smallest positive number on the diagonal.

    In the last layer, gradients reach few tokens. The other tokens depend on themselves, by the residual connection.
    """
    unreached = there & (scores == 0).all(-1)
    return scores + torch.diag_embed(unreached.to(scores) * torch.finfo(scores.dtype).tiny)
