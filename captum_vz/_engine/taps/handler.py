"""Attention calls, the functions of torch and transformers that make them, and the handler that answers them.

A tap sees an attention call and hands it to the handler of the thread that makes the call. The handler is kept in a
context variable. A thread without a handler computes attention as ever.

While a pass runs, our function takes the place of `torch.nn.functional.scaled_dot_product_attention`. The call inside
`multi_head_attention_forward` cannot be seen in another way. torch's fused fast path for nn.TransformerEncoder is
switched off. A caller that imported the function by name is seen by a function mode.

The configs of the explained layers name another function of ours, which transformers' AttentionInterface looks up. For
models loaded with sdpa it computes what torch's function computes. For all others it computes the numbers by the
model's own `eager_attention_forward`, with its soft caps, sinks and position biases. A function that the user
registered is called itself, unless it computes what torch's function computes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_vz._engine.numerics import (
    Setting,
    Weights,
    all_weights,
    causal_mask,
    context_of,
    mask_as_bool,
    once_a_pass,
    weighted_values,
    weights_by_unit_values,
)
from captum_vz._engine.numerics.tolerance import is_same_attention, same_numbers
from captum_vz._engine.taps.changes import Changes, original
from captum_vz._private import ATTENTION_NAME, BUILTIN_ATTENTION, attention_name, is_transformed, sdpa_of_transformers
from captum_vz.errors import RefusedError, UnsupportedLayerError

# The functions that ours replace while a pass runs: torch's own, or what a user has put in their place.
ATTENTION, MULTI_HEAD = "scaled_dot_product_attention", "multi_head_attention_forward"
NAME = "captum_vz"  # of our function in transformers
EAGER = "eager_attention_forward"
MADE_OF = "captum_vz_made_of"  # the attribute of a mask that holds the mask of tokens which it was made of


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

        def explain(weights: Tensor) -> bool:
            sums = context_of(weights, self.values)
            return same_numbers(context.flatten(2), sums.flatten(2), torch.finfo(context.dtype).eps ** 0.6)

        if explain(weights) or not context.isfinite().all():
            return weights
        weights = weights_by_unit_values(self.compute, self.values, weights.shape[1])
        if not explain(weights):
            raise UnsupportedLayerError(
                f"The attention function of {type(module).__name__} returns no sums of its values, so the contribution "
                "of one value is undefined. Say where the values are: ValueZeroing(model, layer, "
                "values=layer.attn.to_v)."
            )
        return weights


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
handled_by = partial(Setting, thread_handler)  # makes a handler the handler of this thread inside a `with` block


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
    if torchs is not BUILTIN_ATTENTION:  # such as SageAttention's, which is quantised
        given: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        with handled_by(None):
            found = torchs(query, key, value, attn_mask, 0.0, is_causal, **given)
        if not is_same_attention(found, BUILTIN_ATTENTION(query, key, value, attn_mask, 0.0, is_causal, **given)):
            raise RefusedError(
                "Another function replaces torch.nn.functional.scaled_dot_product_attention and computes something "
                "else, so its weights cannot be read. Restore torch's function, or pass a model that calls it."
            )
    visible = None if attn_mask is None else once_a_pass(_visible, attn_mask)
    compute = partial(weighted_values, query, key, attn_mask, scale, is_causal)
    causal = is_causal and query.shape[2] == key.shape[2]
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
    # torch's own softmax gives NaN for a token that sees nothing.
    blind = weights.sum(-1, keepdim=True) == 0  # (batch, head, out, 1)
    weights = weights.masked_fill(blind, torch.nan)
    rows = blind.any(1).transpose(0, 1)  # the output has tokens first, and one sentence alone has no examples
    output = output.masked_fill(rows.reshape(*output.shape[:-1], 1), torch.nan)
    return output, weights.mean(1) if kwargs.get("average_attn_weights", True) else weights


def tap_sdpa(modules: Sequence[nn.Module], changes: Changes) -> None:
    """See attention that is called as `torch.nn.functional.scaled_dot_product_attention`."""
    switch, before = torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled
    changes.share("fast path", lambda: (partial(switch, False), partial(switch, before())))
    changes.replace(F, ATTENTION, attention)
    changes.replace(F, MULTI_HEAD, _multi_head)


def _answer_by_name(func: Any, args: Any, kwargs: Any) -> Any:
    if func is BUILTIN_ATTENTION and current_handler() is not None:
        return F.scaled_dot_product_attention(*args, **kwargs)  # ours, while a pass runs
    return func(*args, **kwargs)


def tap_sdpa_by_name(modules: Sequence[nn.Module], changes: Changes) -> None:
    """See attention whose caller imported torch's function by name.

    A function mode is asked at every function of torch, which takes time. So the mode is on only if torch's function is
    an attribute of a module or of its class, or a global name of a method's file.
    """
    classes = {cls for kind in set(map(type, modules)) for cls in kind.__mro__ if cls not in nn.Module.__mro__}
    methods = [one for cls in classes for one in vars(cls).values() if isinstance(one, FunctionType)]
    files = {id(one.__globals__): one.__globals__ for one in methods}.values()
    static = [one.__func__ for cls in classes for one in vars(cls).values() if type(one) is staticmethod]
    held = chain(static, *(list(scope.values()) for scope in (*map(vars, modules), *map(vars, classes), *files)))
    if id(BUILTIN_ATTENTION) in map(id, held):  # a thousand names, so without a loop in Python
        changes.answer_functions(_answer_by_name)


class LoadedAlias(str):
    """Our name, which also equals the name of the implementation whose numbers we compute.

    Some models ask for the name of their attention before they prepare its mask or its biases (DeepSeek's sparse
    attention, Falcon's ALiBi). Before transformers 5, layers look up no function if their implementation is eager, so
    there our name is not equal to that one.
    """

    loaded = "eager"
    looked_up = True

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (other == self.loaded and (self.looked_up or other != "eager"))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that is registered with transformers under our name."""
    handler, config = current_handler(), getattr(module, "config", None)
    loaded = (original(config, ATTENTION_NAME) or "eager") if hasattr(config, ATTENTION_NAME) else None
    of_user = _function_of_user(loaded)
    by_torch = loaded == "sdpa" or of_user is not None
    given = attention_mask if of_user is None or getattr(attention_mask, "ndim", 0) == 4 else None
    biases, out, sources = kwargs.get("position_bias"), query.shape[2], key.shape[2]
    if given is not None and given.shape[-1] > sources:  # attention functions may cut it
        given = given[..., :sources]
    # Whether a function other than eager attention, which is given no mask, hides what follows a token.
    by_name = kwargs.get("is_causal")
    hides_later = given is None and (by_torch or loaded != "eager") and out > 1
    hides_later = hides_later and bool(getattr(module, "is_causal", True) if by_name is None else by_name)
    causal = hides_later and by_torch and biases is None and out == sources
    if hides_later and not causal:
        given = once_a_pass(causal_mask, out, sources, query.device)
    mask = given if by_torch else _mask_to_add(loaded, given, query)
    function = of_user or (sdpa_of_transformers() if by_torch else _eager_function(module))

    def run(mask: Tensor | None, values: Tensor, dropout: float = 0.0) -> Any:
        return function(module, query, key, values, mask, dropout=dropout, **kwargs)[:2]

    def compute(values: Tensor) -> tuple[Tensor, Weights]:
        if not by_torch:
            return run(mask, values, dropout)
        biased = _with_biases(mask, biases)
        context, weights = weighted_values(query, key, biased, kwargs.get("scaling"), causal, values)
        return context.contiguous(), weights  # some modules view it

    def compute_as_user(values: Tensor) -> tuple[Tensor, Tensor]:
        with handled_by(None):
            context = run(attention_mask, values, dropout)[0]
        return context, query.new_full((*query.shape[:3], key.shape[2]), torch.nan)  # found by `weights_used`

    if handler is None:
        return run(attention_mask if by_torch else mask, value, dropout)
    if of_user is not None and not same_numbers(
        compute(value)[0], compute_as_user(value)[0], torch.finfo(value.dtype).eps ** 0.6
    ):
        visible = None if given is None else mask_as_bool(given)
        call = AttentionCall(module, value, compute_as_user, visible, dropout, obeys_mask=False)
    else:
        if loaded != "sdpa" and not module.training:  # eager functions drop nothing in eval mode, whatever the rate
            dropout = 0.0
        visible = None if mask is None else once_a_pass(mask_as_bool, mask)
        call = AttentionCall(module, value, compute, visible, dropout, by_torch, causal=causal)
    context, weights = handler.on_attention(call)
    # In a plain run, torch's function alone returns no weights.
    return context, None if loaded == "sdpa" or weights is None else all_weights(weights)


def _eager_function(module: nn.Module) -> Callable[..., Any]:
    """The function that computes a module's attention if no other implementation is selected.

    This is the function that the module's forward names, because a file may hold one for each kind of attention (Llama
    4). If the forward names none, it is the function that is defined in the module of its class. UnsupportedLayerError:
    there is none, or the forward names several.
    """
    classes, name = type(module).__mro__, type(module).__name__
    for cls in classes:
        forward = inspect.unwrap(vars(cls).get("forward", None))
        if not inspect.isfunction(forward):
            continue
        names = forward.__code__.co_names
        named = [one for one in names if one.endswith(EAGER) and one in forward.__globals__]
        if len(named) > 1:
            raise UnsupportedLayerError(
                f"The forward of the attention module {name} names {' and '.join(named)}, so it is unknown which "
                "computes its attention. Let it name one function."
            )
        if named:
            return forward.__globals__[named[0]]
        if "super" not in names:
            break
    for cls in classes:
        eager = getattr(sys.modules.get(cls.__module__), EAGER, None)
        if eager is not None:
            return eager
    raise UnsupportedLayerError(
        f"The attention module {name} asks transformers' AttentionInterface for its attention, but no {EAGER} shows "
        "its weights. Define that function in the same file as the class."
    )


def _mask_to_add(loaded: str | None, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask as eager attention adds it to the scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool and loaded != "eager":  # it was made for another implementation
        zero = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, zero, torch.finfo(query.dtype).min)
    # Many models compute the softmax in float32. There float64's smallest number is -inf, and a row of -inf gives NaN.
    return mask.clamp_min(torch.finfo(torch.float32).min) if mask.dtype == torch.float64 else mask


def _with_biases(mask: Tensor | None, biases: Tensor | None) -> Tensor | None:
    """A mask for torch's function that adds biases of positions, as transformers makes it."""
    if mask is None or biases is None:
        return mask if biases is None else biases
    return biases.masked_fill(~mask, torch.finfo(biases.dtype).min) if mask.dtype == torch.bool else mask + biases


def _mask_function(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """The mask that the loaded implementation is given. None: transformers knows no mask for it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    function = ALL_MASK_ATTENTION_FUNCTIONS.get(getattr(attention_name(config), "loaded", "eager"))
    mask = None if function is None else function(*args, config=config, **kwargs)
    if mask is not None and kwargs.get("attention_mask") is not None:
        setattr(mask, MADE_OF, kwargs["attention_mask"])
    return mask


@cache
def _register() -> None:
    """Make our name known to transformers. Imported here, because the import takes longer than all others."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask_function)


def _looks_up_eager() -> bool:
    """Whether layers ask transformers for their function whichever implementation is named."""
    from transformers import AttentionInterface

    return hasattr(AttentionInterface, "get_interface")


def _function_of_user(name: Any) -> Callable[..., Any] | None:
    """The attention function of this name, if the user registered it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Those of transformers compute what eager attention computes. So do its hub's kernels, whose names have a slash.
    known = not isinstance(name, str) or name in (NAME, "eager") or "/" in name
    function = None if known else ALL_ATTENTION_FUNCTIONS.get(name)
    code = getattr(function, "func", function)
    return None if str(getattr(code, "__module__", "transformers.")).startswith("transformers.") else function


def _reads_our_name(module: nn.Module) -> bool:
    """Whether a module may look up our function. Before transformers 5, ModernBERT's file has a table of its own."""
    file = type(module).__module__
    of_users = not file.startswith("transformers.")
    return of_users or _looks_up_eager() or hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS")


def tap_transformers(modules: Sequence[nn.Module], changes: Changes) -> None:
    """See attention that layers call through transformers' AttentionInterface."""
    configs: dict[int, Any] = {}
    for module in modules:
        # A missing attribute takes a module long. Most modules are torch's, whose classes have no config.
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        config = vars(module).get("config") if of_torch else getattr(module, "config", None)
        if hasattr(config, ATTENTION_NAME) and _reads_our_name(module):
            configs[id(config)] = config
    for config in configs.values():
        _register()
        name, loaded = LoadedAlias(NAME), original(config, ATTENTION_NAME)
        name.loaded = loaded if loaded == "sdpa" or _function_of_user(loaded) is not None else "eager"
        name.looked_up = _looks_up_eager()
        changes.replace(config, ATTENTION_NAME, name)
