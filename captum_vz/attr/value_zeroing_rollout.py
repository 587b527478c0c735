"""Value Zeroing through the whole model (Mohebbi et al., EACL 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from captum_vz.attr._base.map_aggregation import OtherMixingRule, of_maps
from captum_vz.attr._call import Heads, Values
from captum_vz.attr.rollout import Rollout
from captum_vz.attr.value_zeroing import ValueZeroing
from captum_vz.functional import Distance, Intervention, Residual


class ValueZeroingRollout(Rollout):
    r"""How much each output *token* of a stack of layers depends on each input token, by a rollout of Value Zeroing.

    .. math:: R_0 = \hat C_0, \qquad R_l = \hat C_l R_{l-1}

    where :math:`\hat C_l` is the map of layer l, see :class:`~captum_vz.ValueZeroing`. `Mohebbi et al., EACL 2023
    <https://aclanthology.org/2023.eacl-main.245>`_. The paper's rollout (Abnar & Zuidema 2020) adds no residual. But a
    row holds shares of changes, and what the residual connection carries does not change: it has no share in any row.
    With `residual=0.5` it has half of each row.

    If a layer runs more than once in a pass (ALBERT), each run contributes one map. Maps are multiplied in float64.
    :meth:`attribute` describes its arguments, results and errors.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`.
        residual: How each map accounts for the residual connection, see
            :func:`~captum_vz.functional.add_residual`. None is the paper's choice: take it to compare with the paper.
            0.5: take it to read from which tokens a token is built. `explain`, `compare`, studies and the command name
            the two: "value-zeroing-rollout" is 0.5, "value-zeroing-rollout-paper" is None.
        distance, heads, normalize, final_norm, values, intervention: See :class:`~captum_vz.ValueZeroing`.
        attention: Must be "self".
        per_receptive_field, other_mixing: See :class:`~captum_vz.Rollout`.

    >>> from captum_vz import ValueZeroingRollout
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = ValueZeroingRollout(model).attribute(inputs["input_ids"], token=6)
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
        distance: str | Distance = "cosine",
        attention: str = "self",
        heads: Heads | Sequence[Heads] = None,
        normalize: bool = True,
        final_norm: nn.Module | None = None,
        values: Values = None,
        intervention: str | Intervention = "zero",
        per_receptive_field: bool = False,
        other_mixing: OtherMixingRule = "refuse",
    ) -> None:
        maps = ValueZeroing(
            forward_func,
            layer,
            device_ids,
            distance=distance,
            attention=attention,
            heads=heads,
            normalize=normalize,
            final_norm=final_norm,
            values=values,
            intervention=intervention,
        )
        super().__init__(maps, residual=residual, per_receptive_field=per_receptive_field, other_mixing=other_mixing)

    distance = of_maps("distance")
    attention = of_maps("attention")
    heads = of_maps("heads")
    normalize = of_maps("normalize")
    final_norm = of_maps("final_norm")
    values = of_maps("values")
    intervention = of_maps("intervention")
