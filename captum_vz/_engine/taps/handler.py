"""Attention calls, and the handler of this thread that answers them.

A tap sees an attention call and hands it to the handler of the thread that makes the call. The handler is kept in a
context variable. A thread without a handler computes attention as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_vz._engine.numerics.attention import Weights
from captum_vz._engine.numerics.tensors import for_query_heads, setting
from captum_vz._engine.numerics.tolerance import is_same_attention, same_numbers
from captum_vz._engine.taps.changes import Changes
from captum_vz._private import (
    BUILTIN_ATTENTION,
    OUTPUT_CAPTURING,
    accelerate_hook,
    forward_hooks,
    forward_hooks_with_kwargs,
    forward_pre_hooks,
)
from captum_vz.errors import RefusedError, UnsupportedLayerError


class AttentionTap(Protocol):
    """A place where the attention of a layer can be seen, and answered when the layer is run again."""

    def attach(self, modules: Sequence[nn.Module], changes: Changes) -> None:
        """Let attention calls of layers and their submodules reach the handler of the thread.

        All that is changed is noted in `changes`, which take it back. Threads without a handler compute as ever.
        """


@dataclass(frozen=True)
class AttentionCall:
    """One attention call, as a tap hands it to a handler."""

    module: nn.Module | None  # None: the attention function does not say which module calls it
    values: Tensor  # (batch, key-value head, in, d_head)
    # Computes this call for any values: the context (batch, out, head, d_head) and the weights (batch, head, out, in).
    compute: Callable[[Tensor], tuple[Tensor, Weights]]
    visible: Tensor | None = None  # the sources that the mask lets through, bool, broadcastable to the weights
    dropout: float = 0.0  # the rate of the weights
    explained: bool = False  # whether the weights are known to give the context: `compute` multiplies them by values
    obeys_mask: bool = True  # whether hidden sources are known to have no weight
    causal: bool = False  # whether no token sees a later one. `visible` is None then

    def weights_used(self, module: nn.Module, context: Tensor, weights: Weights) -> Weights:
        """The weights `(batch, head, out, in)` whose product with the values is `context`.

        These are nearly always the weights that the attention function returns. Some functions scale the context
        afterwards (Granite's sinks). Attention is linear in the values, so unit values then show the weights.
        UnsupportedLayerError: the attention function of `module` is not linear in its values.
        """
        if self.explained or not isinstance(weights, Tensor):
            return weights
        if _explain(weights, self.values, context) or not context.isfinite().all():
            return weights
        weights = self._weights_by_unit_values(weights.shape[1])
        if not _explain(weights, self.values, context):
            raise UnsupportedLayerError(
                f"The attention function of {type(module).__name__} returns no sums of its values, so the contribution "
                "of one value is undefined. Let it return the plain context, and do the rest after it. Or say where "
                "the values are: ValueZeroing(model, layer, values=layer.attn.to_v)."
            )
        return weights

    def _weights_by_unit_values(self, heads: int) -> Tensor:
        """Contexts of values that are one at one source. One call shows as many sources as a value has entries."""
        sources, width = self.values.shape[-2:]
        columns = []
        for start in range(0, sources, width):
            units = torch.eye(sources, dtype=self.values.dtype, device=self.values.device)[:, start : start + width]
            padded = functional.pad(units, (0, width - units.shape[1]))
            context, _ = self.compute(padded.expand_as(self.values))
            columns.append(context.unflatten(2, (heads, -1)).flatten(3)[..., : units.shape[1]])
        return torch.cat(columns, dim=-1).transpose(1, 2)


def _explain(weights: Tensor, values: Tensor, context: Tensor) -> bool:
    sums = (weights.to(values.dtype) @ for_query_heads(values, weights.shape[1])).transpose(1, 2)
    return same_numbers(context.flatten(2), sums.flatten(2), torch.finfo(context.dtype).eps ** 0.6)


class AttentionHandler:
    """Sees the attention calls of a running layer, and decides what they return: as here, what the model computes."""

    # The weights of the last call: multi_head_attention_forward returns them if asked to.
    last_weights: Weights | None = None

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        """Answer one attention call with a context `(batch, out, head, d_head)` and weights or None."""
        return call.compute(call.values)

    def on_enter(self, module: nn.Module) -> None:
        """Called before a submodule of the layer runs."""

    def on_exit(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> Any:
        """Called after a submodule of the layer runs. What this returns, unless None, replaces its output."""
        return None


thread_handler: ContextVar[AttentionHandler | None] = ContextVar("captum_vz_handler", default=None)
current_handler = thread_handler.get


# Makes a handler the handler of this thread inside a `with` block.
handled_by = partial(setting, thread_handler)


# Plain functions without state, so that a copy of a layer can carry them.
def on_submodule_enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """The hook that submodules call before they run."""
    if (handler := current_handler()) is not None:
        handler.on_enter(module)


def on_submodule_exit(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """The hook that submodules call when they return."""
    handler = current_handler()
    return None if handler is None else handler.on_exit(module, inputs, output)


def left_out_by_replays(layer: nn.Module) -> str:
    """What the user has put around a layer's own forward, and what to do. Empty: nothing."""
    forward, text = vars(layer).get("forward"), ""
    if forward is not None and accelerate_hook(layer) is None:
        name = f"{getattr(forward, '__qualname__', type(forward).__name__)} in the place of its forward"
        text = f"The layer carries {name}, which replays leave out. Make it part of the layer's class. "
    hooks = [f"the hook {getattr(hook, '__qualname__', type(hook).__name__)}" for hook, _ in output_hooks(layer)]
    same = "which must return the same in each run. "
    return text + (f"The layer's output goes through {' and '.join(hooks)}, {same}" if hooks else "")


def user_hooks(hooks: Mapping[int, Callable[..., Any]], but: str = "captum_vz.") -> list[Callable[..., Any]]:
    """The hooks of the user's among the `hooks` of a module, without those of the package `but`."""
    # Ours are not, nor are those of transformers that collect hidden states, and of torch that count operations.
    ours = ("captum_vz.", but, OUTPUT_CAPTURING, "torch.utils.module_tracker")

    def module_of(hook: Any) -> str:
        return getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or ""

    return [hook for hook in list(hooks.values()) if not module_of(hook).startswith(ours)]


def output_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The user's hooks after a module's forward, in their order, each with whether it takes keyword arguments."""
    with_kwargs = forward_hooks_with_kwargs(module)
    return [(hook, hook in with_kwargs) for hook in user_hooks(forward_hooks(module))]


def is_hooked(module: nn.Module, but: str = "captum_vz.") -> bool:
    """Whether a module calls hooks of the user's. They may change what it does, so they have to be called.

    Hooks of the package `but` do not count.
    """
    return any(user_hooks(hooks, but) for hooks in (forward_pre_hooks(module), forward_hooks(module)))


def is_hooked_by_captum(module: nn.Module) -> bool:
    """Whether a layer method of Captum keeps or replaces what a module takes or returns."""
    tables = forward_pre_hooks(module), forward_hooks(module)
    return any(len(user_hooks(hooks)) > len(user_hooks(hooks, but="captum.")) for hooks in tables)


def check_not_overridden(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    """Check that `function`, such as SageAttention's, computes torch's attention of these arguments.

    Small differences, such as those of a quantised attention, are accepted. No attention handler may be active.
    RefusedError: the function computes something else.
    """
    if function is BUILTIN_ATTENTION:
        return
    if not is_same_attention(function(*args, **kwargs), BUILTIN_ATTENTION(*args, **kwargs)):
        raise RefusedError(
            "Another function replaces torch.nn.functional.scaled_dot_product_attention and computes something else. "
            "Expected torch's own attention, because the weights cannot be read otherwise. Restore torch's function, "
            "or pass a model that calls it."
        )
