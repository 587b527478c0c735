"""The contexts of ablated pairs, and answers for the attention of a layer with contexts computed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.tensors import first_tensor, for_query_heads
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz.functional.interventions import contexts_after

if TYPE_CHECKING:
    from captum_vz._engine.capture.records import AttentionRecord
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


def contexts_of_pairs(problem: ReplayProblem, target: Tensor, group: Tensor) -> Tensor:
    """The contexts of pairs after the intervention, `(n, head * d_head)`, a group of one example at a time.

    Exact where little is left of a context. For zeroed values, `context_change` is faster.
    """
    attention, members = problem.site.attention, problem.members
    batch, out = problem.targets.batch[target], problem.targets.out[target]
    if attention.weights is None:
        raise CannotReplayError("its attention is computed inline, so its contexts cannot be computed")
    heads, sources = problem.site.shape.heads, problem.site.shape.sources
    contexts = attention.values.new_empty(len(target), heads, attention.values.shape[-1])
    number = batch * members.shape[1] + group
    for one in number.unique().tolist():
        pairs, (example, own_group) = number == one, divmod(one, members.shape[1])
        zeroed = torch.zeros(sources + 1, dtype=torch.bool, device=number.device)
        zeroed = zeroed.index_fill(0, members[example, own_group] % (sources + 1), True)[:-1] & problem.heads[:, None]
        own = slice(example, example + 1)
        weights = attention.weights[own, :, out[pairs]].to(attention.values.dtype)
        real = problem.site.source_mask[own]
        values = for_query_heads(attention.values[own], heads)
        changed = contexts_after(problem.intervention, weights, values, zeroed[None], real)
        contexts[pairs] = changed[0].transpose(0, 1)
    return contexts.flatten(1)


class _Answer:
    """Holds a context for the next run, and checks that the layer asks for it exactly once."""

    context: Tensor | None = None

    def take(self) -> Tensor:
        """The context, once."""
        if self.context is None:
            raise CannotReplayError("it asked for its attention more than once in one run")
        context, self.context = self.context, None
        return context

    def check_used(self) -> None:
        """Raise CannotReplayError unless the context was asked for."""
        if self.context is not None:
            raise CannotReplayError("it never asked for its attention's output")


class ModuleAnswer(nn.Module, _Answer):
    """Takes the place of the attention module, and returns its output for given contexts.

    With `projected`, what is given is the output itself.
    """

    def __init__(self, attention: AttentionRecord, projected: bool = False) -> None:
        super().__init__()
        self.attention = attention
        # In a tuple, so that it is not registered as a submodule.
        self.projection: tuple[Callable[[Tensor], Any], ...] = ()
        if attention.projection is not None and not projected:
            self.projection = (attention.projection,)
        returned = attention.output
        self.others = (None,) * (len(returned) - 1) if isinstance(returned, (tuple, list)) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = self.take()
        for projection in self.projection:
            output = first_tensor(projection(output))
        output = self.attention.batch_first(output)
        return output if self.others is None else (output, *self.others)


class AnswerContext(AttentionHandler, _Answer):
    """Answers the first attention call with a given context, and computes later ones."""

    def __init__(self, heads: Sequence[int]) -> None:
        self.heads = heads  # (head, d_head)

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if self.context is None:
            return call.compute(call.values)
        return self.take().unflatten(-1, tuple(self.heads)), None
