"""Hooks on layers and their submodules, for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from captum_vz._engine.numerics.tensors import map_each
from captum_vz._engine.taps import TAPS
from captum_vz._engine.taps.changes import Changes
from captum_vz._engine.taps.handler import (
    AttentionHandler,
    current_handler,
    on_submodule_enter,
    on_submodule_exit,
    set_handler,
)

H = TypeVar("H", bound=AttentionHandler)
# The pass that this thread runs. Hooks are shared by all threads that use the model.
_pass: ContextVar[object] = ContextVar("captum_vz_pass", default=None)


@contextmanager
def layer_hooks(
    layers: Sequence[nn.Module],
    begin: Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], H],
    end: Callable[[H, Any], None],
) -> Iterator[None]:
    """Handle the attention of each of `layers` whenever it runs inside the `with` block.

    `begin(index of the layer, layer, args, kwargs)` makes the handler of a run. `end(handler, output)` is called when
    the layer returns. All hooks are gone when the block is left, also by an error.
    """
    this_pass = object()

    def is_ours(module: nn.Module) -> bool:
        # DataParallel runs its replicas in threads of their own, which inherit no context.
        return _pass.get() is this_pass or getattr(module, "_is_replica", False)

    def hooks(index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        running: dict[int, tuple[H, AttentionHandler | None]] = {}

        # torch stores `with_kwargs` separately from the hook, so another thread may call a hook without kwargs while
        # the hook is being added or removed. Only runs of this pass are handled.
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if is_ours(module):
                handler = begin(index, module, args, kwargs or {})
                running[id(module)] = handler, current_handler()
                set_handler(handler)

        def after(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
            if is_ours(module):
                handler, outer = running.pop(id(module))
                set_handler(outer)
                # In a context of its own. transformers' collector of attentions and hidden states, which follows the
                # user's pass by a context variable, would otherwise collect those of replays.
                changes.in_new_context(end, handler, kwargs_and_output[-1])

        return before, after

    submodules = {id(m): m for layer in layers for m in layer.modules() if m is not layer}
    changes = Changes()
    with changes, ExitStack() as stack:
        changes.set(_pass, this_pass)
        changes.undo.append(partial(set_handler, current_handler()))
        for tap in TAPS:
            stack.enter_context(tap.attached(layers))
        for module in submodules.values():
            changes.hook(module.register_forward_pre_hook, on_submodule_enter)
            changes.hook(module.register_forward_hook, on_submodule_exit)
        for index, layer in enumerate(layers):
            before, after = hooks(index)
            changes.hook(layer.register_forward_pre_hook, before, with_kwargs=True)
            changes.hook(layer.register_forward_hook, after, with_kwargs=True)
        yield


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
