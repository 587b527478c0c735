"""GlobEnc (Modarressi et al., NAACL 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from captum_vz.attr._base.map_aggregation import OtherMixingRule, of_maps
from captum_vz.attr.layer_attention_norm import LayerAttentionNorm
from captum_vz.attr.rollout import Rollout
from captum_vz.functional import Residual


class GlobEnc(Rollout):
    r"""How much each output *token* of a stack of layers depends on each input token, by a rollout of vector norms.

    .. math:: R_0 = \hat E_0, \qquad R_l = \hat E_l R_{l-1}, \qquad \hat E_{ij} = \lVert E_{ij} \rVert_2 \big/
        \textstyle\sum_k \lVert E_{ik} \rVert_2

    where :math:`E_{ij}` is the vector that token j adds to token i through a layer's attention, residual connections
    and both norms, see :class:`~captum_vz.LayerAttentionNorm` with "encoder". `Modarressi et al. 2022
    <https://aclanthology.org/2022.naacl-main.19>`_. The rollout (Abnar & Zuidema 2020) adds no residual, because the
    vectors include the residual connection.

    The paper multiplies the norms without dividing rows by their sums, so tokens with long vectors have more weight.
    Later tools divide rows first (`Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_). The two
    variants rank tokens differently.

    Layers must norm the sum of residual and attention output (post-norm: BERT, RoBERTa), see
    :class:`~captum_vz.LayerAttentionNorm`. Maps are multiplied in float64. :meth:`attribute` describes its arguments,
    results and errors.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`.
        normalize: Whether to divide each row of each layer's map by its sum, so that rows of the rollout sum to 1.
            False is the paper's choice. The norms of each example in a layer are then divided by the largest norm, to
            prevent overflow. Compare such scores within one example only, because their scale has no meaning.
        residual, per_receptive_field, other_mixing: See :class:`~captum_vz.Rollout`. The paper's residual is None.

    >>> from captum_vz import GlobEnc
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = GlobEnc(model).attribute(inputs["input_ids"], token=6)
    >>> scores.shape == inputs["input_ids"].shape, round(scores.sum().item(), 4)
    (True, 1.0)
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        residual: Residual = None,
        normalize: bool = True,
        per_receptive_field: bool = False,
        other_mixing: OtherMixingRule = "refuse",
    ) -> None:
        super().__init__(
            LayerAttentionNorm(forward_func, layer, device_ids, include="encoder", normalize=normalize),
            residual=residual,
            per_receptive_field=per_receptive_field,
            other_mixing=other_mixing,
        )

    normalize = of_maps("normalize")

    def join(self, maps: list[Tensor], rows: Tensor | None) -> list[Tensor]:
        """The rollout up to each layer. Without `normalize`, maps are scaled to a largest norm of 1."""
        if not self.normalize:
            largest = [one.amax((1, 2), keepdim=True) for one in maps]
            maps = [one / top.where(top != 0, 1) for one, top in zip(maps, largest, strict=True)]
        return super().join(maps, rows)
