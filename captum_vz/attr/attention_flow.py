"""Attention flow (Abnar & Zuidema, ACL 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz.attr.attention_rollout import AttentionAggregation
from captum_vz.functional import attention_flow


class AttentionFlow(AttentionAggregation):
    r"""The maximum flow from each output *token* of a stack of layers to each input token, with weights as capacities.

    .. math:: F_{ij} = \operatorname{maxflow}\big((L, i) \to (0, j)\big), \qquad
        \operatorname{capacity}\big((l{+}1, i) \to (l, j)\big) = \tfrac12 A_{l,ij} + \tfrac12 [i = j]

    Each pair of tokens has its own maximum flow. Rows are normalised after that. `Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_, section 3. Pass `token` if you need one row, because each pair costs
    one maximum flow. :func:`~captum_vz.functional.attention_flow` describes the cost.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`.
        residual, heads, reduce_heads, attention: See :class:`~captum_vz.AttentionRollout`.
        per_receptive_field, other_mixing: See :class:`~captum_vz.Rollout`.

    >>> from captum_vz import AttentionFlow
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = AttentionFlow(model).attribute(inputs["input_ids"], token=3)
    >>> scores.shape == inputs["input_ids"].shape, round(scores.sum().item(), 4)
    (True, 1.0)
    """

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
