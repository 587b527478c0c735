"""The weights that an attention function multiplies its values by.

They are what it returns as its weights, nearly always. Where it scales its context afterwards (by a sink, as Granite's
sliding windows do), only the function itself can tell: it is linear in the values, so unit values show the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from captum_vz._engine.interface import Attend


def weights_used(module: nn.Module, attend: Attend, values: Tensor, context: Tensor, weights: Tensor) -> Tensor:
    """The weights `(batch, head, out, in)` that give `context (batch, out, head, d_head)` when applied to `values`.

    Raises:
        AssertionError: There are none: the function is not linear in its values.
    """
    if _explain(weights, values, context) or not context.isfinite().all():
        return weights
    weights = _on_unit_values(attend, values, weights.shape[1])
    assert _explain(weights, values, context), (
        f"The attention function of {type(module).__name__} does more than to sum values by weights, so that what a "
        "value contributes cannot be told apart. Let it return the plain context, and do the rest behind it."
    )
    return weights


def for_query_heads(shared: Tensor, heads: int, dim: int = 1) -> Tensor:
    """What key-value heads hold along `dim`, for each of the query heads, of which several may share one."""
    times = heads // shared.shape[dim]
    return shared if times == 1 else shared.repeat_interleave(times, dim=dim)


def same_numbers(expected: Tensor, found: Tensor, share: float) -> bool:
    """Whether two tensors of one size differ by no more than a share of the largest entry expected; NaN differs."""
    # Mostly they are the same to the bit, which takes a fraction of the time to see.
    return torch.equal(expected, found) or bool((expected - found).abs().amax() <= share * expected.abs().amax())


def _explain(weights: Tensor, values: Tensor, context: Tensor) -> bool:
    sums = (weights.to(values.dtype) @ for_query_heads(values, weights.shape[1])).transpose(1, 2)
    return same_numbers(context.flatten(2), sums.flatten(2), torch.finfo(context.dtype).eps ** 0.6)


def _on_unit_values(attend: Attend, values: Tensor, heads: int) -> Tensor:
    """The context of values that are one at one source, as many sources at a time as a value has entries."""
    sources, width = values.shape[-2:]
    columns = []
    for start in range(0, sources, width):
        units = torch.eye(sources, dtype=values.dtype, device=values.device)[:, start : start + width]
        padded = torch.nn.functional.pad(units, (0, width - units.shape[1]))
        context, _ = attend(padded.expand_as(values))
        columns.append(context.unflatten(2, (heads, -1)).flatten(3)[..., : units.shape[1]])
    return torch.cat(columns, dim=-1).transpose(1, 2)
