"""Rollout: the maps of consecutive layers, multiplied."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from captum_vz.functional.rows import normalize_rows, widen

Residual: TypeAlias = float | Literal["renormalize"] | None


def add_residual(scores: Tensor, residual: Residual) -> Tensor:
    r"""Gives a map the share that each token keeps of itself along the residual connection.

    ============= ======================================== =============================
    `residual`    formula                                  rows sum to 1
    ============= ======================================== =============================
    None          :math:`S`                                if those of :math:`S` do
    0.5           :math:`\tfrac12 S + \tfrac12 I`          if those of :math:`S` do
    "renormalize" :math:`(S + I)`, divided by its row sums always
    ============= ======================================== =============================

    The middle one is that of `Abnar & Zuidema 2020 <https://aclanthology.org/2020.acl-main.385>`_. A row that is all
    zero belongs to a token that is not there (padding): it gets no residual and stays zero.

    Args:
        scores: A map `(batch, tokens, tokens)`.
        residual: None, 0.5 or "renormalize".

    Returns:
        A map of the same shape, in at least float32.

    Raises:
        AssertionError: Another residual, or something that is not such a map.

    >>> add_residual(torch.tensor([[[0.2, 0.8], [0.0, 0.0]]]), 0.5)
    tensor([[[0.6000, 0.4000],
             [0.0000, 0.0000]]])
    """
    assert residual in (None, 0.5, "renormalize"), f"residual is {residual!r}: pass None, 0.5 or 'renormalize'."
    assert scores.ndim == 3 and scores.shape[1] == scores.shape[2], (
        f"Expected a map (batch, tokens, tokens), got {tuple(scores.shape)}."
    )
    scores = widen(scores)
    if residual is None:
        return scores
    present = (scores != 0).any(-1)
    total = scores + torch.diag_embed(present.to(scores))
    return total / 2 if residual == 0.5 else normalize_rows(total)


def rollout(maps: Iterable[Tensor], residual: Residual = None) -> list[Tensor]:
    r"""What each token has drawn from each input token, through all layers up to one.

    .. math:: R_0 = S_0, \qquad R_l = S_l R_{l-1}

    with :math:`S_l` the map of layer l, its residual added (`Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_, equation 1). Maps of Value Zeroing hold the
    residual already and are rolled out as they are.

    Args:
        maps: One map `(batch, tokens, tokens)` for each layer, in the order in which the layers run; or all of them in
            one tensor `(layers, batch, tokens, tokens)`.
        residual: None, 0.5 or "renormalize", see :func:`add_residual`.

    Returns:
        The rollout after each layer, `(batch, tokens, tokens)` in float64, as these are products of many small
        numbers. Rows sum to 1 if those of all maps do.

    Raises:
        AssertionError: No map, maps of different shapes, or another residual.

    >>> halfway = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> rollout([halfway, halfway])[-1]
    tensor([[[0.2500, 0.7500],
             [0.0000, 1.0000]]], dtype=torch.float64)
    """
    rollouts: list[Tensor] = []
    for scores in maps:
        step = add_residual(scores.double(), residual)
        assert not rollouts or step.shape == rollouts[-1].shape, (
            f"All maps need one shape: map {len(rollouts)} is {tuple(step.shape)}, "
            f"those before it are {tuple(rollouts[-1].shape)}."
        )
        rollouts.append(step @ rollouts[-1] if rollouts else step)
    assert rollouts, "rollout needs the map of at least one layer, got none."
    return rollouts


def encoder_decoder_rollout(encoder: Tensor | None, decoder: Iterable[Tensor]) -> list[Tensor]:
    r"""What each token of a decoder has drawn from each token of its encoder and from each of its own inputs.

    .. math:: R_l = \big[\, S_l^{\text{src}} E + S_l^{\text{tgt}} R_{l-1}^{\text{src}} \;\big|\;
        S_l^{\text{tgt}} R_{l-1}^{\text{tgt}} \,\big], \qquad R_{-1} = [\, 0 \mid I \,]

    with :math:`E` the rollout of the encoder and :math:`S_l = [S_l^{\text{src}} \mid S_l^{\text{tgt}}]` the map of
    layer l of the decoder (`Ferrando et al. 2022, ALTI+ <https://aclanthology.org/2022.emnlp-main.599>`_).

    Args:
        encoder: `(batch, source, source)`; None: the encoder's outputs are the sources themselves.
        decoder: One map `(batch, out, source + out)` for each layer, in the order in which the layers run: first what
            is drawn from the encoder's outputs, then from the layer's inputs.

    Returns:
        The rollout after each layer, `(batch, out, source + out)` in float64. Rows sum to 1 if those of all maps do.

    Raises:
        AssertionError: No map, or maps that do not fit each other.

    >>> encoder = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> layer = torch.tensor([[[0.5, 0.0, 0.5]]])  # two source tokens, one of the decoder's own
    >>> encoder_decoder_rollout(encoder, [layer, layer])[-1]
    tensor([[[0.3750, 0.3750, 0.2500]]], dtype=torch.float64)
    """
    rollouts: list[Tensor] = []
    for scores in decoder:
        out = scores.shape[1]
        source = scores.shape[2] - out
        side = source if encoder is None else encoder.shape[1]
        first = (len(scores), out, side + out)
        before = tuple(rollouts[-1].shape) if rollouts else first
        assert source >= 0 and source == side and before == first, (
            f"Map {len(rollouts)} is {tuple(scores.shape)}, (batch, out, source + out), but the encoder has {side} "
            f"tokens and the rollout before it is {before}."
        )
        drawn, own = scores.double().split([source, out], dim=2)
        if encoder is not None:
            drawn = drawn @ encoder.double()
        if rollouts:
            own = own @ rollouts[-1]
            rollouts.append(torch.cat([drawn + own[..., :side], own[..., side:]], dim=2))
        else:
            rollouts.append(torch.cat([drawn, own], dim=2))
    assert rollouts, "encoder_decoder_rollout needs the map of at least one layer of a decoder, got none."
    return rollouts
