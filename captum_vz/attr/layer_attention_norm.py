"""Norm-based analysis of a layer (Kobayashi et al., EMNLP 2020 and 2021; Modarressi et al., NAACL 2022)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from captum_vz._engine import INCLUDES, AttentionBlock, AttentionSite, Decomposition, decompositions
from captum_vz._private import TargetType
from captum_vz.attr._base import LayerMaps
from captum_vz.attr._call import Attention, check_one_of
from captum_vz.attr._call.arguments import Inputs
from captum_vz.attr._call.target import Wanted
from captum_vz.errors import ArgumentError
from captum_vz.functional import contribution_norms, mixing_norms

Include = Literal["attention", "residual", "layer_norm", "encoder"]


class LayerAttentionNorm(LayerMaps):
    r"""The norm of the vector that each source token adds to an output *token* of a layer.

    .. math:: N_{ij} = \textstyle\sum_h \alpha^h_{ij} W_O^h v^h_j, \qquad R_{ij} = N_{ij} + [i = j]\, x_i, \qquad
        Z_{ij} = g_1(R_{ij}), \qquad E_{ij} = g_2(Z_{ij})

    The attention's output is a sum of vectors N. The results of later steps of the layer are sums of R, Z and E:

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
    norm's :math:`\sigma` in the clean pass. The vectors include the bias of the values. They leave out the biases of
    the projection and the norms, because these belong to no source. They leave out the feed-forward, which affects
    "encoder" by :math:`\sigma_2` only. Pre-norm layers (GPT-2, LLaMA, ViT) support "attention" and "residual" only.

    With `feature_mask`, the vectors of a group are summed before the norm is computed. The projection, the
    residual connection and the norms are found by the inputs and outputs of the layer's submodules. A layer in which
    they are not found is refused.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`.
        include: The steps of the layer that the vectors pass through, see the table. Cross-attention supports
            "attention" only, because its residual is not a source token.
        attention: See :class:`~captum_vz.attr.LayerMaps`.
        normalize: Whether to divide each row by its sum. False returns the norms themselves.
        reduce_heads: "sum": the vectors of the heads are summed before the norm is computed, as in the formula. None:
            the norm of each head's vector, `(batch, head, out, in)`, with "attention" only: the residual connection
            belongs to no head.

    >>> from captum_vz import LayerAttentionNorm, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> method = LayerAttentionNorm(model, find_layers(model)[-1], include="encoder")
    >>> row = method.attribute(inputs, token=6)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    >>> method.mixing_ratio(inputs).shape == inputs["input_ids"].shape
    True
    """

    needs_steps = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        include: Include = "attention",
        attention: Attention = "self",
        normalize: bool = True,
        reduce_heads: str | None = "sum",
    ) -> None:
        super().__init__(forward_func, layer, device_ids, attention=attention, normalize=normalize)
        check_one_of("reduce_heads", reduce_heads, "sum", None)
        check_one_of("include", include, *INCLUDES)
        if include != "attention" and attention != "self":
            raise ArgumentError(
                f"include is {include!r}, but the residual connection of a cross-attention is not a source token: "
                "pass include='attention'."
            )
        if include != "attention" and reduce_heads is None:
            raise ArgumentError("reduce_heads is None, but the residual connection belongs to no head: pass 'sum'.")
        self.include: Include = include
        self.reduce_heads = reduce_heads

    def mixing_ratio(
        self, inputs: Inputs, target: TargetType = None, additional_forward_args: Any = None, *, token: Any = None
    ) -> Tensor | list[Tensor]:
        r"""How much of each output *token* comes from other tokens.

        .. math:: r_i = \frac{\lVert \sum_{j \ne i} V_{ij} \rVert}
            {\lVert \sum_{j \ne i} V_{ij} \rVert + \lVert V_{ii} \rVert}

        where V are the vectors that `include` selects (`Kobayashi et al. 2021
        <https://aclanthology.org/2021.emnlp-main.373>`_).

        Args:
            inputs: See :meth:`LayerMaps.attribute`.
            target: An index into the output of `forward_func`. Its first index is an output token.
            additional_forward_args: Further arguments for `forward_func`.
            token: The output tokens whose ratios are returned. None: all tokens.

        Returns:
            Ratios between 0 and 1, `(batch, out)`, or `(batch,)` with one output token for each example. A list of
            such tensors if `layer` is a list. The ratio of padding is 0.

        Raises:
            RefusedError: As in :meth:`LayerMaps.attribute`. Cross-attention, because its sources are other tokens.
        """
        if self.attention != "self":
            raise ArgumentError("attention is not 'self', but the mixing ratio needs self-attention: pass 'self'.")
        mixing = _Mixing(self.forward_func, self.layer, self.device_ids, include=self.include)
        shares = mixing.attribute(inputs, target, additional_forward_args, token=token)
        return [one[..., 0] for one in shares] if isinstance(shares, list) else shares[..., 0]

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        """The norms of the vectors, `(batch, row, group)`."""
        check_one_of("include", self.include, *INCLUDES)  # again, because attributes can be set
        examples = decompositions(AttentionBlock(site), self.include, wanted.rows, wanted.groups)
        return torch.cat([self._scores(some) if self.reduce_heads else self._by_head(some) for some in examples])

    def _by_head(self, some: Decomposition) -> Tensor:
        """The norms of the vectors of each head, `(batch, head, row, group)`."""
        heads = [slice(head, head + 1) for head in range(some.weights.shape[-1])]
        alone = (replace(some, weights=some.weights[..., one], vectors=some.vectors[:, :, one]) for one in heads)
        return torch.stack([self._scores(one) for one in alone], 1)

    def _scores(self, some: Decomposition) -> Tensor:
        if some.groups is None:
            return contribution_norms(some.weights, some.vectors)
        return torch.cat([torch.linalg.vector_norm(vectors, dim=-1) for vectors, _ in some.written_out()], dim=1)


class _Mixing(LayerAttentionNorm):
    """A map with two columns: the share of all other tokens, and the share of the token itself."""

    def _scores(self, some: Decomposition) -> Tensor:
        return mixing_norms(some.weights, some.vectors, some.rows)
