"""How far two rows of scores agree."""

from __future__ import annotations

import torch
from torch import Tensor


def kendall_tau(one: Tensor, other: Tensor, keep: Tensor | None = None) -> Tensor:
    """Kendall's rank correlation of rows `(..., tokens)`. NaN if one row has no order.

    Args:
        one: Scores.
        other: Scores of the same tokens.
        keep: Booleans: the tokens that count. None: those for which both scores are finite.

    >>> kendall_tau(torch.tensor([0.1, 0.2, 0.7]), torch.tensor([1.0, 3.0, 2.0]))
    tensor(0.3333, dtype=torch.float64)
    """
    known = one.isfinite() & other.isfinite() if keep is None else keep
    pairs = known[..., :, None] & known[..., None, :]
    first, second = (
        ((row[..., :, None] > row[..., None, :]).double() - (row[..., :, None] < row[..., None, :]).double()) * pairs
        for row in (one, other)
    )
    product, squares = (first * second).sum((-2, -1)), (first**2).sum((-2, -1)) * (second**2).sum((-2, -1))
    return (product / squares.sqrt()).masked_fill(squares == 0, torch.nan)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    r"""How much of two rows `(..., tokens)` lies on the same tokens, as shares of the sizes of the entries.

    .. math:: 1 - \tfrac12 \textstyle\sum_j |s_j - t_j| = \textstyle\sum_j \min(s_j, t_j)

    1 if the shares are the same, 0 if the rows share no token. NaN counts as 0. NaN if a row is 0 everywhere.

    >>> overlap(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.8, float("nan")]))
    tensor(0.5000, dtype=torch.float64)
    """
    sizes = [row.double().nan_to_num(nan=0.0).abs() for row in (one, other)]
    first, second = (row / row.sum(-1, keepdim=True) for row in sizes)
    return (1 - (first - second).abs().sum(-1) / 2).round(decimals=12)
