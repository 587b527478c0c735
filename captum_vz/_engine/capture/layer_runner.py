"""TODO."""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from captum_vz._engine.numerics.tolerance import CannotReplay

# In how many ways a layer may fail that is run on other arguments than it was.
LAYER_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)
# All of which say that a way of replaying does not serve.
FAILURES = (CannotReplay, *LAYER_ERRORS)


def run_again(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a layer's own code returns for other arguments than those of the clean pass.

    Raises:
        CannotReplay: It does not take them.
        torch.OutOfMemoryError: It has no memory for them, which is no reason to think so.
    """
    try:
        return layer.forward(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except LAYER_ERRORS as error:
        raise CannotReplay(str(error)) from error
    except AssertionError as error:  # of the layer about them, and not of a user's misuse
        raise CannotReplay(f"it asserts something else of its arguments {error}".rstrip()) from error


def without_hooks(module: nn.Module) -> nn.Module:
    """A copy of one module that shares everything below it, without hooks and without wrappers of its forward."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_modules"] = dict(module._modules)
    copied.__dict__["_forward_hooks"] = OrderedDict()
    copied.__dict__["_forward_pre_hooks"] = OrderedDict()
    copied.__dict__.pop("forward", None)
    return copied


def with_submodules_replaced(module: nn.Module, stand_ins: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of a module in which others stand for some that are inside of it. The module itself is not touched."""
    if module in stand_ins:
        return stand_ins[module]
    children = {name: child for name, child in module._modules.items() if child is not None}
    copies = {name: with_submodules_replaced(child, stand_ins) for name, child in children.items()}
    if all(copies[name] is child for name, child in children.items()):
        return module
    copied = without_hooks(module)
    copied._modules.update(copies)
    return copied


def without_caches(arguments: Any) -> Any:
    """A layer's arguments with every key-value cache left out, so that running the layer again grows none.

    And what it hands to the layers above in a dict of another kind (Gemma 4 does its values) in a plain one, which each
    run has for itself.
    """
    return tree_map(_without_cache, arguments, is_leaf=_is_cache)


def _without_cache(value: Any) -> Any:
    if _is_cache(value):
        return None
    return dict(value) if isinstance(value, UserDict) else value


def _is_cache(value: Any) -> bool:
    # Not imported: who passes a cache has imported its module.
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def instead(old: Tensor, new: Tensor, value: Any) -> Any:
    """What stands in the place of an argument: `new` for `old`, any other as it is."""
    return new if value is old else value
