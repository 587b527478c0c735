"""Noise, and whether what runs side by side, positions or copies of an example, hears anything of it.

Experts choose among positions, or have room for few. So some run beside a crowd that all want the same, loudly. Those
that are to hear nothing of it are as in the clean pass, or of noise less loud, for they may want what no clean one
does; and stand before the crowd and behind it, for who comes first may be served first, or last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from captum_vz._engine.replay import is_reproduced

# How many times as large noise is as what it stands for: something that wins, its opposite, and what is no number.
NOISES = (64.0, -64.0, torch.nan)
# The same of those before the crowd, and behind it in the reverse order.
QUIET = (0.0, 1.0, -1.0, 8.0, -8.0)


def are_apart(run: Callable[[Tensor], Tensor], clean: Tensor, crowd: int) -> bool:
    """Whether those in `run(strengths (n,)) -> (n, ...)` hear nothing of each other; strength 0 gives `clean (...)`."""
    first: Tensor | None = None
    for noise in NOISES:
        strengths = torch.tensor([*QUIET, *[noise] * crowd, *reversed(QUIET)], device=clean.device)
        answer = run(strengths)
        before, behind = answer[: len(QUIET)], answer[-len(QUIET) :].flip(0)
        first = torch.cat([clean[None], before[1:]]) if first is None else first
        if not all(is_reproduced(one.flatten(0, -2), first.flatten(0, -2)) for one in (before, behind)):
            return False
    return True


def disturbed(x: Tensor, strengths: Tensor) -> Tensor:
    """`x (n, ..., features)` with noise in its place, so many times as large `(n,)`; as it is where that is 0."""
    strengths = strengths.to(x).view(-1, *[1] * (x.dim() - 1))
    return torch.where(strengths == 0, x, noise_like(x, 1.0) * strengths)


def noise_like(x: Tensor, noise: float) -> Tensor:
    """Noise in the form of `x (..., features)`, so many times as large: the same for all."""
    return noise * largest(x) * chance(x.new_empty(x.shape[-1:])).expand_as(x)


def largest(x: Tensor) -> Tensor:
    """How large a tensor's numbers are at most, those that are numbers; 1 where all are zero."""
    size = x.nan_to_num(0, 0, 0).abs().amax()
    return size.where(size > 0, 1)


def chance(x: Tensor) -> Tensor:
    """Numbers by chance, normally distributed, in the form of a tensor, and the same on any device."""
    own = torch.Generator("cpu").manual_seed(0)  # the user's is not to be drawn from
    return torch.randn(x.shape, generator=own, device="cpu").to(x)
