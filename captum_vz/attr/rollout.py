"""Rollout (Abnar & Zuidema, ACL 2020) of any method's maps."""

from __future__ import annotations

from torch import Tensor

from captum_vz.attr._base import LayerMaps
from captum_vz.attr._base.map_aggregation import MapAggregation, OtherMixingRule
from captum_vz.attr._call.target import gather_rows
from captum_vz.attr.hidden_token_attribution import HiddenTokenAttribution
from captum_vz.attr.model_free import ModelFreeAttribution
from captum_vz.errors import ArgumentError
from captum_vz.functional import Residual, rollout


class Rollout(MapAggregation):
    r"""How much each output *token* of a stack of layers depends on each input token, by a product of layer maps.

    .. math:: R_0 = S_0, \qquad R_l = S_l R_{l-1}

    where :math:`S_l` is the method's map of layer l, with the residual added. `Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_, equation 1, multiply attention weights. Any map whose rows sum to 1
    can replace the weights. :class:`~captum_vz.ValueZeroingRollout`, :class:`~captum_vz.AttentionRollout`,
    :class:`~captum_vz.GlobEnc` and :class:`~captum_vz.ALTI` are rollouts of one method, with the residual of its paper.

    If a layer runs more than once in a pass (ALBERT), each run contributes one map. Maps are multiplied in float64.
    :meth:`attribute` describes its arguments, results and errors.

    Args:
        maps: The method that computes the maps: a :class:`~captum_vz.attr.LayerMaps` or a
            :class:`~captum_vz.attr.ModelFreeAttribution`. Its `layer` is a list of layers in the order in which they
            run.
        residual: How each map accounts for the residual connection, see
            :func:`~captum_vz.functional.add_residual`. None for maps that include the residual connection (ALTI, norms
            with the residual). 0.5, "renormalize" or "add" for maps of the attention alone (weights, norms of the
            attention's vectors). For maps of Value Zeroing see :class:`~captum_vz.ValueZeroingRollout`.
        per_receptive_field: Whether to divide the scores of each input token by the number of output tokens that the
            token reaches. Rows are normalised after that. Meant for causal models of a few layers: early tokens reach
            more tokens.
        other_mixing: How to treat token mixing outside the attention of the given layers (recurrent or convolutional
            modules, omitted layers). "refuse": raise an error. "ignore": treat these as acting on each token alone.

    >>> from captum_vz import LayerAttentionNorm, Rollout, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
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
                f"maps is of type {type(maps).__name__}: pass a method that gives one map for each layer. For maps, "
                "call captum_vz.functional.rollout."
            )
        if isinstance(maps, HiddenTokenAttribution):
            raise ArgumentError("maps is a HiddenTokenAttribution, whose map of a layer is that of the stack already.")
        super().__init__(maps, residual=residual, per_receptive_field=per_receptive_field, other_mixing=other_mixing)

    def join(self, maps: list[Tensor], rows: Tensor | None) -> list[Tensor]:
        """The rollout up to each layer."""
        return [gather_rows(one, rows) for one in rollout(maps, self.residual)]
