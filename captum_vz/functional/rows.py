"""Rows of scores: their dtype, and their sums."""

import torch
from torch import Tensor


def widen(values: Tensor) -> Tensor:
    r"""Values in at least float32. Half precision and integers are converted, float32 and float64 are not.

    Half precision is too coarse for the sums and differences in a score. Near 1, the numbers of bfloat16 are
    :math:`2^{-7}` apart, and scores differ by a thousandth of that.

    Args:
        values: Any shape, any real type.

    Returns:
        The same shape, float32 or float64.

    >>> widen(torch.tensor([1.0], dtype=torch.bfloat16)).dtype
    torch.float32
    """
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.to(torch.promote_types(values.dtype, torch.float32))


def normalize_rows(scores: Tensor) -> Tensor:
    r"""Divides each row by its sum, so that it sums to 1.

    .. math:: \hat C_{ij} = C_{ij} \big/ \textstyle\sum_k C_{ik}

    This is the last step of Value Zeroing (`Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_).
    Scores should not be negative, because signed scores may cancel in the sum.

    Args:
        scores: `(..., in)`. A row is the last axis.

    Returns:
        `(..., in)` in at least float32. Rows sum to 1, except for rows of zeros, which stay zero (not NaN).

    >>> normalize_rows(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[0.2500, 0.7500],
            [0.0000, 0.0000]])
    """
    scores = widen(scores)
    total = scores.sum(-1, keepdim=True)
    return scores / (total + (total == 0))
