"""The contexts of ablated pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz._engine.numerics.tensors import for_query_heads
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.replay.base import ReplayProblem


def context_change(problem: ReplayProblem, target: Tensor, group: Tensor) -> Tensor:
    """What each pair's context loses, the sum of weight times value over the group, `(n, head * d_head)`."""
    values = problem.site.attention.values.transpose(1, 2)  # (batch, in, key-value head, d_head)
    shared_by = problem.weights.shape[-1] // values.shape[2]
    batch = problem.targets.batch[target]
    change = values.new_zeros(())
    for number, source in enumerate(problem.members[batch, group].unbind(-1)):
        weight = problem.weights[target, source.clamp_min(0)] * (source >= 0)[:, None]
        value = values[batch, source.clamp_min(0)]
        lost = (weight.unflatten(-1, (-1, shared_by))[..., None] * value[:, :, None, :]).flatten(1)
        change = change + lost if number else lost
    return change


def context_without(problem: ReplayProblem, target: Tensor, group: Tensor) -> Tensor:
    """The contexts of pairs, summed over all other sources, `(n, head * d_head)`.

    Exact where little is left. `context_change` is faster.
    """
    attention = problem.site.attention
    batch, out = problem.targets.batch[target], problem.targets.out[target]
    members = problem.members[batch, group]
    if attention.weights is None:
        raise CannotReplayError("its attention is computed inline, so its contexts cannot be computed")
    weights = attention.weights[batch, :, out]  # (n, head, in)
    zeroed = torch.zeros(len(batch), weights.shape[-1] + 1, dtype=torch.bool, device=weights.device)
    zeroed = zeroed.scatter(1, members % zeroed.shape[1], True)[:, None, :-1] & problem.heads[:, None]
    weights = weights.masked_fill(zeroed, 0).to(attention.values.dtype)
    contexts = weights.new_empty(*weights.shape[:2], attention.values.shape[-1])
    for example in batch.unique().tolist():
        own = batch == example
        values = for_query_heads(attention.values[example], weights.shape[1], dim=0)
        contexts[own] = (weights[own].transpose(0, 1) @ values).transpose(0, 1)
    return contexts.flatten(1)
