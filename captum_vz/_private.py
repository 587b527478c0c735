"""The private names of captum, torch, transformers and accelerate that this package leans on, and no others.

A new version may rename them without notice. `tests/test_private.py` says what is expected of each.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import starmap, takewhile
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from captum._utils.common import _format_additional_forward_args as format_additional_forward_args
from captum._utils.common import _format_tensor_into_tuples as format_tensor_into_tuples
from captum._utils.common import _run_forward as run_forward
from captum._utils.progress import NullProgress, progress
from captum._utils.typing import TargetType
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.dropout import _DropoutNd as DropoutModule
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What other modules take from here under the names of these imports.
__all__ = [
    "DropoutModule",
    "NullProgress",
    "TargetType",
    "TorchDispatchMode",
    "format_additional_forward_args",
    "format_tensor_into_tuples",
    "function_modes",
    "pop_function_mode",
    "progress",
    "push_function_mode",
    "run_forward",
    "tree_leaves",
    "tree_map",
]

# torch's own function, whatever the name torch.nn.functional.scaled_dot_product_attention refers to.
BUILTIN_ATTENTION = torch._C._nn.scaled_dot_product_attention
# A context manager: functions inside it pass by all function modes and subclasses.
without_function_modes = torch._C.DisableTorchFunction
# What torch.no_grad and torch.enable_grad call. Function modes see it.
SET_GRADIENTS = torch._C._set_grad_enabled
# Where a module keeps its buffers, and what else `nn.Module` itself keeps as attributes.
BUFFERS = "_buffers"
OWN_ATTRIBUTES = frozenset(vars(nn.Module())) - {BUFFERS}
# Where a config of transformers keeps the name of its attention function, apart from those of its parts.
ATTENTION_NAME = "_attn_implementation_internal"
# The module of the hooks by which transformers collects hidden states. They stay on a model once states were asked for.
OUTPUT_CAPTURING = "transformers.utils.output_capturing"
# Operators of torch that compute a softmax, and that copy or reshape a tensor, below all functions and modules.
SOFTMAX = frozenset({torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default})
COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten._unsafe_view.default})


def is_transformed() -> bool:
    """Whether the code runs under forward-mode gradients, or a transform of torch.func."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


# The parameters, the buffers and the submodules that a module itself holds.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter(BUFFERS)
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
# The hooks that are called before a module's forward, and after it, in their order.
Hooks: TypeAlias = OrderedDict[int, Callable[..., Any]]
forward_pre_hooks: Callable[[nn.Module], Hooks] = attrgetter("_forward_pre_hooks")
forward_hooks: Callable[[nn.Module], Hooks] = attrgetter("_forward_hooks")


def modules_of(module: nn.Module) -> list[nn.Module]:
    """What `module.modules()` returns, in the same order, in half the time. Each pass asks for it many times."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            waiting.extend(reversed(one._modules.values()))
    return list(found.values())


def forward_hooks_with_kwargs(module: nn.Module) -> list[Callable[..., Any]]:
    """Those of the hooks after a module's forward that are also called with keyword arguments."""
    hooks = list(module._forward_hooks.items())  # other threads may add hooks meanwhile
    return [hook for number, hook in hooks if number in module._forward_hooks_with_kwargs]


def without_hooks(module: nn.Module) -> nn.Module:
    """A copy of one module that shares everything below it, without hooks and without wrappers of its forward."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_modules"] = dict(module._modules)
    copied.__dict__["_forward_hooks"] = OrderedDict()
    copied.__dict__["_forward_pre_hooks"] = OrderedDict()
    copied.__dict__.pop("forward", None)
    return copied


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given, or the module itself."""
    return getattr(module, "_orig_mod", module)


def accelerate_hook(module: nn.Module) -> Any:
    """The hook of accelerate that moves what a module needs, or None."""
    return vars(module).get("_hf_hook")


def softmax_axis(node: Any) -> int:
    """The axis of a softmax, by its node in a graph of gradients. -1 for other nodes."""
    axis: int = getattr(node, "_saved_dim", -1)
    return axis - 2**64 if axis >= 2**63 else axis  # torch saves a negative axis without its sign


def saved_by(node: Any, name: str) -> Any:
    """What a node in a graph of gradients keeps of its operation by this name. None: nothing."""
    return getattr(node, f"_saved_{name}", None)


def node_number(node: Any) -> int:
    """The number of a node in a graph of gradients. Nodes are numbered as a thread makes them. Leaves come last."""
    number: int = node._sequence_nr()
    return number


def input_embeddings(model: Any) -> Any:
    """The module that makes word vectors of token ids. None: the model has none, or transformers does not know it."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        return None if find is None else find()
    except NotImplementedError:  # CLIP has two
        return None


def attention_name(config: Any) -> str | None:
    """The name of the attention function that a config of transformers asks for."""
    return getattr(config, "_attn_implementation", None)


def sdpa_of_transformers() -> Any:
    """The function that layers of transformers call if they are loaded with "sdpa"."""
    from transformers import AttentionInterface

    return AttentionInterface._global_mapping["sdpa"]


def eager_stance() -> tuple[Any, str, Any] | None:
    """Where torch's compiler keeps its stance, its name there, and the stance that compiles nothing. None: not loaded.

    `torch.compiler.set_stance` is not used: of two threads, the one that ends last would restore the other's stance.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or not hasattr(dynamo, "DynamoStance"):
        return None
    return dynamo, "_stance", dynamo.DynamoStance("force_eager")


def storage_id(x: Tensor) -> int:
    """A number that tensors have in common if they share memory."""
    return x.untyped_storage()._cdata


def batched(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`torch.func.vmap(function)(x)`, which an interruption always leaves whole.

    vmap itself begins and ends a transform in Python code. A signal there leaves it open, or ends an outer one.
    """
    functorch = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    # While the stack is deeper than now, each item ends a transform. Nothing runs before the items are taken.
    deeper = takewhile(depth.__lt__, iter(functorch.get_dynamic_layer_stack_depth, None))
    ends = starmap(functorch._vmap_decrement_nesting, map(().__mul__, deeper))
    take_all = deque[Any](maxlen=0).extend
    try:
        level = functorch._vmap_increment_nesting(len(x), "error")
        found = function(functorch._add_batch_dim(x, 0, level))
        return functorch._remove_batch_dim(found, level, len(x), 0)
    finally:  # one call, before which and in which Python looks for no signal
        take_all(ends)
