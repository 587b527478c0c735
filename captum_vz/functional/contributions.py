r"""The vector that each source token gives to an output token: its length, and how near it is to the sum of all.

The vector from source j to output i is a weighted sum of a few *parts* of j. The parts do not depend on i. They are the
projected values of the heads of j and, where the residual connection counts, j itself. Only i = j gives a weight to the
last part.

.. math:: V_{ij} = \textstyle\sum_k w_{ijk} f_{jk}
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError


def head_vectors(values: Tensor, projection: Tensor) -> Tensor:
    r"""The value vectors of each head, multiplied by the head's rows of the output projection.

    .. math:: f^h(x_j) = W_O^h v^h_j

    Attention is a weighted sum of these vectors (`Kobayashi et al. 2020
    <https://aclanthology.org/2020.emnlp-main.574>`_, section 2.2). They include the bias of the values. They do not
    include the bias of the projection.

    Args:
        values: `(batch, key-value head, in, d_head)`.
        projection: `(head * d_head, d)`. If there are more query heads than key-value heads, neighbouring query heads
            share a key-value head.

    Returns:
        `(batch, in, head, d)`.

    Raises:
        ArgumentError: The rows of `projection` are not a multiple of key-value heads times `d_head`.

    >>> values = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])  # two heads, one token
    >>> head_vectors(values, torch.eye(4))
    tensor([[[[1., 2., 0., 0.],
              [0., 0., 3., 4.]]]])
    """
    _, shared, _, width = values.shape
    if projection.dim() != 2 or projection.shape[0] % (shared * width):
        raise ArgumentError(
            f"projection is {tuple(projection.shape)}, but values {tuple(values.shape)} need (head * {width}, d) with "
            f"a multiple of {shared} heads."
        )
    # One product for each key-value head: its values in all examples with the rows of its query heads.
    by_head = projection.unflatten(0, (shared, -1, width)).transpose(1, 2).flatten(2)  # (.., d_head, query head * d)
    vectors = torch.bmm(values.transpose(0, 1).flatten(1, 2), by_head)
    vectors = vectors.view(shared, len(values), values.shape[2], -1, projection.shape[1])
    return vectors.permute(1, 2, 0, 3, 4).flatten(2, 3)


def frozen_norm(vectors: Tensor, scale: Tensor, centred: bool = True) -> Tensor:
    r"""The linear part of a layer norm, without its bias and not yet divided by a standard deviation.

    .. math:: \gamma \odot (u - \operatorname{mean} u)

    Divide the result by the standard deviation of the norm's input. It is then the share of the norm's output that the
    summand u of its input causes (`Kobayashi et al. 2021 <https://aclanthology.org/2021.emnlp-main.373>`_).

    Args:
        vectors: The summands u, `(..., d)`.
        scale: The weight :math:`\gamma` of the norm, `(d,)`.
        centred: Whether the norm subtracts the mean. False for RMSNorm.

    Returns:
        `(..., d)`.

    >>> frozen_norm(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]))
    tensor([-1.,  2.])
    """
    return scale * (vectors - vectors.mean(-1, keepdim=True) if centred else vectors)


def contributions(weights: Tensor, vectors: Tensor) -> Tensor:
    r"""The vector that each source gives to each output.

    .. math:: V_{ij} = \textstyle\sum_k w_{ijk} f_{jk}

    These are the terms of the sum over sources in `Kobayashi et al. 2020
    <https://aclanthology.org/2020.emnlp-main.574>`_, section 2.2.

    Args:
        weights: `(batch, out, in, part)`.
        vectors: `(batch, in, part, d)`.

    Returns:
        `(batch, out, in, d)`.

    >>> contributions(torch.tensor([[[[2.0, 1.0]]]]), torch.tensor([[[[1.0, 0.0], [0.0, 3.0]]]]))
    tensor([[[[2., 3.]]]])
    """
    return (weights.transpose(1, 2) @ vectors).transpose(1, 2)


def contribution_norms(weights: Tensor, vectors: Tensor) -> Tensor:
    r"""The length of the vector that each source gives to each output, without computing the vectors.

    .. math:: \lVert V_{ij} \rVert_2 = \sqrt{w_{ij}^\top G_j\, w_{ij}}, \qquad
        (G_j)_{kl} = \langle f_{jk}, f_{jl} \rangle

    The parts are summed before the norm is taken (`Kobayashi et al. 2020 <https://aclanthology.org/2020.emnlp-main.574>`_,
    section 3). It is computed from inner products, so that memory grows with the number of parts and not with d.

    Args:
        weights: `(batch, out, in, part)`.
        vectors: `(batch, in, part, d)`.

    Returns:
        `(batch, out, in)`, not negative.

    >>> contribution_norms(torch.tensor([[[[1.0, 1.0]]]]), torch.tensor([[[[3.0, 0.0], [0.0, 4.0]]]]))
    tensor([[[5.]]])
    """
    of_source = weights.transpose(1, 2)  # (batch, in, out, part)
    gram = vectors @ vectors.mT  # (batch, in, part, part)
    squared = (of_source @ gram * of_source).sum(-1)
    return squared.clamp_min(0).sqrt().transpose(1, 2)  # rounding may leave small negative numbers


def mixing_norms(weights: Tensor, vectors: Tensor, rows: Tensor | None = None) -> Tensor:
    r"""The length of the vector that an output gets from all other tokens, and of the vector from itself.

    .. math:: \Big( \big\lVert \textstyle\sum_{j \ne i} V_{ij} \big\rVert_2,\; \lVert V_{ii} \rVert_2 \Big)

    The first length divided by the sum of both is the mixing ratio (`Kobayashi et al. 2021
    <https://aclanthology.org/2021.emnlp-main.373>`_). It is 0 for a token that uses only itself, and 1 for a token that
    uses only others.

    Args:
        weights: `(batch, row, in, part)`.
        vectors: `(batch, in, part, d)`.
        rows: The token of each row, `(batch, row)`. None: row i belongs to token i.

    Returns:
        `(batch, row, 2)`, not negative: from other tokens, from the token itself.

    >>> weights, vectors = torch.tensor([[[[1.0], [3.0]]]]), torch.ones(1, 2, 1, 1)
    >>> mixing_norms(weights, vectors)
    tensor([[[3., 1.]]])
    """
    if rows is None:
        rows = torch.arange(weights.shape[1], device=weights.device).expand(weights.shape[:2])
    itself = (rows[..., None] == torch.arange(weights.shape[2], device=weights.device))[..., None]
    shares = (weights * ~itself, weights * itself)
    sums = [torch.einsum("bijk,bjkd->bid", share, vectors) for share in shares]
    return torch.stack([torch.linalg.vector_norm(vector, dim=-1) for vector in sums], dim=-1)


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
    left = length_of_vectors(whole[..., None, :] - vectors, p)
    return (length_of_vectors(whole, p)[..., None] - left).clamp_min(0)


def length_of_vectors(vectors: Tensor, p: Literal[1, 2]) -> Tensor:
    """The norm of order p of vectors `(..., d)`."""
    # torch sums absolute values faster than it takes norms of order 1.
    return vectors.abs().sum(-1) if p == 1 else torch.linalg.vector_norm(vectors, dim=-1)


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
    result = updates[-1].double()
    for update, layer_map in zip(updates[-2::-1], maps[-2::-1], strict=True):  # from above: no product of two maps
        result = update.double() + result @ layer_map.double()
    return result
