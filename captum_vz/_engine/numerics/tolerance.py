"""TODO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# To how small a part a context, or a residual stream, may shrink before what is left of it is not told by a difference.
CANCELLATION = 64
TOO_LITTLE_LEFT = "nearly nothing is left of what it takes a difference from"
ANOTHER_FUNCTION = 0.03
# By how many units in the last place rounding may move what a layer returns: more than it does, lest it be overlooked.
ROUNDINGS = 5


class CannotReplay(Exception):
    """This way of replaying does not give back the layer's clean output; the message says how."""


class SameAgainError(CannotReplay):
    """This way of replaying would do what one before it did."""


class TooFewError(CannotReplay):
    """This way of replaying gains nothing here, the rows being few."""


def is_cancelled(left: Tensor, context: Tensor) -> Tensor:
    """Where what is left of contexts `(..., features)` is so little that the rounding of a difference shows in it.

    A norm behind the attention, or a distance between directions, would make a whole vector of that rounding.
    """
    return left.abs().amax(-1) < context.abs().amax(-1) / CANCELLATION


def check_reproduced(replayed: Tensor, clean: Tensor) -> None:
    """Raise CannotReplay unless `replayed` equals `clean` `(n, d)` but for rounding.

    The bound is on each position's largest difference over its largest entry: 7e-5 in float32, 4e-10 in float64,
    a hundred times what another order of summation costs.
    """
    scale = clean.abs().amax(-1)
    error = ((replayed - clean).abs().amax(-1) / scale.clamp_min(torch.finfo(clean.dtype).tiny)).max().item()
    if not error < torch.finfo(clean.dtype).eps ** 0.6:
        raise CannotReplay(
            f"with nothing zeroed it differs from the layer's own output by {error:.1e} of its size"
        )


def is_reproduced(replayed: Tensor, clean: Tensor) -> bool:
    """Whether `check_reproduced` finds nothing, at those positions that are finite: padding may be of anything."""
    finite = clean.isfinite().all(-1)
    if not finite.any():
        return True
    try:
        check_reproduced(replayed[finite], clean[finite])
    except CannotReplay:
        return False
    return True


def check_against_changes(off: Tensor, change: Tensor, clean: Tensor) -> None:
    """Raise CannotReplay where a position is off by much of what zeroing changes at it, if by more than rounding.

    For what a layer adds may be so little beside what it carries on (LayerScale) that `check_reproduced` overlooks all
    of it. Largest differences `(n)`: of the replay with nothing zeroed from `clean (n, d)`, and of those with a value
    zeroed from that replay.
    """
    wrong = (off > 4 * torch.finfo(clean.dtype).eps * clean.abs().amax(-1)) & (off > change / 32)
    if wrong.any():
        raise CannotReplay(
            f"with nothing zeroed it is off by {(off / change)[wrong].amax():.1e} of what zeroing a value changes"
        )


def same_numbers(expected: Tensor, found: Tensor, share: float) -> bool:
    """Whether two tensors of one size differ by no more than a share of the largest entry expected; NaN differs."""
    # Mostly they are the same to the bit, which takes a fraction of the time to see.
    return torch.equal(expected, found) or bool((expected - found).abs().amax() <= share * expected.abs().amax())


def is_close_up_to_tf32(value: Tensor, expected: Tensor) -> bool:
    """Whether two computations of `(..., d)` agree, be one of them in a lower precision (as TF32 is)."""
    return bool(((value - expected).abs().amax(-1) <= 1e-3 * expected.abs().amax(-1)).all())


def is_same_sum(value: Tensor, expected: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two `(..., d)` are the same sum of the same numbers, taken in whatever order."""
    bound = (expected.abs() if scale is None else scale).amax(-1) * 16 * torch.finfo(expected.dtype).eps
    return bool(((value - expected).abs().amax(-1) <= bound).all())


def is_same_module_output(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    error = (found[:-1] - expected[:-1]).abs().max()
    return bool(error <= 16 * torch.finfo(expected.dtype).eps * expected[:-1].abs().max())


def folded_bound(expected: Tensor, clean: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """By how much a run may miss what is `expected (n, d)`, seen from `clean`: by rounding, of each position's size."""
    eps = torch.finfo(clean.dtype).eps
    # A product of bfloat16 is off by some eps of it, other sums by hundreds.
    share = 8 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else eps**0.6
    return share * (expected - clean).abs().amax(-1) + 64 * eps * expected.abs().amax(-1)


def check_folded(moved: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Raise CannotReplay unless `moved` is `expected (n, d)` but for `bound (n)`."""
    error = (moved - expected).abs().amax(-1)
    if not (error <= bound).all():
        raise CannotReplay(f"the fast way differs by {error.max():.1e} from the general way")


def is_close_in_half(again: Tensor, clean: Tensor) -> bool:
    there = clean.isfinite() & again.isfinite()
    again, clean = again.where(there, 0).float(), clean.where(there, 0).float()
    return bool((again - clean).abs().amax() <= 0.02 * clean.abs().amax())


def is_same_attention(found: Any, expected: Tensor) -> bool:
    """Whether what a mode gave, which may be anything, is nearly `expected`; NaN is to be where it is there."""
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if not torch.equal(found.isnan(), expected.isnan()):
        return False
    return bool((found - expected).nan_to_num(0).abs().amax() <= ANOTHER_FUNCTION * expected.nan_to_num(0).abs().amax())


def with_rounding(x: Tensor) -> Tensor:
    """`x` with all its entries off by rounding, every second in the other direction."""
    share = ROUNDINGS * torch.finfo(x.dtype).eps
    factors = x.new_full(x.shape[-1:], 1 + share)
    factors[1::2] = 1 - share
    return x * factors
