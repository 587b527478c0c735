"""ALTI: Aggregation of Layer-wise Token-to-token Interactions (Ferrando et al., EMNLP 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from captum_vz.attr._of_maps import OtherMixingRule, of_maps
from captum_vz.attr.layer_alti import LayerALTI
from captum_vz.attr.rollout import Rollout
from captum_vz.functional import Residual


class ALTI(Rollout):
    r"""How much each output *token* of a stack of layers draws on each input token, by ALTI, layer on layer.

    .. math:: R_0 = \hat c_0, \qquad R_l = \hat c_l R_{l-1}

    with :math:`\hat c_l` the map of layer l, see :class:`~captum_vz.LayerALTI`. `Ferrando et al. 2022
    <https://aclanthology.org/2022.emnlp-main.595>`_, section 3, who roll out (Abnar & Zuidema 2020) without adding a
    residual: the maps hold it already.

    Products are taken in float64. The arguments of `attribute`, what
    comes back and what is raised are described in :class:`~captum_vz.attr.MapAggregation`.

    Args:
        forward_func: A model, or any function that runs the layers.
        layer: The layers whose maps are multiplied, in the order in which they run: of an encoder, or of a decoder-only
            model.
        device_ids: The devices of a DataParallel model, needed only if `forward_func` runs one without being one.
        residual: What is added to each map for the residual connection, see
            :func:`~captum_vz.functional.add_residual`. None is the paper's choice.
        p: The order of the norm, 1 (the paper's) or 2.
        per_receptive_field: Whether each input token's scores are divided by the number of output tokens that it
            reaches, and rows by their sums after that. It is meant for causal models, where early tokens reach more.
        other_mixing: How to treat token mixing outside the attention of the given layers (recurrent or convolutional
            modules, layers left out). "refuse": raise an error. "ignore": treat it as acting on each token alone.

    >>> from captum_vz import ALTI, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = ALTI(model, find_layers(model)).attribute(inputs["input_ids"], token=6)
    >>> scores.shape == inputs["input_ids"].shape, round(scores.sum().item(), 4)
    (True, 1.0)
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        residual: Residual = None,
        p: Literal[1, 2] = 1,
        per_receptive_field: bool = False,
        other_mixing: OtherMixingRule = "refuse",
    ) -> None:
        super().__init__(
            LayerALTI(forward_func, layer, device_ids, p=p),
            residual=residual,
            per_receptive_field=per_receptive_field,
            other_mixing=other_mixing,
        )

    p = of_maps("p")
