"""The attention weights themselves, as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import AttentionSite, check_unknown_code
from captum_vz.attr._base import LayerMaps
from captum_vz.attr._call import Attention, Heads, as_list, check_one_of, select_heads
from captum_vz.attr._call.target import Wanted
from captum_vz.functional import widen


class LayerAttention(LayerMaps):
    r"""The attention weights of a layer: how much each output *token* attends to each source token.

    .. math:: A_{ij} = \tfrac1H \textstyle\sum_h \alpha^h_{ij} \quad\text{or}\quad \max_h \alpha^h_{ij}

    The scores are the mean or the maximum over heads. `Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_ and others use these weights as a baseline. The weights are read
    during the forward pass, with any attention implementation of the model. Captum has no such class.

    With `feature_mask`, the weights of a group's sources are summed.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`.
        heads: The query heads to read: an int or a list of ints for all layers, or a list with one such selection for
            each layer. None: all heads.
        reduce_heads: How to combine the heads into one map, "mean" or "max". None: one map for each selected head,
            `(batch, head, out, in)`.
        attention: See :class:`~captum_vz.attr.LayerMaps`.
        normalize: Whether to divide each row by its sum. The mean of all heads has sum 1 already, unless the model has
            an attention sink.

    >>> from captum_vz import LayerAttention, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> row = LayerAttention(model, find_layers(model)[-1]).attribute(inputs, token=6)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    accepts_streams = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        heads: Heads | Sequence[Heads] = None,
        reduce_heads: str | None = "mean",
        attention: Attention = "self",
        normalize: bool = True,
    ) -> None:
        super().__init__(forward_func, layer, device_ids, attention=attention, normalize=normalize)
        check_one_of("reduce_heads", reduce_heads, "mean", "max", None)
        self.heads = heads
        self.reduce_heads = reduce_heads

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        """The weights of the heads as one map, `(batch, row, group)`, or as `(batch, head, row, group)`."""
        return wanted.pool(self._fuse(widen(checked_weights(site)), site.layer.index))

    def _fuse(self, weights: Tensor, index: int) -> Tensor:
        """Weights `(batch, head, out, in)` of the selected heads, combined over heads unless `reduce_heads` is None."""
        check_one_of("reduce_heads", self.reduce_heads, "mean", "max", None)
        chosen = select_heads(self.heads, index, len(as_list(self.layer)), weights.shape[1])
        if chosen is not None:
            weights = weights[:, torch.tensor(chosen, device=weights.device)]
        if self.reduce_heads is None:
            return weights
        return weights.mean(1) if self.reduce_heads == "mean" else weights.amax(1)


def checked_weights(site: AttentionSite) -> Tensor:
    """The weights `(batch, head, out, in)`. Layers of unknown code are refused if these are not all of its weights."""
    check_unknown_code(site, values_once=False)
    return site.weights()
