"""Reproducible noise, small nudges, and a test whether rows that run together are independent.

A row is a position of a packed sequence, or a copy of an example. Mixture-of-experts layers with limited capacity make
rows compete. To detect this, some rows are run together with many identical rows of large norm, the crowd. The rows
under test hold their clean values or small noise, because noise may choose an expert that no clean value chooses. They
are placed before and after the crowd because capacity may be assigned in either order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from captum_vz._engine.numerics.tolerance import is_reproduced

# Strengths of the crowd's noise, relative to the values that it replaces. An expert that is not chosen at one strength
# is chosen at its opposite. NaN marks every value that depends on the crowd.
PROBE_STRENGTHS = (64.0, -64.0, torch.nan)
# Strengths of the rows under test: in this order before the crowd, in the reverse order after it.
SMALL_STRENGTHS = (0.0, 1.0, -1.0, 8.0, -8.0)


def is_independent(run: Callable[[Tensor], Tensor], clean: Tensor, crowd: int) -> bool:
    """Return whether the rows of `run(strengths (n,)) -> (n, ...)` are independent of each other.

    `strengths` scales the noise of each row. A row of strength 0 must equal `clean (...)`. A row under test must give
    the same output before and after the crowd of `crowd` rows, for each of `PROBE_STRENGTHS`.
    """
    first: Tensor | None = None
    for strength in PROBE_STRENGTHS:
        tested = len(SMALL_STRENGTHS)
        strengths = [*SMALL_STRENGTHS, *[strength] * crowd, *reversed(SMALL_STRENGTHS)]
        outputs = run(torch.tensor(strengths, device=clean.device))
        before, after = outputs[:tested], outputs[-tested:].flip(0)
        first = torch.cat([clean[None], before[1:]]) if first is None else first
        if not all(is_reproduced(rows.flatten(0, -2), first.flatten(0, -2)) for rows in (before, after)):
            return False
    return True


def with_noise(x: Tensor, strengths: Tensor) -> Tensor:
    """Replace row i of `x (n, ..., features)` by noise of relative strength `strengths[i]`; 0 leaves it unchanged."""
    strengths = strengths.to(x).view(-1, *[1] * (x.dim() - 1))
    return torch.where(strengths == 0, x, noise_like(x, 1.0) * strengths)


def noise_like(x: Tensor, strength: float) -> Tensor:
    """Return noise in the shape of `x (..., features)`, the same vector for all positions.

    The noise is normally distributed, with a standard deviation of `strength` times the largest entry of `x`.
    """
    return strength * max_abs(x) * fixed_normal(x.new_empty(x.shape[-1:])).expand_as(x)


def max_abs(x: Tensor) -> Tensor:
    """Return the largest absolute value among the finite entries of a tensor, or 1 if all of them are zero."""
    size = x.nan_to_num(0, 0, 0).abs().amax()
    return size.where(size > 0, 1)


def fixed_normal(x: Tensor) -> Tensor:
    """Return standard normal numbers in the shape of `x`, the same in each call and on each device."""
    generator = torch.Generator("cpu").manual_seed(0)  # the user's generator must not advance
    return torch.randn(x.shape, generator=generator, device="cpu").to(x)


def nudged(x: Tensor, share: float | None = None) -> Tensor:
    """Add normal noise to each position of `x (..., d)`, of `share` times the mean absolute value of the position.

    `share` is `eps**0.5` of the dtype if it is None. At a position of zeros, the mean over all positions is used.
    """
    size = x.abs().mean(-1, keepdim=True)
    share = torch.finfo(x.dtype).eps ** 0.5 if share is None else share
    return x + share * size.where(size > 0, size.mean()) * fixed_normal(x)


def replaced(x: Tensor, other: Tensor, chosen: Tensor) -> Tensor:
    """Replace `x (..., d)` by `other` at the positions where `chosen (...)` is True."""
    return torch.where(chosen.view(*chosen.shape, *[1] * (x.dim() - chosen.dim())), other, x)


def is_changed(found: Tensor, clean: Tensor) -> Tensor:
    """Return where two runs of the same code differ, to the last bit. NaN in both runs is no difference."""
    return (found != clean) & ~(found.isnan() & clean.isnan())
