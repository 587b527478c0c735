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


def _explain(weights: Tensor, values: Tensor, context: Tensor) -> bool:
    shared_by = weights.shape[1] // values.shape[1]
    sums = weights.to(values.dtype) @ values.repeat_interleave(shared_by, dim=1)
    difference = (sums.transpose(1, 2).flatten(2) - context.flatten(2)).abs().amax()
    return bool(difference <= torch.finfo(context.dtype).eps ** 0.6 * context.abs().amax())


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
