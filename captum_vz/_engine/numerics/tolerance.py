"""How two runs are compared: noise that shows what they depend on, and rules with bounds for when they are equal.

Bounds are given by the machine epsilon `eps` of the dtype. `eps**0.6` is 7e-5 in float32 and 4e-10 in float64, a
hundred times what another order of summation costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A difference of vectors loses its digits when less than 1 / CANCELLATION of the vector is left.
CANCELLATION = 64
TOO_LITTLE_LEFT = "too little is left of the context, so its rounding errors would show"
PROJECTED = 1e-5  # share of the largest entry by which a projection may differ when it is computed once more
OUTPUT_ROUNDING = 5  # upper bound on the rounding error of a layer's output, in units in the last place
# Share of the largest entry by which another attention function may differ from torch's (a quantised one does).
OTHER_ATTENTION = 0.03
HALF_PRECISION = 0.02  # share of a position's largest entry by which two runs of a layer in half precision may differ


class CannotReplayError(Exception):
    """A replay does not hold for this layer. The message says why. The next replay is tried."""


class Readings:
    """Numbers on a device that checks wait for. They are read together, because each read waits for the device."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Callable[[float], None]]] = []

    def add(self, number: Tensor, check: Callable[[float], None]) -> None:
        """Let `check` be called with a number when it is read. It raises an error if its condition does not hold."""
        self._waiting.append((number, check))

    def read(self) -> None:
        """Read all numbers, and check them in the order in which they were added."""
        waiting = self.forget()
        if waiting:
            device = waiting[0][0].device  # the layers of a model may be on several
            numbers = torch.stack([number.to(device) for number, _ in waiting]).tolist()
            for number, (_, check) in zip(numbers, waiting, strict=True):
                check(number)

    def forget(self) -> list[tuple[Tensor, Callable[[float], None]]]:
        """Give up what is waiting, and return it."""
        waiting, self._waiting = self._waiting, []
        return waiting


def check_reproduced(replayed: Tensor, clean: Tensor) -> None:
    """Raise CannotReplayError unless `replayed` is `clean (n, d)` to `eps**0.6` of each row's largest entry."""
    refuse_difference(torch.finfo(clean.dtype).eps, _largest_error(replayed, clean))


def _largest_error(replayed: Tensor, clean: Tensor) -> float:
    return ((replayed - clean).abs().amax(-1) / scale_of(clean)).max().item()


def scale_of(clean: Tensor) -> Tensor:
    """The largest entry of each position of `clean (n, d)`, at least the smallest normal number."""
    return clean.abs().amax(-1).clamp_min(torch.finfo(clean.dtype).tiny)


def refuse_difference(eps: float, error: float) -> None:
    """Raise CannotReplayError if the largest `error`, as a share of the entries at its position, is not rounding."""
    if not error < eps**0.6:
        raise CannotReplayError(f"with nothing zeroed, it differs from its clean output by {error:.1e} of its size")


def is_reproduced(replayed: Tensor, clean: Tensor) -> bool:
    """Whether `check_reproduced` passes at the positions where `clean` is finite. Padding may hold anything."""
    finite = clean.isfinite().all(-1)
    error = _largest_error(replayed[finite], clean[finite]) if finite.any() else 0.0
    return error < torch.finfo(clean.dtype).eps ** 0.6


def error_among_changes(error: Tensor, change: Tensor, scale: Tensor) -> Tensor:
    """How large the replay's error is in comparison with the change that zeroing makes. It must be at most 4 eps.

    A layer may add so little to its residual stream (LayerScale) that `check_reproduced` overlooks all of it. The error
    `(n,)`, each position's largest difference from its clean output with nothing zeroed, is at most 4 eps of the `scale
    (n,)`, its largest entry, or 1/32 of `change (n,)`, the largest difference that zeroing a value makes, not 0.
    """
    return torch.minimum(error / scale, error / (change / (128 * torch.finfo(scale.dtype).eps))).amax()


def refuse_large_error(eps: float, share: float) -> None:
    """Raise CannotReplayError if what `error_among_changes` returns is too large for a dtype's `eps`."""
    if not share <= 4 * eps:
        raise CannotReplayError("with nothing zeroed, it is wrong by more than 1/32 of the change that zeroing makes")


def is_finite(x: Tensor) -> bool:
    """Whether all numbers are finite. The extremes show it, in a fraction of the time that `isfinite` takes."""
    return not x.numel() or all(map(math.isfinite, torch.stack(x.aminmax()).tolist()))


def not_finite(dtype: torch.dtype) -> str:
    """What to say of values that are not finite, and what to do in this dtype."""
    advice = {
        torch.float16: "float16 overflows above 65504: load the model in bfloat16 or float32. ",
        torch.float64: "Some models hide tokens by the lowest float64, which is -inf in a softmax in float32: load the "
        "model in float32. ",
    }
    return f"values that are not finite (NaN or infinity) in {dtype}. {advice.get(dtype, '')}Check weights and inputs."


def same_numbers(expected: Tensor, found: Tensor, share: float) -> bool:
    """Whether two tensors of one size differ by at most `share` of the largest expected entry. NaN differs."""
    # Mostly they are equal bit for bit, which takes a fraction of the time to find.
    return torch.equal(expected, found) or bool((expected - found).abs().amax() <= share * expected.abs().amax())


def is_close_up_to_tf32(value: Tensor, expected: Tensor) -> bool:
    """Whether two computations of `(..., d)` agree to 1e-3 of each row, as they do if one of them uses TF32."""
    return bool(((value - expected).abs().amax(-1) <= 1e-3 * expected.abs().amax(-1)).all())


def is_same_sum(value: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
    """Whether two `(..., d)` are sums of the same numbers in any order: equal to 16 eps of each row of `scale`."""
    bound = scale.amax(-1) * 16 * torch.finfo(expected.dtype).eps
    return (value - expected).abs().amax(-1) <= bound


def is_same_function(found: Tensor, expected: Tensor) -> bool:
    """Whether two activations give the same output: equal to 16 eps of the tensor, its last row left out."""
    if found.shape != expected.shape:
        return False
    error = (found[:-1] - expected[:-1]).abs().max()
    return bool(error <= 16 * torch.finfo(expected.dtype).eps * expected[:-1].abs().max())


def folded_bound(expected: Tensor, clean: Tensor) -> Tensor:
    """Upper bound on the difference of the folded replay from `expected (n, d)`, for each position `(n,)`.

    It is `eps**0.6` of the change from `clean`, plus 64 eps of the largest entry.
    """
    eps = torch.finfo(clean.dtype).eps
    return eps**0.6 * (expected - clean).abs().amax(-1) + 64 * eps * expected.abs().amax(-1)


def is_within(found: Tensor, expected: Tensor, bound: Tensor) -> bool:
    """Whether `found` equals `expected (n, d)` up to `bound (n,)`."""
    return bool(((found - expected).abs().amax(-1) <= bound).all())


def check_folded(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Raise CannotReplayError unless `is_within` holds."""
    if not is_within(found, expected, bound):
        error = (found - expected).abs().max()
        raise CannotReplayError(f"the folded replay differs by {error:.1e} from the packed replay")


def is_close_in_half(again: Tensor, clean: Tensor) -> bool:
    """Whether two runs in half precision agree at each position, where both are finite."""
    # By position, because the first token's activations may be a thousand times as large as all others.
    finite = clean.isfinite() & again.isfinite()
    again, clean = again.where(finite, 0).float(), clean.where(finite, 0).float()
    return bool(((again - clean).abs().amax(-1) <= HALF_PRECISION * clean.abs().amax(-1)).all())


def is_same_attention(found: Any, expected: Tensor) -> bool:
    """Whether `found`, which may be anything, is nearly the attention that is `expected`, with NaN at its places."""
    if not isinstance(found, Tensor) or not torch.equal(found.isnan(), expected.isnan()):  # nor of its shape
        return False
    return bool((found - expected).nan_to_num(0).abs().amax() <= OTHER_ATTENTION * expected.nan_to_num(0).abs().amax())


def with_rounding(x: Tensor) -> Tensor:
    """`x (..., d)` with each entry off by the largest rounding error, with alternating signs along the last axis."""
    share = OUTPUT_ROUNDING * torch.finfo(x.dtype).eps
    factors = x.new_full(x.shape[-1:], 1 + share)
    factors[1::2] = 1 - share
    return x * factors


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
    """Return normal noise of `strength` times the largest entry of `x (..., d)`, one vector for all positions."""
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
    """Add normal noise to each position of `x (..., d)`, of `share` or `eps**0.5` times its mean absolute value."""
    size = x.abs().mean(-1, keepdim=True)  # at a position of zeros, the mean over all positions is used
    share = torch.finfo(x.dtype).eps ** 0.5 if share is None else share
    return x + share * size.where(size > 0, size.mean()) * fixed_normal(x)


def replaced(x: Tensor, other: Tensor, chosen: Tensor) -> Tensor:
    """Replace `x (..., d)` by `other` at the positions where `chosen (...)` is True."""
    return torch.where(chosen.view(*chosen.shape, *[1] * (x.dim() - chosen.dim())), other, x)


def binary_digits(x: Tensor, tokens_first: bool = False) -> list[Tensor]:
    """Mark the positions of `x (batch, ..., d)` whose index has a 1 as each binary digit, bool `x.shape[:-1]`."""
    places = x.shape[:1] if tokens_first or x.dim() == 2 else x.shape[1:-1]
    index = torch.arange(places.numel(), device=x.device).view(*places, *[1] * tokens_first).expand(x.shape[:-1])
    return [(index >> digit) % 2 == 1 for digit in range((places.numel() - 1).bit_length())]


def is_changed(found: Tensor, clean: Tensor) -> Tensor:
    """Return where two runs of the same code differ, to the last bit. NaN in both runs is no difference."""
    return (found != clean) & ~(found.isnan() & clean.isnan())
