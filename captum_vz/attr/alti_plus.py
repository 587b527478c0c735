"""ALTI+: ALTI for encoder-decoder models (Ferrando et al., EMNLP 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from captum_vz._engine import AttentionBlock, AttentionSite, attention_site
from captum_vz.attr._base import MapRun
from captum_vz.attr._base.map_aggregation import MapAggregation, OtherMixingRule, of_maps
from captum_vz.attr._call import default_layers, warn
from captum_vz.attr._call.arguments import Arguments
from captum_vz.attr._call.target import PADDED_TARGET, Wanted, WantedTokens, gather_rows
from captum_vz.attr.layer_alti import LayerALTI, alti_of_attention
from captum_vz.errors import ArgumentError
from captum_vz.functional import encoder_decoder_rollout, normalize_rows, rollout


class ALTIPlus(MapAggregation):
    r"""How much each output *token* of a decoder depends on each encoder token and on each decoder input.

    .. math:: D_l = \big[\, \hat x^{\text{src}}_l \;\big|\; \operatorname{diag}(\hat x^{\text{res}}_l)\, \hat c_l
        \,\big], \qquad R_l = \big[\, D_l^{\text{src}} E + D_l^{\text{tgt}} R_{l-1}^{\text{src}} \;\big|\;
        D_l^{\text{tgt}} R_{l-1}^{\text{tgt}} \,\big]

    where :math:`\hat x_l` is ALTI's map of the cross-attention of decoder layer l. The residual connection of the
    cross-attention is an additional source, :math:`\hat x^{\text{res}}_l`. :math:`\hat c_l` is ALTI's map of the
    self-attention of layer l. E is the rollout of ALTI's maps of the encoder, see :class:`~captum_vz.LayerALTI`.
    `Ferrando et al. 2022 <https://aclanthology.org/2022.emnlp-main.599>`_, section 3.

    A map is `(batch, out, source + out)`. Its first columns are the encoder's tokens. Its last `out` columns are the
    decoder's inputs, the *target prefix*. Row i depends on inputs up to i, and predicts the token after input i. Rows
    sum to 1 over all columns, so the sum of the first columns is the share of the source.

    With `all_layers`, `attribute` returns a list with the map after each layer of the decoder. Maps are multiplied in
    float64. :class:`~captum_vz.attr.MapAggregation` describes the other arguments and the errors. `feature_mask` must
    be None: sum the columns of each feature in the result.

    Args:
        forward_func: A model, or a function that runs the layers.
        layer: The layers of the encoder, followed by the layers of the decoder. With the layers of the decoder alone,
            the sources are the encoder's outputs. None: all layers of both.
        device_ids: Not used.
        p: See :class:`~captum_vz.LayerALTI`.
        other_mixing: See :class:`~captum_vz.Rollout`.

    >>> import torch
    >>> from transformers import BartConfig, BartModel
    >>> from captum_vz import ALTIPlus
    >>> size = dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
    >>> heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    >>> model = BartModel(BartConfig(vocab_size=30, **size, **heads)).eval()
    >>> inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "decoder_input_ids": torch.tensor([[2, 9, 10]])}
    >>> scores = ALTIPlus(model).attribute(inputs)  # (batch, out, source + out)
    >>> source, prefix = scores.split([4, 3], dim=-1)
    >>> scores.shape, source.shape, prefix.shape
    (torch.Size([1, 3, 7]), torch.Size([1, 3, 4]), torch.Size([1, 3, 3]))
    >>> torch.allclose(source.sum(-1) + prefix.sum(-1), torch.ones(1, 3))
    True
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        p: Literal[1, 2] = 1,
        other_mixing: OtherMixingRule = "refuse",
    ) -> None:
        if layer is None:
            layer = [*default_layers(forward_func, "encoder"), *default_layers(forward_func, "decoder")]
        super().__init__(_BlockALTI(forward_func, layer, device_ids, p=p), other_mixing=other_mixing)

    p = of_maps("p")

    def _check(self, maps: list[Tensor]) -> None:
        # The map of a decoder layer has more columns than rows, because its first columns are the encoder's tokens.
        sides = [one.shape[2] > one.shape[1] for one in maps]
        shapes = [tuple(one.shape[1:]) for one in maps]
        sources = {one.shape[2] - side * one.shape[1] for side, one in zip(sides, maps, strict=True)}
        if not (sides[-1] and sides == sorted(sides) and len(sources) == 1):
            raise ArgumentError(
                f"{self.get_name()} takes the layers of an encoder, then the layers of its decoder, but the layers' "
                f"maps (out, in) are {shapes}. Leave layer None, or use ALTI for a single stack."
            )

    def _stacks(self, run: MapRun) -> list[int]:
        prefix, columns = run.maps[-1][1].shape[-2:]
        return [columns - prefix, prefix]

    def _join_features(
        self, maps: list[Tensor], rows: Tensor | None, feature_mask: Any, all_layers: bool
    ) -> list[Tensor]:
        there = maps[-1].sum(-1) != 0
        if rows is not None and not there.gather(1, rows).all():
            warn(f"{self.get_name()}: {PADDED_TARGET}.")
        joined = self.join(maps, rows)
        return [one.to(maps[0].dtype) for one in (joined if all_layers else joined[-1:])]

    def join(self, maps: list[Tensor], rows: Tensor | None) -> list[Tensor]:
        """The rollouts through the encoder and up to each layer of the decoder."""
        encoder = [one for one in maps if one.shape[1] == one.shape[2]]
        decoder = maps[len(encoder) :]
        rollouts = encoder_decoder_rollout(rollout(encoder)[-1] if encoder else None, decoder)
        return [gather_rows(one, rows) for one in rollouts]


class _BlockALTI(LayerALTI):
    """ALTI's map of an encoder block, `(batch, out, in)`, or of a decoder block, `(batch, out, source + in)`."""

    def _run(self, wanted: WantedTokens, arguments: Arguments, find_other_mixing: bool = False) -> MapRun:
        if arguments.feature_mask is not None:
            raise ArgumentError("ALTIPlus takes no feature_mask. Sum the columns of each feature.")
        return super()._run(wanted, arguments, find_other_mixing)

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        own = super().layer_scores(site, wanted)
        if len(site.layer.attentions) == 1:
            return own
        cross = alti_of_attention(AttentionBlock(attention_site(site.layer, "cross")), wanted, self.p)
        own = normalize_rows(own)
        # If all self-attention contributions of a row are zero, the row is set to zero, with a warning.
        cross = normalize_rows(cross) * (own != 0).any(-1, keepdim=True)
        return torch.cat([cross[..., :-1], cross[..., -1:] * own], dim=2)
