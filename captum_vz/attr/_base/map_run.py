"""The maps of one forward pass, and what computing them needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import EmbeddingLeaf, LayerRecord, OtherMixing
from captum_vz._private import is_replica
from captum_vz.attr._call.token_axis import LayerTokens
from captum_vz.errors import ArgumentError, UnsupportedLayerError


@dataclass(frozen=True)
class MapRun:
    """The maps of one forward pass.

    Attributes:
        maps: (index of the layer, its map), in the order in which the layers ran.
        tokens: The output tokens of each layer that ran. Empty if the model was not run.
        output: The output of `forward_func`.
        mixing: The places where something other than the layers' attention mixes tokens. None: not searched.
        there: Whether each output token of the first layer is not padding, `(batch, out)`. None: not known.
    """

    maps: list[tuple[int, Tensor]]
    tokens: dict[int, LayerTokens]
    output: Any = None
    mixing: OtherMixing | None = None
    there: Tensor | None = None


def with_graph(
    forward_func: Callable[..., Any],
    layers: Sequence[nn.Module],
    embeddings: nn.Module | None,
    run: int | None,
    name: str,
) -> EmbeddingLeaf:
    """`forward_func`, with the output of `embeddings`, or the input vectors of the stack, as the leaf of a graph."""
    if run:
        raise ArgumentError(
            f"run is {run}, but the graph of {name} starts at the first input. Pass run=0, or a forward_func that runs "
            "the layers on one input only."
        )
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"{name} needs gradients, but torch.inference_mode() is active: use torch.no_grad() instead."
        )
    return EmbeddingLeaf(forward_func, layers, embeddings)


def placeholder(record: LayerRecord, name: str) -> Tensor:
    """An empty map, to be replaced after the model has returned."""
    if is_replica(record.layer):
        raise UnsupportedLayerError(
            f"{name} needs the output of the whole model, but a DataParallel replica returns the output of some "
            "examples only: pass the module that DataParallel wraps."
        )
    return torch.empty(0)


def mark_unreached(scores: Tensor, there: Tensor) -> Tensor:
    """A map whose zero rows are padding only. Other zero rows get the smallest positive number on the diagonal.

    In the last layer, gradients reach few tokens. The other tokens depend on themselves, by the residual connection.
    """
    unreached = there & (scores == 0).all(-1)
    return scores + torch.diag_embed(unreached.to(scores) * torch.finfo(scores.dtype).tiny)
