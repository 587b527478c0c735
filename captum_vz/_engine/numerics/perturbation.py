"""Reproducible noise, and small nudges, that show what depends on what."""

from __future__ import annotations

import torch
from torch import Tensor

# Strengths of the crowd's noise, relative to the values that it replaces. An expert that is not chosen at one strength
# is chosen at its opposite. NaN marks every value that depends on the crowd.
PROBE_STRENGTHS = (64.0, -64.0, torch.nan)
# Strengths of the rows under test: in this order before the crowd, in the reverse order after it.
SMALL_STRENGTHS = (0.0, 1.0, -1.0, 8.0, -8.0)


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


def binary_digits(x: Tensor, tokens_first: bool = False) -> list[Tensor]:
    """Mark the positions of `x (batch, ..., d)` whose index has a 1 as each binary digit, bool `x.shape[:-1]`.

    Two positions differ in at least one digit.
    """
    places = x.shape[:1] if tokens_first or x.dim() == 2 else x.shape[1:-1]
    index = torch.arange(places.numel(), device=x.device).view(*places, *[1] * tokens_first).expand(x.shape[:-1])
    return [(index >> digit) % 2 == 1 for digit in range((places.numel() - 1).bit_length())]


def is_changed(found: Tensor, clean: Tensor) -> Tensor:
    """Return where two runs of the same code differ, to the last bit. NaN in both runs is no difference."""
    return (found != clean) & ~(found.isnan() & clean.isnan())
