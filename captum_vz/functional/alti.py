"""The contributions of ALTI and ALTI-Logit."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError


def alti_contributions(vectors: Tensor, whole: Tensor, p: Literal[1, 2] = 1) -> Tensor:
    r"""How near each vector is to the sum of all vectors, compared with zero.

    .. math:: c_{ij} = \max\big(0,\; \lVert r_i \rVert_p - \lVert r_i - V_{ij} \rVert_p\big)

    :math:`r_i` is the sum of all :math:`V_{ij}` and of the terms that belong to no source. The score is the distance
    from zero to this sum, minus the distance from the vector to this sum. A vector that is farther from the sum than
    zero scores 0 (`Ferrando et al. 2022 <https://aclanthology.org/2022.emnlp-main.595>`_, section 3).

    Args:
        vectors: The vectors :math:`V_{ij}`, `(..., out, in, d)`.
        whole: The sums :math:`r_i`, `(..., out, d)`.
        p: The order of the norm, 1 (the paper's) or 2.

    Returns:
        `(..., out, in)`, not negative. Rows do not sum to 1; see :func:`normalize_rows`.

    Raises:
        ArgumentError: `p` is not 1 or 2, or the shapes do not fit.

    >>> vectors = torch.tensor([[[3.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    >>> alti_contributions(vectors, vectors.sum(1))
    tensor([[1., 1., 0.]])
    """
    if p not in (1, 2):
        raise ArgumentError(f"p is {p!r}: pass 1 or 2, the order of the norm.")
    if vectors.shape[:-2] + vectors.shape[-1:] != whole.shape:
        raise ArgumentError(
            f"vectors are {tuple(vectors.shape)} and whole is {tuple(whole.shape)}: "
            "pass (..., out, in, d) and (..., out, d)."
        )
    length = torch.linalg.vector_norm(whole, p, dim=-1)[..., None]
    left = torch.linalg.vector_norm(whole[..., None, :] - vectors, p, dim=-1)
    return (length - left).clamp_min(0)


def logit_contributions(updates: Iterable[Tensor], maps: Iterable[Tensor]) -> Tensor:
    r"""How much each input token contributes to a logit through the attention of all layers.

    .. math:: r_{tj} = \textstyle\sum_l \sum_k \Delta^l_{tk}\, R_{l-1,kj}, \qquad R_l = S_l R_{l-1}, \qquad R_{-1} = I

    :math:`\Delta^l_{tk}` is what the vector of token k adds to the logit at t through the attention of layer l.
    :math:`S_l` is the map of layer l. :math:`R_{l-1}` is the rollout of the layers below layer l (`Ferrando et al.
    2023, ALTI-Logit <https://aclanthology.org/2023.acl-long.301>`_).

    Args:
        updates: One signed tensor `(batch, row, tokens)` for each layer, first layer first.
        maps: One map `(batch, tokens, tokens)` for each layer. Rows sum to 1. The map of the last layer is not used.

    Returns:
        `(batch, row, tokens)` in float64, signed. A row sums to the sum of the same row of all updates.

    Raises:
        ArgumentError: There is no layer, or updates and maps differ in number.

    >>> updates = [torch.tensor([[[0.0, 2.0]]]), torch.tensor([[[1.0, -4.0]]])]
    >>> maps = [torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])] * 2
    >>> logit_contributions(updates, maps)
    tensor([[[-1., 0.]]], dtype=torch.float64)
    """
    updates, maps = list(updates), list(maps)
    if not updates:
        raise ArgumentError("logit_contributions needs the update of at least one layer, got none.")
    if len(updates) != len(maps):
        raise ArgumentError(f"Got {len(updates)} updates and {len(maps)} maps: pass one update and one map a layer.")
    result = updates[0].double()
    rolled_out = maps[0].double()
    for update, layer_map in zip(updates[1:], maps[1:], strict=True):
        result = result + update.double() @ rolled_out
        rolled_out = layer_map.double() @ rolled_out
    return result
