r"""What each source token gives to an output token, as a vector, and how long that vector is.

The vector that source j gives to output i is a weighted sum of a few *parts* of j, which do not depend on i: the values
of its heads, projected, and, where the residual connection counts, j itself, a part that only i = j gives any weight.

.. math:: V_{ij} = \textstyle\sum_k w_{ijk} f_{jk}
"""

import torch
from torch import Tensor


def head_vectors(values: Tensor, projection: Tensor) -> Tensor:
    r"""Each head's value vectors, carried through the head's share of the output projection.

    .. math:: f^h(x_j) = W_O^h v^h_j

    (`Kobayashi et al. 2020 <https://aclanthology.org/2020.emnlp-main.574>`_, section 2.2: attention is a sum of these,
    weighted.) The bias of the values is in them, that of the projection is not.

    Args:
        values: `(batch, key-value head, in, d_head)`.
        projection: `(head * d_head, d)`; neighbouring query heads share a key-value head where there are more of them.

    Returns:
        `(batch, in, head, d)`.

    Raises:
        AssertionError: A projection whose width is no multiple of that of all values.

    >>> values = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])  # two heads, one token
    >>> head_vectors(values, torch.eye(4))
    tensor([[[[1., 2., 0., 0.],
              [0., 0., 3., 4.]]]])
    """
    _, shared, _, width = values.shape
    assert projection.dim() == 2 and projection.shape[0] % (shared * width) == 0, (
        f"projection is {tuple(projection.shape)}, but values {tuple(values.shape)} need (head * {width}, d) with a "
        f"multiple of {shared} heads."
    )
    by_head = projection.unflatten(0, (shared, -1, width))  # (key-value head, query head of it, d_head, d)
    return torch.einsum("bsjw,sqwd->bjsqd", values, by_head).flatten(2, 3)


def frozen_norm(vectors: Tensor, scale: Tensor, centred: bool = True) -> Tensor:
    r"""The linear part of a layer norm whose deviation is left to the caller, and whose bias is left out.

    .. math:: \gamma \odot (u - \operatorname{mean} u)

    Divided by the deviation of the norm's own input it is the map that takes each summand of that input to its share of
    the norm's output (`Kobayashi et al. 2021 <https://aclanthology.org/2021.emnlp-main.373>`_).

    Args:
        vectors: `(..., d)`.
        scale: `(d,)`.
        centred: False for norms that subtract no mean (RMSNorm).

    Returns:
        `(..., d)`.

    >>> frozen_norm(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]))
    tensor([-1.,  2.])
    """
    return scale * (vectors - vectors.mean(-1, keepdim=True) if centred else vectors)


def contributions(weights: Tensor, vectors: Tensor) -> Tensor:
    r"""The vectors that sources give to outputs, written out.

    .. math:: V_{ij} = \textstyle\sum_k w_{ijk} f_{jk}

    (`Kobayashi et al. 2020 <https://aclanthology.org/2020.emnlp-main.574>`_, section 2.2, before the sum over sources.)

    Args:
        weights: `(batch, out, in, part)`.
        vectors: `(batch, in, part, d)`.

    Returns:
        `(batch, out, in, d)`.

    >>> contributions(torch.tensor([[[[2.0, 1.0]]]]), torch.tensor([[[[1.0, 0.0], [0.0, 3.0]]]]))
    tensor([[[[2., 3.]]]])
    """
    return torch.einsum("bijk,bjkd->bijd", weights, vectors)


def contribution_norms(weights: Tensor, vectors: Tensor) -> Tensor:
    r"""How long the vectors are that sources give to outputs, without writing them out.

    .. math:: \lVert V_{ij} \rVert_2 = \sqrt{w_{ij}^\top G_j\, w_{ij}}, \qquad
        (G_j)_{kl} = \langle f_{jk}, f_{jl} \rangle

    The norm is taken after the parts are added up (`Kobayashi et al. 2020
    <https://aclanthology.org/2020.emnlp-main.574>`_, section 3); by their inner products, memory grows with the
    number of parts and not with d.

    Args:
        weights: `(batch, out, in, part)`.
        vectors: `(batch, in, part, d)`.

    Returns:
        `(batch, out, in)`, not negative.

    >>> contribution_norms(torch.tensor([[[[1.0, 1.0]]]]), torch.tensor([[[[3.0, 0.0], [0.0, 4.0]]]]))
    tensor([[[5.]]])
    """
    gram = vectors @ vectors.mT  # (batch, in, part, part)
    squared = (torch.einsum("bijk,bjkl->bijl", weights, gram) * weights).sum(-1)
    return squared.clamp_min(0).sqrt()  # rounding may leave a little less than nothing


def mixing_norms(weights: Tensor, vectors: Tensor, rows: Tensor | None = None) -> Tensor:
    r"""How long the vector is that an output gets from all other tokens, and how long the one it gets from itself.

    .. math:: \Big( \big\lVert \textstyle\sum_{j \ne i} V_{ij} \big\rVert_2,\; \lVert V_{ii} \rVert_2 \Big)

    The first divided by the sum of both is the mixing ratio (`Kobayashi et al. 2021
    <https://aclanthology.org/2021.emnlp-main.373>`_): 0 where a token keeps to itself, 1 where it is all
    made of others.

    Args:
        weights: `(batch, row, in, part)`.
        vectors: `(batch, in, part, d)`.
        rows: Which tokens the rows belong to, `(batch, row)`; None: row i to token i.

    Returns:
        `(batch, row, 2)`, not negative.

    >>> weights, vectors = torch.tensor([[[[1.0], [3.0]]]]), torch.ones(1, 2, 1, 1)
    >>> mixing_norms(weights, vectors)
    tensor([[[3., 1.]]])
    """
    if rows is None:
        rows = torch.arange(weights.shape[1], device=weights.device).expand(weights.shape[:2])
    itself = (rows[..., None] == torch.arange(weights.shape[2], device=weights.device))[..., None]
    shares = (weights * ~itself, weights * itself)
    sums = [torch.einsum("bijk,bjkd->bid", share, vectors) for share in shares]
    return torch.stack([torch.linalg.vector_norm(one, dim=-1) for one in sums], dim=-1)
