"""How near a vector comes to the whole that it is a part of."""

from typing import Literal

import torch
from torch import Tensor

ORDERS = {"l1": 1, "l2": 2}


def alti_contributions(vectors: Tensor, whole: Tensor, norm: Literal["l1", "l2"] = "l1") -> Tensor:
    r"""How much nearer to its end each of the vectors brings the sum that they are part of.

    .. math:: c_{ij} = \max\big(0,\; \lVert r_i \rVert - \lVert r_i - V_{ij} \rVert\big)

    with :math:`r_i` the sum of all :math:`V_{ij}` and of whatever belongs to no source. A vector that leads away from
    the sum counts for nothing (`Ferrando et al. 2022 <https://aclanthology.org/2022.emnlp-main.595>`_, section 3).

    Args:
        vectors: `(..., out, in, d)`.
        whole: `(..., out, d)`.
        norm: "l1" (the paper's) or "l2".

    Returns:
        `(..., out, in)`, not negative; rows sum to anything until they are normalised.

    Raises:
        AssertionError: Another norm, or shapes that do not fit.

    >>> vectors = torch.tensor([[[3.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    >>> alti_contributions(vectors, vectors.sum(1))
    tensor([[1., 1., 0.]])
    """
    assert norm in ORDERS, f"norm is {norm!r}: pass 'l1' or 'l2'."
    assert vectors.shape[:-2] + vectors.shape[-1:] == whole.shape, (
        f"vectors are {tuple(vectors.shape)} and whole is {tuple(whole.shape)}: "
        "pass (..., out, in, d) and (..., out, d)."
    )
    length = torch.linalg.vector_norm(whole, ORDERS[norm], dim=-1)[..., None]
    left = torch.linalg.vector_norm(whole[..., None, :] - vectors, ORDERS[norm], dim=-1)
    return (length - left).clamp_min(0)
