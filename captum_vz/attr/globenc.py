"""GlobEnc (Modarressi et al., NAACL 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from captum_vz.attr._of_maps import OtherMixingRule, of_maps
from captum_vz.attr.layer_attention_norm import LayerAttentionNorm
from captum_vz.attr.rollout import Rollout
from captum_vz.functional import Residual


class GlobEnc(Rollout):
    r"""How much each output *token* of a stack of layers draws on each input token, by norms through whole layers.

    .. math:: R_0 = \hat E_0, \qquad R_l = \hat E_l R_{l-1}, \qquad \hat E_{ij} = \lVert E_{ij} \rVert_2 \big/
        \textstyle\sum_k \lVert E_{ik} \rVert_2

    with :math:`E_{ij}` the vector that token j gives to token i through a layer's attention, residual connections and
    both of its norms, see :class:`~captum_vz.LayerAttentionNorm` with "encoder". `Modarressi et al. 2022
    <https://aclanthology.org/2022.naacl-main.19>`_, who roll out (Abnar & Zuidema 2020) without adding a residual: the
    vectors hold it already.

    They roll the norms out as they are, so that tokens with long vectors count for more; later tools divide rows by
    their sums first (`Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_). The rankings differ.

    Layers have to norm what comes of their attention (post-norm: BERT, RoBERTa); :class:`~captum_vz.LayerAttentionNorm`
    says how they are read. Products are taken in float64. The arguments of `attribute`, what comes back and what is
    raised are described in :class:`~captum_vz.attr.MapAggregation`.

    Args:
        forward_func: A model, or any function that runs the layers.
        layer: The layers whose maps are joined, in the order in which they run.
        device_ids: The devices of a DataParallel model, needed only if `forward_func` runs one without being one.
        residual: What is added to each map for the residual connection, see
            :func:`~captum_vz.functional.add_residual`. None is the paper's choice.
        normalize: Whether each row of each layer's map is divided by its sum, so that rows of the rollout sum to 1.
            False is the paper's choice. Each example's norms in a layer are then divided by their largest, to prevent
            overflow: the scale of the rollout has no meaning, and scores compare within one example only.
        per_receptive_field: Whether each input token's scores are divided by the number of output tokens that it
            reaches, and rows by their sums after that. It is meant for causal models, where early tokens reach more.
        other_mixing: How to treat token mixing outside the attention of the given layers (recurrent or convolutional
            modules, layers left out). "refuse": raise an error. "ignore": treat it as acting on each token alone.

    >>> from captum_vz import GlobEnc, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> scores = GlobEnc(model, find_layers(model)).attribute(inputs["input_ids"], token=6)
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
        """The rollout up to each layer; without `normalize`, of maps whose largest norm is 1."""
        if not self.normalize:
            largest = [one.amax((1, 2), keepdim=True) for one in maps]
            maps = [one / top.where(top != 0, 1) for one, top in zip(maps, largest, strict=True)]
        return super().join(maps, rows)
