"""TODO."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.tensors import mask_as_bool
from captum_vz._engine.taps.guards import BUILTIN, check_attention_not_overridden
from captum_vz._engine.taps.handler import _handler, handled_by

EAGER = "eager_attention_forward"
# Configs that carry our name now: id -> (config, the implementation to put back, how many passes need it).
# Counted, because two threads may explain one model at the same time.
_selected: dict[int, tuple[Any, str | None, int]] = {}
_selecting = threading.Lock()


class EagerAlias(str):
    """Our name, to be found under it, but equal to "eager" as well.

    Some models ask what their attention is called before they prepare its mask (DeepSeek's sparse attention), and are
    to do for us what they do for the function that we call.
    """

    def __eq__(self, other: object) -> bool:
        return other == "eager" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


NAME = EagerAlias("captum_vz")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function registered with transformers under our name."""
    mask = _additive(attention_mask, module, query, key, kwargs.get("is_causal"))
    eager = _eager_function(module)

    def attend(values: Tensor) -> tuple[Tensor, Tensor]:
        context, weights = eager(module, query, key, values, mask, dropout=dropout, **kwargs)[:2]
        return context, weights

    listener = _handler.get()
    if listener is None:
        return attend(value)
    if _original_implementation(module) != "eager":  # which calls functions that modes would have seen
        with handled_by(None):
            check_attention_not_overridden(BUILTIN, query, key, value, enable_gqa=True)
    dropout = dropout if module.training else 0.0  # eager functions drop nothing in eval mode, whatever the rate
    return listener.attend(module, attend, value, None if mask is None else mask_as_bool(mask), dropout)


def _eager_function(module: nn.Module) -> Callable[..., Any]:
    """The function that computes a module's attention where no other is asked for.

    The one that its forward names, for a file of several kinds of attention may have one for each (Llama 4); or else,
    its forward leaving that to a method, the one that stands beside its class.
    """
    classes, name = type(module).__mro__, type(module).__name__
    for cls in classes:
        forward = inspect.unwrap(vars(cls).get("forward", None))
        if not inspect.isfunction(forward):
            continue
        names = forward.__code__.co_names
        named = [one for one in names if one.endswith(EAGER) and one in forward.__globals__]
        assert len(named) <= 1, (
            f"The forward of the attention module {name} names {' and '.join(named)}, so that which of them computes "
            "its attention is not known: let it name one."
        )
        if named:
            return forward.__globals__[named[0]]
        if "super" not in names:
            break
    for cls in classes:
        eager = getattr(sys.modules.get(cls.__module__), EAGER, None)
        if eager is not None:
            return eager
    raise AssertionError(
        f"The attention module {name} asks transformers' AttentionInterface for its attention, but its forward names "
        f"no function {EAGER} (nor one whose name ends so), and {type(module).__module__} defines none, so that its "
        "weights cannot be read. Define that function beside the class."
    )


def _additive(
    mask: Tensor | None, module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None
) -> Tensor | None:
    """The mask as eager attention adds it to the scores.

    A mask made for another implementation arrives as booleans, or, where that implementation would have made the mask
    itself from the module's `is_causal`, not at all. What a model hands to its own eager attention is left as it is.
    """
    eager = _original_implementation(module) == "eager"
    if mask is None:
        if eager:
            return None
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if not causal or query.shape[2] == 1:
            return None
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.dtype == torch.bool and not eager:
        zero = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, zero, torch.finfo(query.dtype).min)
    # Many models take the softmax in float32, where float64's smallest number is -inf, and a row of nothing else NaN.
    return mask.clamp_min(torch.finfo(torch.float32).min) if mask.dtype == torch.float64 else mask


def _original_implementation(module: nn.Module) -> str | None:
    entry = _selected.get(id(getattr(module, "config", None)))
    return entry[1] if entry else None


@cache
def _register() -> None:
    """Make our name known to transformers; imported here, for it takes longer than all else."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)


def _refuse_users_own(config: Any) -> None:
    """Refuse a function that a user registered: its numbers may be any, and eager attention's would be another model's.

    What comes with transformers computes what eager attention does; so do the kernels of its hub, which have a slash.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = config._attn_implementation_internal
    function = ALL_ATTENTION_FUNCTIONS.get(name) if isinstance(name, str) and name not in (NAME, "eager") else None
    function = getattr(function, "func", function)
    assert function is None or "/" in name or str(function.__module__).startswith("transformers."), (
        f"The model's attention is {name!r}, a function of {function.__module__} that was registered with "
        "transformers' AttentionInterface. The weights are read from the model's eager attention, which need not "
        "compute the same: call model.set_attn_implementation('eager') first, if that is what you want to explain."
    )


@contextmanager
def attention_selected(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let the attention of `layers` run through this module for the length of a `with` block.

    Raises:
        AssertionError: It is a function of the user's own.
    """
    found: list[Any] = [getattr(module, "config", None) for layer in layers for module in layer.modules()]
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation_internal")}
    if configs:
        _register()
    for config in configs.values():
        _refuse_users_own(config)
    with _selecting:
        for key, config in configs.items():
            _, original, count = _selected.get(key, (config, config._attn_implementation_internal, 0))
            _selected[key] = (config, original, count + 1)
            config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        with _selecting:
            for key, config in configs.items():
                _, original, count = _selected.pop(key)
                if count > 1:
                    _selected[key] = (config, original, count - 1)
                else:
                    config._attn_implementation_internal = original
