"""`torch.nn.functional.scaled_dot_product_attention`: torch.nn's layers, timm, home-made models.

While a pass runs, our function takes the place of that name. The call inside `multi_head_attention_forward` cannot be
seen in another way. torch's fused fast path for nn.TransformerEncoder is switched off. A thread without a handler runs
torch's own functions. A caller that imported the function by name is seen by a function mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from captum_vz._engine.numerics.attention import all_weights, causal_mask, weighted_values
from captum_vz._engine.numerics.tensors import mask_as_bool, once_a_pass
from captum_vz._engine.taps.changes import Changes, original
from captum_vz._engine.taps.handler import AttentionCall, check_not_overridden, current_handler, handled_by
from captum_vz._private import BUILTIN_ATTENTION, is_transformed

# The functions that ours replace while a pass runs: torch's own, or what a user has put in their place.
ATTENTION, MULTI_HEAD = "scaled_dot_product_attention", "multi_head_attention_forward"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as torch's function computes it, with its calls handed to the handler of this thread."""
    handler, torchs = current_handler(), original(F, ATTENTION)
    if handler is None or query.dim() not in (3, 4) or is_transformed():
        return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if query.dim() == 3:  # one head
        mask = attn_mask[:, None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        return attention(query[:, None], key[:, None], value[:, None], mask, dropout_p, is_causal, scale)[:, 0]
    with handled_by(None):
        check_not_overridden(torchs, query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    visible = None if attn_mask is None else once_a_pass(_visible, attn_mask)
    causal = is_causal and query.shape[2] == key.shape[2]
    if is_causal and not causal:
        attn_mask = once_a_pass(causal_mask, query.shape[2], key.shape[2], query.device)
    compute = partial(weighted_values, query, key, attn_mask, scale, causal)
    call = AttentionCall(None, value, compute, visible, dropout_p, explained=True, causal=causal)
    context, weights = handler.on_attention(call)
    handler.last_weights = weights
    return context.transpose(1, 2)


def _visible(mask: Tensor) -> Tensor:
    return mask_as_bool(mask)[(None,) * (4 - mask.dim())]


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """The function of torch, made to call scaled_dot_product_attention also where it is asked for the weights."""
    # Without weights to return, nor when torch comes back here from under a function mode, which it leaves for itself.
    handler, torchs = current_handler(), original(F, MULTI_HEAD)
    if handler is None or not kwargs.get("need_weights", True):
        return torchs(*args, **kwargs)
    output, _ = torchs(*args, **{**kwargs, "need_weights": False})
    weights, handler.last_weights = handler.last_weights, None
    if weights is None:
        return output, None
    weights = all_weights(weights)
    return output, weights.mean(1) if kwargs.get("average_attn_weights", True) else weights


class SdpaTap:
    """Sees attention that is called as `torch.nn.functional.scaled_dot_product_attention`."""

    def attach(self, modules: Sequence[nn.Module], changes: Changes) -> None:
        switch, before = torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled
        changes.share("fast path", lambda: (partial(switch, False), partial(switch, before())))
        changes.replace(F, ATTENTION, attention)
        changes.replace(F, MULTI_HEAD, _multi_head)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is BUILTIN_ATTENTION and current_handler() is not None:
            return functional.scaled_dot_product_attention(*args, **(kwargs or {}))  # SdpaTap's, while a pass runs
        return func(*args, **(kwargs or {}))


class SdpaByNameTap:
    """Sees attention whose caller imported torch's function by name.

    A function mode is asked at every function of torch, which takes time. So the mode is on only if a layer's code
    holds the function under a name of its own.
    """

    def attach(self, modules: Sequence[nn.Module], changes: Changes) -> None:
        if _holds_function(modules):
            changes.enter(_Mode())


def _holds_function(modules: Sequence[nn.Module]) -> bool:
    """Whether torch's function is an attribute of a module or of its class, or a global name of a method's file."""
    classes = {cls for kind in set(map(type, modules)) for cls in kind.__mro__ if cls not in nn.Module.__mro__}
    methods = [one for cls in classes for one in vars(cls).values() if isinstance(one, FunctionType)]
    files = {id(one.__globals__): one.__globals__ for one in methods}.values()
    static = [one.__func__ for cls in classes for one in vars(cls).values() if type(one) is staticmethod]
    held = chain(static, *(list(scope.values()) for scope in (*map(vars, modules), *map(vars, classes), *files)))
    return id(BUILTIN_ATTENTION) in map(id, held)  # a thousand names, so without a loop in Python
