"""TODO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.tensors import for_query_heads
from captum_vz._engine.numerics.tolerance import same_numbers

# (values) -> (context (batch, out, head, d_head), weights (batch, head, out, in))
Attend = Callable[[Tensor], tuple[Tensor, Tensor]]
OUTPUT_CAPTURING = "transformers.utils.output_capturing"


class AttentionHandler(ABC):
    """Whoever is told of the attention calls of a running layer, and decides what they return."""

    @abstractmethod
    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        """Answer one attention call; `attend(values)` computes it as the model does.

        `module` is the attention module, None where the caller does not say; `visible` what the mask lets through.
        """

    def entered(self, module: nn.Module) -> None:
        """See a submodule of the running layer begin; most listeners do not care."""
        return

    def returned(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> Any:
        """See a submodule of the running layer return; what is returned here, if anything, takes its output's place."""
        return None


_handler: ContextVar[AttentionHandler | None] = ContextVar("captum_vz_listener", default=None)


def current_handler() -> AttentionHandler | None:
    """The listener of this thread, or None."""
    return _handler.get()


def set_handler(listener: AttentionHandler | None) -> None:
    """Make `listener` the one that this thread's attention calls are told to, until the next call of this function."""
    _handler.set(listener)


@contextmanager
def handled_by(listener: AttentionHandler | None) -> Iterator[None]:
    """Like `set_handler`, for the length of a `with` block."""
    token = _handler.set(listener)
    try:
        yield
    finally:
        _handler.reset(token)


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


# Plain functions without state, so that a copy of a layer can carry them.
def _entered(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    listener = current_handler()
    if listener is not None:
        listener.entered(module)


def _returned(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    listener = current_handler()
    return None if listener is None else listener.returned(module, inputs, output)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module carries hooks of a user's, which may change what it does, and have to be called.

    Not those of transformers that collect hidden states, which stay for good once some were asked for; nor ours.
    """
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(hook not in (_entered, _returned) and getattr(hook, "__module__", "") != OUTPUT_CAPTURING for hook in hooks)
