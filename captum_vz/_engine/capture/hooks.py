"""TODO."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from captum_vz._engine.numerics.tensors import map_each
from captum_vz._engine.taps.handler import AttentionHandler, _entered, _returned, current_handler, set_handler
from captum_vz._engine.taps.projection import ParameterProjectionMode, projects_by_parameter
from captum_vz._engine.taps.sdpa import attention_patched
from captum_vz._engine.taps.transformers import attention_selected

L = TypeVar("L", bound=AttentionHandler)
# Submodules that carry our hooks now: id -> (the handles of the two, how many passes need them). Counted, because two
# threads may explain one model at the same time, and each listener is to be told once.
_hooked: dict[int, tuple[tuple[RemovableHandle, ...], int]] = {}
_hook_lock = threading.Lock()
# The pass that this thread is in: hooks are shared by all threads that use the model.
_pass: ContextVar[object] = ContextVar("captum_vz_pass", default=None)


@contextmanager
def submodule_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let submodules tell the listener when they begin and when they return, for the length of a `with` block."""
    telling: list[nn.Module] = []
    try:
        with _hook_lock:
            for module in modules:
                handles, count = _hooked.get(id(module), ((), 0))
                if not count:
                    handles = (module.register_forward_pre_hook(_entered), module.register_forward_hook(_returned))
                _hooked[id(module)] = handles, count + 1
                telling.append(module)
        yield
    finally:
        with _hook_lock:
            for module in telling:
                handles, count = _hooked.pop(id(module))
                if count > 1:
                    _hooked[id(module)] = handles, count - 1
                else:
                    for handle in handles:
                        handle.remove()


@contextmanager
def layer_hooks(
    layers: Sequence[nn.Module],
    on_begin: Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], L],
    on_return: Callable[[int, L, Any], None],
) -> Iterator[None]:
    """Listen to each of `layers` whenever it runs inside the `with` block.

    `on_begin(index of the layer, layer, args, kwargs)` gives the listener, `on_return(index, listener, output)` is
    called when the layer returns. The layers' hooks are registered here, and are gone when the block is left, by
    whatever way.
    """
    this_pass = object()
    token = _pass.set(this_pass)

    def ours(module: nn.Module) -> bool:
        # DataParallel runs its replicas in threads of their own, which inherit no context.
        return _pass.get() is this_pass or getattr(module, "_is_replica", False)

    def hooks(index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        running: dict[int, tuple[L, AttentionHandler | None]] = {}

        # A thread that runs the model while this pass puts its hooks on or takes them off may call them without
        # kwargs, for torch notes apart from a hook whether it wants them: only `ours` are looked at.
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if ours(module):
                listener = on_begin(index, module, args, kwargs or {})
                running[id(module)] = listener, current_handler()
                set_handler(listener)

        def after(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
            if ours(module):
                listener, outer = running.pop(id(module))
                set_handler(outer)
                # In a context of its own, lest whoever else follows the user's pass hears the replays: transformers'
                # collector of attentions and hidden states would take theirs for the model's.
                Context().run(on_return, index, listener, kwargs_and_output[-1])

        return before, after

    submodules = {id(m): m for layer in layers for m in layer.modules() if m is not layer}
    outer = current_handler()
    try:
        with ExitStack() as stack:
            stack.enter_context(attention_selected(layers))
            stack.enter_context(attention_patched())
            stack.enter_context(submodule_hooks(submodules.values()))
            if any(map(projects_by_parameter, submodules.values())):
                stack.enter_context(ParameterProjectionMode())
            for index, layer in enumerate(layers):
                before, after = hooks(index)
                stack.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(layer.register_forward_hook(after, with_kwargs=True))
            yield
    finally:
        set_handler(outer)
        _pass.reset(token)


def where_it_runs(layer: nn.Module, arguments: Any) -> Any:
    """A layer's arguments, on the device that it runs on.

    Where accelerate spreads a model over devices, a wrapper of the layer's forward moves them, and replays go past it.
    """
    hook = getattr(layer, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        device = getattr(one, "execution_device", None)
        if device is not None:
            arguments = map_each(partial(_moved, device), arguments)
    return arguments


def _moved(device: Any, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
