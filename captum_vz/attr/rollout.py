"""Rollout (Abnar & Zuidema, ACL 2020) of any method's maps."""

from __future__ import annotations

from torch import Tensor

from captum_vz.attr._layer_maps import LayerMaps
from captum_vz.attr._map_aggregation import MapAggregation
from captum_vz.attr._model_free import ModelFreeAttribution
from captum_vz.attr._of_maps import OtherMixingRule
from captum_vz.attr._target import gather_rows
from captum_vz.attr.hidden_token_attribution import HiddenTokenAttribution
from captum_vz.errors import ArgumentError
from captum_vz.functional import Residual, rollout


class Rollout(MapAggregation):
    r"""How much each output *token* of a stack of layers draws on each input token: the maps of any method, multiplied.

    .. math:: R_0 = S_0, \qquad R_l = S_l R_{l-1}

    with :math:`S_l` the map that the method gives for layer l, its residual added. `Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_, equation 1, who do it with attention weights; any map whose rows sum
    to 1 can take their place. :class:`~captum_vz.ValueZeroingRollout`, :class:`~captum_vz.AttentionRollout`,
    :class:`~captum_vz.GlobEnc` and :class:`~captum_vz.ALTI` are this with the maps of one method and the residual of
    its paper.

    A layer that runs more than once in a pass (ALBERT) counts once for each run. Products are taken in float64. The
    arguments of `attribute`, results and errors are described in :meth:`attribute`.

    Args:
        maps: The method that computes the layers' maps, built with a list of layers in the order in which they run: any
            :class:`~captum_vz.attr.LayerMaps`, or a baseline that asks no model.
        residual: What is added to each map for the residual connection, see
            :func:`~captum_vz.functional.add_residual`. None for maps that include it
            (Value Zeroing, ALTI, norms with the residual), 0.5, "renormalize" or "add" for maps of the attention alone
            (weights, norms of what attention sums).
        per_receptive_field: Whether each input token's scores are divided by the number of output tokens that it
            reaches, and rows by their sums after that. It is meant for causal models, where early tokens reach more.
        other_mixing: How to treat token mixing outside the attention of the given layers (recurrent or convolutional
            modules, layers left out). "refuse": raise an error. "ignore": treat it as acting on each token alone.

    >>> from captum_vz import LayerAttentionNorm, Rollout, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> maps = LayerAttentionNorm(model, find_layers(model), include="residual")
    >>> scores = Rollout(maps).attribute(inputs["input_ids"], token=6)
    >>> scores.shape == inputs["input_ids"].shape, round(scores.sum().item(), 4)
    (True, 1.0)
    """

    def __init__(
        self,
        maps: LayerMaps | ModelFreeAttribution,
        *,
        residual: Residual = None,
        per_receptive_field: bool = False,
        other_mixing: OtherMixingRule = "refuse",
    ) -> None:
        if not isinstance(maps, (LayerMaps, ModelFreeAttribution)):
            raise ArgumentError(
                f"maps is of type {type(maps).__name__}: pass a method that gives one map for each layer, such as "
                "LayerAttention(model, find_layers(model)), and not the maps, for which there is functional.rollout."
            )
        if isinstance(maps, HiddenTokenAttribution):
            raise ArgumentError(
                "maps is a HiddenTokenAttribution, whose map of a layer goes down to the embeddings already: that of "
                "the last layer is what a rollout would be."
            )
        super().__init__(
            maps, residual=residual, per_receptive_field=per_receptive_field, other_mixing=other_mixing
        )

    def join(self, maps: list[Tensor], rows: Tensor | None) -> list[Tensor]:
        """The rollout up to each layer."""
        return [gather_rows(one, rows) for one in rollout(maps, self.residual)]
