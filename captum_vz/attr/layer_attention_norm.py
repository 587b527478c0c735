"""Norm-based analysis of a layer (Kobayashi et al., EMNLP 2020 and 2021; Modarressi et al., NAACL 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from captum._utils.typing import TargetType
from torch import Tensor

from captum_vz._engine import INCLUDES, AttentionBlock, AttentionSite, Decomposition, decompositions
from captum_vz.attr._arguments import Inputs
from captum_vz.attr._layer_maps import LayerMaps
from captum_vz.attr._wanted import Wanted
from captum_vz.errors import ArgumentError
from captum_vz.functional import contribution_norms, mixing_norms

Include = Literal["attention", "residual", "layer_norm", "encoder"]


class LayerAttentionNorm(LayerMaps):
    r"""How long the vector is that each source token gives to an output *token* of a layer.

    .. math:: N_{ij} = \textstyle\sum_h \alpha^h_{ij} W_O^h v^h_j, \qquad R_{ij} = N_{ij} + [i = j]\, x_i, \qquad
        Z_{ij} = g_1(R_{ij}), \qquad E_{ij} = g_2(Z_{ij})

    The attention's output is a sum of such vectors, and so is what the layer makes of it:

    ============= ======================== ================================================================
    `include`     score                    source
    ============= ======================== ================================================================
    "attention"   :math:`\lVert N \rVert`  `Kobayashi et al. 2020
                                           <https://aclanthology.org/2020.emnlp-main.574>`_, section 3
    "residual"    :math:`\lVert R \rVert`  `Kobayashi et al. 2021
                                           <https://aclanthology.org/2021.emnlp-main.373>`_
    "layer_norm"  :math:`\lVert Z \rVert`  the same
    "encoder"     :math:`\lVert E \rVert`  `Modarressi et al. 2022
                                           <https://aclanthology.org/2022.naacl-main.19>`_: GlobEnc's layers
    ============= ======================== ================================================================

    where :math:`x` is the layer's input and :math:`g(u) = \gamma \odot (u - \operatorname{mean} u) / \sigma`, with the
    :math:`\sigma` that the norm found in the clean pass. The bias of the values is in these vectors; those of the
    projection and of the norms belong to no source and are left out, as is the feed-forward, which counts for "encoder"
    by its part in :math:`\sigma_2` only. Layers that norm their attention's input (pre-norm: GPT-2, LLaMA, ViT) have
    "attention" and "residual" alone.

    With `feature_mask`, the vectors of a group's sources are added up before their norm is taken. The projection, the
    residual and the norms are found by what the layer's submodules take and make in one more run of it; a layer in
    which they are not recognised is refused.

    Args:
        forward_func: A model, or any function that runs the layers.
        layer: A layer (a whole Transformer block) or a list of layers, for which `attribute` returns a list of maps.
            `captum_vz.find_layers(model)` gives all layers.
        device_ids: The devices of a DataParallel model, needed only if `forward_func` runs one without being one.
        include: How far the layer is followed. Cross-attention, whose residual is no source token, has "attention"
            only.
        attention: "self", or "cross" for the second attention of a decoder block.
        normalize: Whether each row is divided by its sum. False gives the norms themselves.

    >>> from captum_vz import LayerAttentionNorm, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> method = LayerAttentionNorm(model, find_layers(model)[-1], include="encoder")
    >>> row = method.attribute(inputs, token=6)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    >>> method.mixing_ratio(inputs).shape == inputs["input_ids"].shape
    True
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        include: Include = "attention",
        attention: str = "self",
        normalize: bool = True,
    ) -> None:
        super().__init__(forward_func, layer, device_ids, attention=attention, normalize=normalize)
        if include not in INCLUDES:
            raise ArgumentError(f"include is {include!r}: pass one of {', '.join(map(repr, INCLUDES))}.")
        if include != "attention" and attention == "cross":
            raise ArgumentError(
                f"include is {include!r}, but the residual beside a cross-attention is no source token: "
                "pass include='attention'."
            )
        self.include: Include = include

    def mixing_ratio(
        self, inputs: Inputs, target: TargetType = None, additional_forward_args: Any = None, *, token: Any = None
    ) -> Tensor | list[Tensor]:
        r"""How much of each output *token* comes from other tokens.

        .. math:: r_i = \frac{\lVert \sum_{j \ne i} V_{ij} \rVert}
            {\lVert \sum_{j \ne i} V_{ij} \rVert + \lVert V_{ii} \rVert}

        with V the vectors that `include` names (`Kobayashi et al. 2021
        <https://aclanthology.org/2021.emnlp-main.373>`_).

        Args:
            inputs: See :meth:`LayerMaps.attribute`, like `additional_forward_args`.
            target: An index into what `forward_func` returned, whose first index is an output token.
            additional_forward_args: Further arguments for `forward_func`.
            token: The output tokens that are wanted; None: all.

        Returns:
            Ratios between 0 and 1, `(batch, out)`, or, with one token for each example, `(batch,)`; a list of them if
            `layer` is a list. That of padding is 0.

        Raises:
            RefusedError: As in :meth:`LayerMaps.attribute`; a cross-attention, whose sources are other tokens.
        """
        if self.attention != "self":
            raise ArgumentError("The mixing ratio needs self-attention: a token is no source of its own here.")
        mixing = _Mixing(self.forward_func, self.layer, self.device_ids, include=self.include)
        shares = mixing.attribute(inputs, target, additional_forward_args, token=token)
        return [one[..., 0] for one in shares] if isinstance(shares, list) else shares[..., 0]

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        """The norms of the vectors, `(batch, row, group)`."""
        block = AttentionBlock(site)
        examples = decompositions(block, self.include, wanted.rows, wanted.groups)
        return torch.cat([self._scores(some) for some in examples])

    def _scores(self, some: Decomposition) -> Tensor:
        if some.groups is None:
            return contribution_norms(some.weights, some.vectors)
        return torch.cat([torch.linalg.vector_norm(vectors, dim=-1) for vectors, _ in some.written_out()], dim=1)


class _Mixing(LayerAttentionNorm):
    """What each token gets from all others and what from itself, as a map with two columns."""

    def _scores(self, some: Decomposition) -> Tensor:
        return mixing_norms(some.weights, some.vectors, some.rows)
