"""Attention rollout (Abnar & Zuidema, ACL 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from captum_vz.attr._heads import Heads
from captum_vz.attr._of_maps import OtherMixingRule, of_maps
from captum_vz.attr.layer_attention import LayerAttention
from captum_vz.attr.rollout import Rollout
from captum_vz.functional import Residual


class AttentionRollout(Rollout):
    r"""How much each output *token* of a stack of layers draws on each input token, by attention weights multiplied.

    .. math:: R_0 = \hat A_0, \qquad R_l = \hat A_l R_{l-1}, \qquad \hat A_l = \tfrac12 A_l + \tfrac12 I

    with :math:`A_l` the weights of layer l, heads averaged, see :class:`~captum_vz.LayerAttention`; the identity stands
    for the residual connection. `Abnar & Zuidema 2020 <https://aclanthology.org/2020.acl-main.385>`_, equation 1.

    The arguments of `attribute`, what comes back and what is raised are
    described in :class:`~captum_vz.attr.MapAggregation`.

    Args:
        forward_func: See :class:`~captum_vz.LayerAttention`, like all arguments but these:
        layer: The layers whose maps are multiplied, in the order in which they run.
        residual: 0.5 (the paper's), None, or "renormalize" (the identity is added and rows are divided by their sum).
        per_receptive_field: See :class:`~captum_vz.attr.MapAggregation`.

    >>> from captum_vz import AttentionRollout, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = AttentionRollout(model, find_layers(model)).attribute(inputs["input_ids"], token=6)
    >>> scores.shape == inputs["input_ids"].shape, round(scores.sum().item(), 4)
    (True, 1.0)
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        residual: Residual = 0.5,
        heads: Heads | Sequence[Heads] = None,
        reduce_heads: str = "mean",
        attention: str = "self",
        per_receptive_field: bool = False,
        other_mixing: OtherMixingRule = "refuse",
    ) -> None:
        super().__init__(
            LayerAttention(
                forward_func, layer, device_ids, heads=heads, reduce_heads=reduce_heads, attention=attention
            ),
            residual=residual,
            per_receptive_field=per_receptive_field,
            other_mixing=other_mixing,
        )

    heads = of_maps("heads")
    reduce_heads = of_maps("reduce_heads")
    attention = of_maps("attention")
