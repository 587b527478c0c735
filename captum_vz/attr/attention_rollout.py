"""Attention rollout (Abnar & Zuidema, ACL 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from captum_vz.attr._base.map_aggregation import MapAggregation, OtherMixingRule, of_maps
from captum_vz.attr._call import Heads
from captum_vz.attr.layer_attention import LayerAttention
from captum_vz.attr.rollout import Rollout
from captum_vz.functional import Residual


class AttentionAggregation(MapAggregation):
    """Base of the methods that join maps of attention weights."""

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
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


class AttentionRollout(AttentionAggregation, Rollout):
    r"""How much each output *token* of a stack of layers depends on each input token, by a rollout of attention.

    .. math:: R_0 = \hat A_0, \qquad R_l = \hat A_l R_{l-1}, \qquad \hat A_l = \tfrac12 A_l + \tfrac12 I

    where :math:`A_l` is the mean of the heads' attention weights in layer l, see :class:`~captum_vz.LayerAttention`.
    The identity represents the residual connection. `Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_, equation 1.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`.
        residual: How each map accounts for the residual connection, see
            :func:`~captum_vz.functional.add_residual`. 0.5 is the paper's choice. `explain`, `compare`, studies and
            the command name two: "attention-rollout" is 0.5, "attention-rollout-paper" is None.
        heads, reduce_heads: See :class:`~captum_vz.LayerAttention`. `reduce_heads` is "mean" or "max".
        attention: Must be "self".
        per_receptive_field, other_mixing: See :class:`~captum_vz.Rollout`.

    >>> from captum_vz import AttentionRollout
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = AttentionRollout(model).attribute(inputs["input_ids"], token=6)
    >>> scores.shape == inputs["input_ids"].shape, round(scores.sum().item(), 4)
    (True, 1.0)
    """
