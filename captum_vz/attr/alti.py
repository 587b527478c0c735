"""ALTI: Aggregation of Layer-wise Token-to-token Interactions (Ferrando et al., EMNLP 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from captum_vz.attr._base.map_aggregation import OtherMixingRule, of_maps
from captum_vz.attr.layer_alti import LayerALTI
from captum_vz.attr.rollout import Rollout
from captum_vz.functional import Residual


class ALTI(Rollout):
    r"""How much each output *token* of a stack of layers depends on each input token, by a rollout of ALTI's maps.

    .. math:: R_0 = \hat c_0, \qquad R_l = \hat c_l R_{l-1}

    where :math:`\hat c_l` is the map of layer l, see :class:`~captum_vz.LayerALTI`. `Ferrando et al. 2022
    <https://aclanthology.org/2022.emnlp-main.595>`_, section 3. The rollout (Abnar & Zuidema 2020) adds no residual,
    because the maps include the residual connection.

    Maps are multiplied in float64. :meth:`attribute` describes its arguments, results and errors.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`. The layers are those of an encoder or
            of a decoder-only model.
        p, include: See :class:`~captum_vz.LayerALTI`.
        residual, per_receptive_field, other_mixing: See :class:`~captum_vz.Rollout`. The paper's residual is None.

    >>> from captum_vz import ALTI
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = ALTI(model).attribute(inputs["input_ids"], token=6)
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
        p: Literal[1, 2] = 1,
        include: Literal["encoder"] | None = None,
        per_receptive_field: bool = False,
        other_mixing: OtherMixingRule = "refuse",
    ) -> None:
        super().__init__(
            LayerALTI(forward_func, layer, device_ids, p=p, include=include),
            residual=residual,
            per_receptive_field=per_receptive_field,
            other_mixing=other_mixing,
        )

    p = of_maps("p")
    include = of_maps("include")
