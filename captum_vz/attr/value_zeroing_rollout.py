"""Value Zeroing through the whole model (Mohebbi et al., EACL 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from captum_vz.attr._heads import Heads
from captum_vz.attr._of_maps import OtherMixingRule, of_maps
from captum_vz.attr.rollout import Rollout
from captum_vz.attr.value_zeroing import ValueZeroing
from captum_vz.functional import Distance, Residual


class ValueZeroingRollout(Rollout):
    r"""How much each output *token* of a stack of layers draws on each input token, by Value Zeroing, layer on layer.

    .. math:: R_0 = \hat C_0, \qquad R_l = \hat C_l R_{l-1}

    with :math:`\hat C_l` the map of layer l, see :class:`~captum_vz.ValueZeroing`. `Mohebbi et al., EACL 2023
    <https://aclanthology.org/2023.eacl-main.245>`_, who roll out (Abnar & Zuidema 2020) without adding a residual: the
    maps hold it already.

    A layer that runs more than once in a pass (ALBERT) counts once for each run. Products are taken in float64. The
    arguments of `attribute`, results and errors are described in :meth:`attribute`.

    Args:
        forward_func: A model, or any function that runs the layers.
        layer: The layers whose maps are joined, in the order in which they run.
        device_ids: The devices of a DataParallel model, needed only if `forward_func` runs one without being one.
        residual: What is added to each map for the residual connection, see
            :func:`~captum_vz.functional.add_residual`. None is the paper's choice.
        distance: "cosine", "euclidean", "l1", or a function `(..., d), (..., d) -> (...)`.
        attention: Only "self".
        heads: Zero the value in these (query) heads only, see :class:`~captum_vz.ValueZeroing`.
        normalize: Whether each row of each layer's map is divided by its sum.
        final_norm: A module applied to both outputs before the distance is taken, such as the norm after the last
            layer of a pre-norm stack.
        matmul_precision: "highest" or "medium", see :class:`~captum_vz.ValueZeroing`.
        per_receptive_field: Whether each input token's scores are divided by the number of output tokens that it
            reaches, and rows by their sums after that. It is meant for causal models, where early tokens reach more.
        other_mixing: How to treat token mixing outside the attention of the given layers (recurrent or convolutional
            modules, layers left out). "refuse": raise an error. "ignore": treat it as acting on each token alone.

    >>> from captum_vz import ValueZeroingRollout, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = ValueZeroingRollout(model, find_layers(model)).attribute(inputs["input_ids"], token=6)
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
        distance: str | Distance = "cosine",
        attention: str = "self",
        heads: Heads | Sequence[Heads] = None,
        normalize: bool = True,
        final_norm: nn.Module | None = None,
        matmul_precision: str = "highest",
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
            matmul_precision=matmul_precision,
        )
        super().__init__(
            maps, residual=residual, per_receptive_field=per_receptive_field, other_mixing=other_mixing
        )

    distance = of_maps("distance")
    attention = of_maps("attention")
    heads = of_maps("heads")
    normalize = of_maps("normalize")
    final_norm = of_maps("final_norm")
    matmul_precision = of_maps("matmul_precision")
