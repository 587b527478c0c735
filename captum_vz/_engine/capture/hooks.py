"""Hooks on layers and their submodules, for the length of a `with` block."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context, ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from captum_vz._engine.numerics.tensors import map_each
from captum_vz._engine.taps import TAPS
from captum_vz._engine.taps.handler import (
    AttentionHandler,
    current_handler,
    on_submodule_enter,
    on_submodule_exit,
    set_handler,
)

H = TypeVar("H", bound=AttentionHandler)
# Submodules that carry our hooks now: id -> (the handles of the two, how many passes need them). Counted, because two
# threads may explain one model at the same time, and each handler should be called once.
_hooked: dict[int, tuple[tuple[RemovableHandle, ...], int]] = {}
_hook_lock = threading.Lock()
# The pass that this thread runs. Hooks are shared by all threads that use the model.
_pass: ContextVar[object] = ContextVar("captum_vz_pass", default=None)


@contextmanager
def submodule_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let submodules call the handler when they begin and when they return, inside a `with` block."""
    hooked: list[nn.Module] = []
    try:
        with _hook_lock:
            for module in modules:
                handles, count = _hooked.get(id(module), ((), 0))
                if not count:
                    handles = (
                        module.register_forward_pre_hook(on_submodule_enter),
                        module.register_forward_hook(on_submodule_exit),
                    )
                _hooked[id(module)] = handles, count + 1
                hooked.append(module)
        yield
    finally:
        with _hook_lock:
            for module in hooked:
                handles, count = _hooked.pop(id(module))
                if count > 1:
                    _hooked[id(module)] = handles, count - 1
                else:
                    for handle in handles:
                        handle.remove()


@contextmanager
def layer_hooks(
    layers: Sequence[nn.Module],
    begin: Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], H],
    end: Callable[[H, Any], Any],
) -> Iterator[None]:
    """Handle the attention of each of `layers` whenever it runs inside the `with` block.

    `begin(index of the layer, layer, args, kwargs)` makes the handler of a run. `end(handler, output)` is called when
    the layer returns. What it returns, unless None, replaces the output. All hooks are gone when the block is left,
    also by an error.
    """
    this_pass = object()
    token = _pass.set(this_pass)

    def is_ours(module: nn.Module) -> bool:
        # DataParallel runs its replicas in threads of their own, which inherit no context.
        return _pass.get() is this_pass or getattr(module, "_is_replica", False)

    def hooks(index: int) -> tuple[Callable[..., None], Callable[..., Any]]:
        running: dict[int, tuple[H, AttentionHandler | None]] = {}

        # torch stores `with_kwargs` separately from the hook, so another thread may call a hook without kwargs while
        # the hook is being added or removed. Only runs of this pass are handled.
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if is_ours(module):
                handler = begin(index, module, args, kwargs or {})
                running[id(module)] = handler, current_handler()
                set_handler(handler)

        def after(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
            if not is_ours(module):
                return None
            handler, outer = running.pop(id(module))
            set_handler(outer)
            # In a context of its own. transformers' collector of attentions and hidden states, which follows the
            # user's pass by a context variable, would otherwise collect those of replays.
            return Context().run(end, handler, kwargs_and_output[-1])

        return before, after

    submodules = {id(m): m for layer in layers for m in layer.modules() if m is not layer}
    outer = current_handler()
    try:
        with ExitStack() as stack:
            stack.enter_context(_original_modules())
            for tap in TAPS:
                stack.enter_context(tap.attached(layers))
            stack.enter_context(submodule_hooks(submodules.values()))
            for index, layer in enumerate(layers):
                before, after = hooks(index)
                stack.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(layer.register_forward_hook(after, with_kwargs=True))
            yield
    finally:
        set_handler(outer)
        _pass.reset(token)


def _original_modules() -> AbstractContextManager[Any]:
    """Run the original modules of a compiled model. A compiled layer would be compiled again with our hooks."""
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def on_its_device(layer: nn.Module, arguments: Any) -> Any:
    """A layer's arguments on the device that it runs on.

    Where accelerate spreads a model over devices, a wrapper of the layer's forward moves them. Replays run without it.
    """
    hook = getattr(layer, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        device = getattr(one, "execution_device", None)
        if device is not None:
            arguments = map_each(partial(_moved, device), arguments)
    return arguments


def _moved(device: Any, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
