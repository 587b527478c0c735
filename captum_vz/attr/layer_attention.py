"""The attention weights themselves, as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import AttentionSite
from captum_vz.attr._heads import select_heads
from captum_vz.attr._layer_maps import LayerMaps
from captum_vz.attr._target import gather_rows
from captum_vz.functional import widen


class LayerAttention(LayerMaps):
    r"""The attention weights of a layer, its heads averaged: how much each output *token* attends to each source token.

    .. math:: A_{ij} = \tfrac1H \textstyle\sum_h \alpha^h_{ij} \quad\text{or}\quad \max_h \alpha^h_{ij}

    The baseline of `Abnar & Zuidema 2020 <https://aclanthology.org/2020.acl-main.385>`_ and others. Captum has no such
    class. The weights are read in the pass itself, whatever attention implementation the model was loaded with.

    With `feature_mask`, the weights of a group's sources are added up.
    The arguments of `attribute`, what comes back and what is raised are described in
    :class:`~captum_vz.attr.LayerMaps`.

    Args:
        forward_func: See :class:`~captum_vz.attr.LayerMaps`, like `layer`, `device_ids`, `attention`, `normalize`.
        heads: "mean" or "max" over all heads; an int: that head; a list of ints: the mean of those heads.
        normalize: Rows are divided by their sum. For the mean that changes nothing, unless a model lets weight go to
            an attention sink.

    >>> from captum_vz import LayerAttention, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> row = LayerAttention(model, find_layers(model)[-1]).attribute(inputs, token=6)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    _of_streams = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        heads: str | int | Sequence[int] = "mean",
        attention: str = "self",
        normalize: bool = True,
    ) -> None:
        super().__init__(forward_func, layer, device_ids, attention=attention, normalize=normalize)
        self.heads = heads

    def _layer_map(
        self,
        site: AttentionSite,
        rows: Tensor | None,
        groups: Tensor | None,
        at_most: int | None,
    ) -> Tensor:
        assert site.attention.weights is not None, "no weights"
        weights = self._fuse(widen(site.attention.weights), site.layer.index)
        assert weights.isfinite().all(), (
            f"The attention of {site.layer.name} has weights that are not finite (NaN or infinity) in "
            f"{site.attention.weights.dtype}. float16 overflows above 65504: load the model in bfloat16 or float32."
        )
        valid, sources = (site.target_mask, site.source_mask)
        weights = weights * (valid[:, :, None] & sources[:, None, :])
        weights = gather_rows(weights, rows)
        if groups is None:
            return weights
        pooled = weights.new_zeros(*weights.shape[:2], int(groups.max()) + 1)
        return pooled.scatter_add(2, groups[:, None, :].expand_as(weights), weights)

    def _fuse(self, weights: Tensor, index: int) -> Tensor:
        if self.heads == "mean":
            return weights.mean(1)
        if self.heads == "max":
            return weights.amax(1)
        assert not isinstance(self.heads, str), (
            f"heads is {self.heads!r}: pass 'mean', 'max', the number of a head, or a list of such numbers."
        )
        chosen = select_heads(self.heads, index, 0, weights.shape[1])
        return weights[:, torch.tensor(chosen, device=weights.device)].mean(1)
