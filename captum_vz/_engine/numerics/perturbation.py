"""TODO."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from captum_vz._engine.numerics.tolerance import is_reproduced

# How many times as large noise is as what it stands for: something that wins, its opposite, and what is no number.
PROBE_STRENGTHS = (64.0, -64.0, torch.nan)
# The same of those before the crowd, and behind it in the reverse order.
SMALL_STRENGTHS = (0.0, 1.0, -1.0, 8.0, -8.0)


def is_independent(run: Callable[[Tensor], Tensor], clean: Tensor, crowd: int) -> bool:
    """Whether those in `run(strengths (n,)) -> (n, ...)` hear nothing of each other; strength 0 gives `clean (...)`."""
    first: Tensor | None = None
    for noise in PROBE_STRENGTHS:
        strengths = torch.tensor([*SMALL_STRENGTHS, *[noise] * crowd, *reversed(SMALL_STRENGTHS)], device=clean.device)
        answer = run(strengths)
        before, behind = answer[: len(SMALL_STRENGTHS)], answer[-len(SMALL_STRENGTHS) :].flip(0)
        first = torch.cat([clean[None], before[1:]]) if first is None else first
        if not all(is_reproduced(one.flatten(0, -2), first.flatten(0, -2)) for one in (before, behind)):
            return False
    return True


def with_noise(x: Tensor, strengths: Tensor) -> Tensor:
    """`x (n, ..., features)` with noise in its place, so many times as large `(n,)`; as it is where that is 0."""
    strengths = strengths.to(x).view(-1, *[1] * (x.dim() - 1))
    return torch.where(strengths == 0, x, noise_like(x, 1.0) * strengths)


def noise_like(x: Tensor, noise: float) -> Tensor:
    """Noise in the form of `x (..., features)`, so many times as large: the same for all."""
    return noise * max_abs(x) * fixed_normal(x.new_empty(x.shape[-1:])).expand_as(x)


def max_abs(x: Tensor) -> Tensor:
    """How large a tensor's numbers are at most, those that are numbers; 1 where all are zero."""
    size = x.nan_to_num(0, 0, 0).abs().amax()
    return size.where(size > 0, 1)


def fixed_normal(x: Tensor) -> Tensor:
    """Numbers by fixed_normal, normally distributed, in the form of a tensor, and the same on any device."""
    own = torch.Generator("cpu").manual_seed(0)  # the user's is not to be drawn from
    return torch.randn(x.shape, generator=own, device="cpu").to(x)


def nudged(x: Tensor, share: float | None = None) -> Tensor:
    """`x (..., d)` with numbers by fixed_normal added to each position, of this share of its size; None: a small one."""
    size = x.abs().mean(-1, keepdim=True)
    share = torch.finfo(x.dtype).eps ** 0.5 if share is None else share
    return x + share * size.where(size > 0, size.mean()) * fixed_normal(x)


def replaced(x: Tensor, other: Tensor, chosen: Tensor) -> Tensor:
    """`x (..., d)` with `other` in its place at chosen positions `(...)`."""
    return torch.where(chosen.view(*chosen.shape, *[1] * (x.dim() - chosen.dim())), other, x)


def is_changed(found: Tensor, clean: Tensor) -> Tensor:
    """Where two runs of one code differ, to the last bit; NaN is no change where there was NaN."""
    return (found != clean) & ~(found.isnan() & clean.isnan())
