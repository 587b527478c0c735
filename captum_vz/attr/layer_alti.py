"""ALTI's map of one layer (Ferrando et al., EMNLP 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from captum_vz._engine import AttentionBlock, AttentionSite, decompositions
from captum_vz.attr._base import LayerMaps
from captum_vz.attr._call import check_one_of
from captum_vz.attr._call.target import Wanted
from captum_vz.errors import ArgumentError
from captum_vz.functional.contributions import length_of_vectors


class LayerALTI(LayerMaps):
    r"""How close the vector from each source token is to the sum of all vectors at an output *token* of a layer.

    .. math:: c_{ij} = \max\big(0,\; \lVert r_i \rVert - \lVert r_i - V_{ij} \rVert\big), \qquad
        \hat c_{ij} = c_{ij} \big/ \textstyle\sum_k c_{ik}

    where :math:`V_{ij}` is the vector that source j adds to output i through attention, residual connection and the
    norm after the residual connection. :math:`r_i` is the sum of these vectors and all biases, which is the input of
    the feed-forward module. `Ferrando et al. 2022 <https://aclanthology.org/2022.emnlp-main.595>`_, section 3. Pre-norm
    layers (GPT-2, LLaMA, ViT) have no norm after the residual connection, so no norm is applied. The vectors are the
    vectors of :class:`~captum_vz.LayerAttentionNorm` with "layer_norm", or "residual" for pre-norm layers.

    With `include="encoder"`, the vectors also pass the norm at the end of the layer, and :math:`r_i` is the output of
    the layer, feed-forward and biases included. The vectors are those of GlobEnc.

    With `feature_mask`, the vectors of a group are summed before the comparison. A row is zero if no vector brings the
    sum closer.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`.
        p: The order of the norm, 1 (the paper's) or 2.
        include: None: as in the paper. "encoder": up to the second norm of the layer, which pre-norm layers lack.
        normalize: Whether to divide each row by its sum. False returns the differences of lengths themselves.

    >>> from captum_vz import LayerALTI, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> row = LayerALTI(model, find_layers(model)[-1]).attribute(inputs, token=6)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    needs_steps = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        p: Literal[1, 2] = 1,
        include: Literal["encoder"] | None = None,
        normalize: bool = True,
    ) -> None:
        super().__init__(forward_func, layer, device_ids, normalize=normalize)
        check_order(p)
        check_one_of("include", include, "encoder", None)
        self.include: Literal["encoder"] | None = include
        self.p: Literal[1, 2] = p

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        """How close each vector is to the sum, `(batch, row, group)`."""
        return alti_of_attention(AttentionBlock(site), wanted, self.p, self.include)


def check_order(p: Any) -> None:
    """Refuse orders of the norm other than 1 and 2."""
    if p not in (1, 2):
        raise ArgumentError(f"p is {p!r}: pass 1 or 2, the order of the norm.")


def alti_of_attention(
    block: AttentionBlock, wanted: Wanted, p: Literal[1, 2], include: Literal["encoder"] | None = None
) -> Tensor:
    """ALTI's contributions `(batch, row, group)`. In cross-attention, the last column is the residual connection."""
    check_order(p)  # again, because attributes can be set
    check_one_of("include", include, "encoder", None)
    each = decompositions(block, include, wanted.rows, wanted.groups)
    examples = [(length_of_vectors(some.whole.unsqueeze(2), p) - some.lengths_without(p)).clamp_min(0) for some in each]
    return examples[0] if len(examples) == 1 else torch.cat(examples)
