"""The attention weights themselves, as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import AttentionSite
from captum_vz.attr._arguments import as_list
from captum_vz.attr._heads import Heads, select_heads
from captum_vz.attr._layer_maps import LayerMaps
from captum_vz.attr._wanted import Wanted
from captum_vz.errors import ArgumentError
from captum_vz.functional import widen


class LayerAttention(LayerMaps):
    r"""The attention weights of a layer, its heads averaged: how much each output *token* attends to each source token.

    .. math:: A_{ij} = \tfrac1H \textstyle\sum_h \alpha^h_{ij} \quad\text{or}\quad \max_h \alpha^h_{ij}

    The baseline of `Abnar & Zuidema 2020 <https://aclanthology.org/2020.acl-main.385>`_ and others. Captum has no such
    class. The weights are read in the pass itself, whatever attention implementation the model was loaded with.

    With `feature_mask`, the weights of a group's sources are added up.

    Args:
        forward_func: A model, or any function that runs the layers.
        layer: A layer (a whole Transformer block) or a list of layers, for which `attribute` returns a list of maps.
            `captum_vz.find_layers(model)` gives all layers.
        device_ids: The devices of a DataParallel model, needed only if `forward_func` runs one without being one.
        heads: Read these (query) heads only: an int or a list of ints for all layers, or a list with one such selection
            for each layer. None: all heads.
        reduce_heads: How the heads become one map, "mean" or "max".
        attention: "self", or "cross" for the second attention of a decoder block.
        normalize: Whether each row is divided by its sum. For the mean of all heads this changes nothing, unless a
            model lets weight go to an attention sink.

    >>> from captum_vz import LayerAttention, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> row = LayerAttention(model, find_layers(model)[-1]).attribute(inputs, token=6)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    accepts_streams = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        heads: Heads | Sequence[Heads] = None,
        reduce_heads: str = "mean",
        attention: str = "self",
        normalize: bool = True,
    ) -> None:
        super().__init__(forward_func, layer, device_ids, attention=attention, normalize=normalize)
        if reduce_heads not in ("mean", "max"):
            raise ArgumentError(f"reduce_heads is {reduce_heads!r}: pass 'mean' or 'max', or select heads by heads=.")
        self.heads = heads
        self.reduce_heads = reduce_heads

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        """The weights of the heads as one map, `(batch, row, group)`."""
        return wanted.pool(self._fuse(widen(site.weights()), site.layer.index))

    def _fuse(self, weights: Tensor, index: int) -> Tensor:
        """The heads of weights `(batch, head, out, in)` as one, `(batch, out, in)`."""
        chosen = select_heads(self.heads, index, len(as_list(self.layer)), weights.shape[1])
        if chosen is not None:
            weights = weights[:, torch.tensor(chosen, device=weights.device)]
        return weights.mean(1) if self.reduce_heads == "mean" else weights.amax(1)
