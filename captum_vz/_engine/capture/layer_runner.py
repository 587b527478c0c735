"""Run a recorded layer's own code again, with other arguments, attention or submodules, or in float32.

Zeroing one value changes 1e-3 to 1e-6 of the output. This is smaller than bfloat16's rounding, so a layer in half
precision is recorded once more in float32, without touching the model's own parameters.
"""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captum_vz._engine.capture import AttentionRecord, LayerRecord, Recorder
from captum_vz._engine.numerics import (
    Weights,
    first_tensor,
    forgetting,
    hidden_states,
    inference_mode,
    is_out_of_memory,
    map_each,
)
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_close_in_half
from captum_vz._engine.taps.changes import ModuleState, left_out_by_replays, without_autocast
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler, handled_by
from captum_vz._private import accelerate_hook, own_modules, tree_leaves, tree_map, without_hooks
from captum_vz.errors import RefusedError, UnsupportedLayerError

T = TypeVar("T")
Module = TypeVar("Module", bound=nn.Module)
# Errors that a layer may raise on arguments that it does not expect. Other classes of errors pass through to the user,
# because they may have another cause, such as a timeout.
LAYER_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration)


@dataclass(frozen=True)
class Streams:
    """The layout of a layer whose tokens have several vectors each (hyper-connections, AltUp), seen as one vector."""

    axis: int  # of the layer's tensors. With one stream, it has length 1
    count: int

    def tokens(self, x: Tensor) -> Tensor:
        """A tensor of the layer as `(batch, tokens, stream * d)`."""
        return x.movedim(self.axis, 2).flatten(2)

    def restore(self, x: Tensor) -> Tensor:
        """`(batch, tokens, stream * d)` back in the layer's layout."""
        return x.unflatten(2, (self.count, -1)).movedim(2, self.axis)


def find_streams(record: LayerRecord, attention: AttentionRecord) -> Streams | None:
    """The streams of a layer, or None if its tokens have one vector each.

    UnsupportedLayerError: tokens and streams have the same number, so that either axis could hold the streams.
    """
    output = first_tensor(record.output)
    if output is None or output.dim() != 4 or not record.states or record.states[0].shape != output.shape:
        return None
    batch, _, out, sources = attention.shape
    if output.shape[:3] == (batch, 1, out):  # one prompt for each image (SAM)
        return Streams(1, 1)
    # Other sources than the tokens: summaries of them (DeepSeek-V4), or a cache.
    if out != sources or len(record.attentions) > 1:
        return None
    # (batch, tokens, stream, d) in DeepSeek-V4, (stream, batch, tokens, d) in Gemma 3n.
    axes = [axis for axis in (2, 0) if output.shape[axis] > 1 and output.movedim(axis, 2).shape[:2] == (batch, out)]
    if len(axes) > 1:
        raise UnsupportedLayerError(
            f"The layer {record.name} carries {tuple(output.shape)}, whose axes of tokens and streams cannot be "
            "distinguished. Pass another number of examples."
        )
    return Streams(axes[0], output.shape[axes[0]]) if axes else None


class LayerRunner:
    """Runs the code of a recorded layer, without key-value caches, and the user's hooks that change its output.

    With a `layout`, the hidden states in its `arguments` are one vector a token. Submodules of `layer` may be replaced.
    """

    def __init__(self, record: LayerRecord, layout: Streams | None = None) -> None:
        self._record = record
        self.layer = without_hooks(record.layer)
        self.arguments: tuple[Any, Any] = without_caches((record.args, record.kwargs))
        self._layout = layout
        if layout is not None:
            shape, (args, kwargs) = record.first_output.shape, self.arguments
            named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            self._states = {name for name, x in named if isinstance(x, Tensor) and x.shape == shape}
            self.arguments = self._each_state(layout.tokens, args, kwargs)

    @property
    def states(self) -> list[Tensor]:
        """The arguments that may be hidden states: the layer's own first, then those of other layers."""
        return hidden_states(*self.arguments)

    def replace_modules(self, replacements: Mapping[nn.Module, nn.Module]) -> None:
        """Let other modules run in the place of some submodules. The layer of the model is not touched."""
        self.layer = with_submodules_replaced(self.layer, replacements)

    def replace_forwards(self, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
        """Let functions answer for some submodules. The modules themselves are not touched."""
        answering = {module: without_hooks(module) for module in forwards}
        for module, forward in forwards.items():
            answering[module].__dict__["forward"] = forward
        self.replace_modules(answering)

    def arguments_with(self, old: Tensor, new: Tensor) -> tuple[Any, Any]:
        """The arguments with `new` in the place of the tensor `old`."""
        return with_leaf(old, new, self.arguments)

    def run(
        self,
        handler: AttentionHandler | None,
        arguments: tuple[Any, Any] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """The hidden states that the layer returns, for the arguments of the clean pass unless others are given.

        `around` is entered while the layer runs. CannotReplayError: it does not run so, or returns no tensor.
        """
        args, kwargs = self.arguments if arguments is None else arguments
        if self._layout is not None:
            args, kwargs = self._each_state(self._layout.restore, args, kwargs)
        try:
            with handled_by(handler), around(), forgetting():
                output = first_tensor(self._record.forward(self.layer, (args, kwargs)))
        except (*LAYER_ERRORS, AssertionError) as error:
            if is_out_of_memory(error):
                raise
            own = isinstance(error, AssertionError)
            reason = f"it asserts something of its arguments {error}".rstrip() if own else str(error)
            raise CannotReplayError(reason) from error
        if output is None:
            raise CannotReplayError("run again, it returned no tensor")
        return output if self._layout is None else self._layout.tokens(output)

    def _each_state(self, change: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        changed = [change(x) if place in self._states else x for place, x in enumerate(args)]
        return tuple(changed), {name: change(x) if name in self._states else x for name, x in kwargs.items()}


def with_leaf(old: Tensor, new: Tensor, nested: T) -> T:
    """Nested arguments or outputs with `new` in the place of the tensor `old`."""
    return tree_map(lambda x: new if x is old else x, nested)


def with_submodules_replaced(module: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of a module in which other modules stand for some of its submodules. The module is not touched."""
    if module in replacements:
        return replacements[module]
    copied = module
    for name, child in own_modules(module).items():
        other = None if child is None else with_submodules_replaced(child, replacements)
        if other is not child:
            copied = without_hooks(module) if copied is module else copied
            own_modules(copied)[name] = other
    return copied


def run_again(record: LayerRecord, handler: AttentionHandler | None) -> Any:
    """What a layer returns for its clean arguments, without caches."""
    with handled_by(handler):
        return record.forward(record.layer, without_caches((record.args, record.kwargs)))


def without_caches(arguments: Any) -> Any:
    """A layer's arguments without key-value caches, so that running the layer again grows none."""

    def without(value: Any) -> Any:
        if is_cache(value):
            return None
        # Gemma 4 writes into such a dict for later layers. Each run has its own, which is a plain dict.
        return dict(value) if isinstance(value, UserDict) else value

    return tree_map(without, arguments, is_leaf=is_cache)


def with_own_caches(arguments: T) -> T:
    """The arguments of a call with copies of their key-value caches, so that the call leaves these as they are."""
    return tree_map(lambda x: _copied(x) if is_cache(x) else x, arguments, is_leaf=is_cache)


def _copied(value: Any) -> Any:
    """A copy of a cache, with copies of its layers and tensors. All else is shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not any(one.__module__ == "transformers.cache_utils" for one in type(value).__mro__):
        return value
    copied = copy.copy(value)
    vars(copied).update(tree_map(_copied, vars(value)))
    return copied


def caches_in(arguments: Any) -> list[Any]:
    """The key-value caches among nested arguments."""
    return [x for x in tree_leaves(arguments, is_leaf=is_cache) if is_cache(x)]


def is_cache(value: Any) -> bool:
    """Whether a value is a key-value cache of transformers."""
    # Not imported: whoever passes a cache has imported its module.
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def tokens_in_caches(layer: nn.Module, arguments: Any) -> int:
    """How many tokens the key-value caches among the arguments hold for a layer, or for an attention module."""
    place = next((m.layer_idx for m in layer.modules() if isinstance(getattr(m, "layer_idx", None), int)), 0)
    found = 0
    for cache in caches_in(arguments):
        with suppress(ValueError):  # it keeps nothing for a layer that uses the keys of another one (Gemma 3n and 4)
            found = max(found, int(cache.get_seq_length(place)))
    return found


HALF = (torch.float16, torch.bfloat16)


def is_half(record: LayerRecord) -> bool:
    """Whether any number of this run was held in half precision, by the layer's dtype or by autocast."""
    output = first_tensor(record.output)
    # Autocast leaves no trace if a residual or a cache in float32 is added afterwards.
    if output is not None and output.dtype == torch.float32 and torch.is_autocast_enabled(output.device.type):
        return True
    tensors: list[Any] = [output, *record.parameters]
    tensors += [tensor for one in record.attentions for tensor in (one.weights, one.values)]
    return any(tensor is not None and tensor.dtype in HALF for tensor in tensors)


def in_float32(module: Module) -> Module:
    """A float32 copy of a module. It shares configs, and the weights map of modules that accelerate offloads."""
    configs = [getattr(m, "config", None) for m in module.modules()]
    offloaded = [getattr(accelerate_hook(m), "weights_map", None) for m in module.modules()]
    shared = {id(one): one for one in (*configs, *offloaded) if one is not None}
    with inference_mode(False):
        copied = copy.deepcopy(module, shared).float()
    for m in copied.modules():  # tensors among their attributes
        vars(m).update({name: _float32(value) for name, value in vars(m).items()})
    return copied


def recorded_in_float32(record: LayerRecord) -> LayerRecord:
    """The same layer on the same input, run and recorded in float32. RefusedError: it cannot be."""
    remedy = ", or load the model in float32"
    check_no_tokens_in_cache(record, "is in half precision and has to be run again in float32", remedy)
    _check_runs_again(record)
    try:
        layer = in_float32(record.layer)
        args, kwargs = map_each(_float32, without_caches((record.args, record.kwargs)))
        again = replace(record, layer=layer, args=args, kwargs=kwargs, attentions=[], modules_run=[], module_rows={})
        again.module_io, again.steps, again.state = {}, None if record.steps is None else [], ModuleState(layer)
        recorder = Recorder(again)
        with without_autocast(record.first_output.device):
            recorder.finish(run_again(again, recorder))
            half = is_half(again)
    except LAYER_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise RefusedError(
            f"{record.name} is in half precision, and a copy of it in float32 fails: {error}. "
            f"{left_out_by_replays(record.layer)}Load the model in float32."
        ) from error
    if half or len(again.attentions) < len(record.attentions):
        raise RefusedError(
            f"{record.name} computes in half precision whatever its dtype is, which rounds more than zeroing a value "
            "changes. Let its code compute in the dtype of its weights."
        )
    for number, clean in enumerate(record.attentions):
        while len(again.attentions) > number + 1 and again.attentions[number].calls < clean.calls:
            again.merge(number + 1)
    # Masks hold their dtype's lowest number, and that of float16 hides nothing in float32.
    for one, clean in zip(again.attentions, record.attentions, strict=True):
        one.visible = clean.visible
    return again


def _check_runs_again(record: LayerRecord) -> None:
    """Check that running the layer's forward again gives its output at each position: no state that a run changes."""
    # In its own precision, because some layers are far from it in float32: rounding chooses other experts.
    clean = first_tensor(record.output)
    again = first_tensor(run_again(record, AttentionHandler()))
    if clean is not None and (again is None or again.shape != clean.shape or not is_close_in_half(again, clean)):
        raise UnsupportedLayerError(
            f"{record.name} cannot be replayed: run again on its own clean input, it does not return its clean output. "
            f"{left_out_by_replays(record.layer)}Make the layer's output depend on its input alone."
        )


def check_no_tokens_in_cache(record: LayerRecord, reason: str, remedy: str = "") -> None:
    """Refuse to run a layer again that attends to tokens in its key-value cache, which are not in its input."""
    first = record.attentions[0]
    missing = first.shape.sources - first.shape.out - record.encoder_sources(first)
    if missing > 0 and caches_in((record.args, record.kwargs)):
        raise RefusedError(
            f"{record.name} {reason}, but {missing} of its tokens are in the key-value cache only. Run the model "
            f"without a cache: pass the whole sequence at once{remedy}."
        )


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


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
    """Takes the place of the attention module, and returns its output for contexts, or for its `projected` output."""

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

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        if self.context is None:
            return call.compute(call.values)
        return self.take().unflatten(-1, tuple(self.heads)), None
