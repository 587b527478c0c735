"""Rows of scores."""

import torch
from torch import Tensor


def widen(values: Tensor) -> Tensor:
    r"""Values in at least float32: half precision and integers are converted, float32 and float64 are left as they are.

    Half precision has no room for the sums and differences that a score is made of: of the numbers near 1, bfloat16
    holds one in every :math:`2^{-7}`, while scores differ by a thousandth of that.

    Args:
        values: Any shape, any real type.

    Returns:
        The same shape, float32 or float64.

    >>> widen(torch.tensor([1.0], dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def normalize_rows(scores: Tensor) -> Tensor:
    r"""Divides each row by its sum, so that it sums to 1.

    .. math:: \hat C_{ij} = C_{ij} \big/ \textstyle\sum_k C_{ik}

    The last step of Value Zeroing (`Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_).
    It is meant for scores that are not negative: signed ones may cancel in the sum.

    Args:
        scores: `(..., in)`, a row along the last axis.

    Returns:
        `(..., in)` in at least float32. Rows sum to 1, but for a row that is all zero: it stays zero and never turns
        into NaN.

    >>> normalize_rows(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[0.2500, 0.7500],
            [0.0000, 0.0000]])
    """
    scores = widen(scores)
    total = scores.sum(-1, keepdim=True)
    return scores / total.where(total != 0, 1)
