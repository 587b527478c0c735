"""Attention flow (Abnar & Zuidema, ACL 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz.attr._base.map_aggregation import MapAggregation, OtherMixingRule, of_maps
from captum_vz.attr._call.layers import Heads
from captum_vz.attr.layer_attention import LayerAttention
from captum_vz.functional import Residual, attention_flow


class AttentionFlow(MapAggregation):
    r"""The maximum flow from each output *token* of a stack of layers to each input token, with weights as capacities.

    .. math:: F_{ij} = \operatorname{maxflow}\big((L, i) \to (0, j)\big), \qquad
        \operatorname{capacity}\big((l{+}1, i) \to (l, j)\big) = \tfrac12 A_{l,ij} + \tfrac12 [i = j]

    Each pair of tokens has its own maximum flow. Rows are normalised after that. `Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_, section 3. Pass `token` if you need one row, because each pair costs
    one maximum flow. :func:`~captum_vz.functional.attention_flow` describes the cost.

    Args:
        forward_func: A model, or a function that runs the layers.
        layer: The layers whose maps are joined, in the order in which they run. None: all layers of the model, as
            `captum_vz.find_layers` returns them.
        device_ids: Not used.
        residual: How each map accounts for the residual connection, see
            :func:`~captum_vz.functional.add_residual`. 0.5 is the paper's choice.
        heads: The query heads to read: an int or a list of ints for all layers, or a list with one such selection for
            each layer. None: all heads.
        reduce_heads: How to combine the heads into one map, "mean" or "max".
        attention: Must be "self".
        per_receptive_field: Whether to divide the scores of each input token by the number of output tokens that the
            token reaches. Rows are normalised after that. Meant for causal models of a few layers: early tokens reach
            more tokens.
        other_mixing: How to treat token mixing outside the attention of the given layers (recurrent or convolutional
            modules, omitted layers). "refuse": raise an error. "ignore": treat these as acting on each token alone.

    >>> from captum_vz import AttentionFlow
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = AttentionFlow(model).attribute(inputs["input_ids"], token=3)
    >>> scores.shape == inputs["input_ids"].shape, round(scores.sum().item(), 4)
    (True, 1.0)
    """

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

    def join(self, maps: list[Tensor], rows: Tensor | None) -> list[Tensor]:
        """The flow up to each layer."""
        return [self._flow(maps[:depth], rows) for depth in range(1, len(maps) + 1)]

    def join_last(self, maps: list[Tensor], rows: Tensor | None) -> Tensor:
        """The flow through all layers."""
        return self._flow(maps, rows)

    def _flow(self, maps: list[Tensor], rows: Tensor | None) -> Tensor:
        if rows is None:
            return attention_flow(maps, residual=self.residual)
        examples = [
            attention_flow([one[b : b + 1] for one in maps], rows=wanted.tolist(), residual=self.residual)
            for b, wanted in enumerate(rows)
        ]
        return torch.cat(examples)
