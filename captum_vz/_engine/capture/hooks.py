"""Hooks on layers and their submodules, for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.records import VersionedTensor
from captum_vz._engine.numerics.tensors import map_each
from captum_vz._engine.taps import TAPS
from captum_vz._engine.taps.changes import Changes, current_pass
from captum_vz._engine.taps.handler import (
    AttentionHandler,
    current_handler,
    on_submodule_enter,
    on_submodule_exit,
    thread_handler,
    user_hooks,
)
from captum_vz._private import accelerate_hook, forward_hooks, is_replica, modules_of, tree_leaves

H = TypeVar("H", bound=AttentionHandler)


@contextmanager
def layer_hooks(
    layers: Sequence[nn.Module],
    begin: Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], H],
    end: Callable[[H, tuple[Any, Any], Any, list[Any]], Any],
) -> Iterator[None]:
    """Handle the attention of each of `layers` whenever it runs inside the `with` block.

    `begin(index of the layer, layer, args, kwargs)` makes the handler of a run. `end(handler, (args, kwargs), output,
    hooks)` is called when the layer returns, with the arguments and the output after all hooks, and the user's hooks if
    they changed the output. What it returns, unless None, replaces the output. All hooks are gone when the block is
    left, also by an error.
    """
    this_pass = current_pass.get()

    def is_ours(module: nn.Module) -> bool:
        # All threads that use the model share its hooks. DataParallel runs its replicas in threads of their own, which
        # inherit no context.
        return current_pass.get() is this_pass or is_replica(module)

    def hooks_of(index: int) -> tuple[Callable[..., None], Callable[..., None], Callable[..., Any]]:
        running: dict[int, tuple[H, AttentionHandler | None, list[VersionedTensor]]] = {}

        # torch stores `with_kwargs` separately from the hook, so another thread may call a hook without kwargs while
        # the hook is being added or removed. Only runs of this pass are handled.
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if is_ours(module):
                # The user may have added hooks since. Ours are the first and the last that see the output.
                hooks: Any = forward_hooks(module)
                for number, hook in list(hooks.items()):
                    if hook in (returned, after):
                        hooks.move_to_end(number, last=hook is after)
                handler = begin(index, module, args, kwargs or {})
                running[id(module)] = handler, current_handler(), []
                thread_handler.set(handler)

        def returned(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if is_ours(module) and user_hooks(forward_hooks(module)):
                running[id(module)][-1].extend(map(VersionedTensor, _tensors(output)))

        def after(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
            if not is_ours(module):
                return None
            handler, outer, tensors = running.pop(id(module))
            thread_handler.set(outer)
            (kwargs, output), hooks = kwargs_and_output, user_hooks(forward_hooks(module))
            now = _tensors(output) if tensors else []
            same = len(tensors) == len(now) and all(
                old.is_unmodified() and (old.value is new or torch.equal(old.value, new))
                for old, new in zip(tensors, now, strict=True)
            )
            # In a context of its own. transformers' collector of attentions and hidden states, which follows the
            # user's pass by a context variable, would otherwise collect those of replays.
            return changes.new_context().run(end, handler, (args, kwargs), output, [] if same else hooks)

        return before, returned, after

    submodules = {id(m): m for layer in layers for m in modules_of(layer) if m is not layer}
    with Changes() as changes:
        changes.set(thread_handler, current_handler())
        for tap in TAPS:
            tap.attach(layers, changes)
        for module in submodules.values():
            add_before, add_after = module.register_forward_pre_hook, module.register_forward_hook
            changes.hook(partial(add_before, on_submodule_enter), partial(add_after, on_submodule_exit))
        for index, layer in enumerate(layers):
            before, returned, after = hooks_of(index)
            first, add_after = partial(layer.register_forward_pre_hook, before), layer.register_forward_hook
            others = partial(add_after, returned, prepend=True), partial(add_after, after, with_kwargs=True)
            changes.hook(partial(first, with_kwargs=True), *others)
        yield


def _tensors(output: Any) -> list[Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, Tensor)]


def on_its_device(layer: nn.Module, arguments: Any) -> Any:
    """A layer's arguments on the device that it runs on.

    Where accelerate spreads a model over devices, a wrapper of the layer's forward moves them. Replays run without it.
    """
    hook = accelerate_hook(layer)
    devices = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", (hook,))]
    device = next((one for one in reversed(devices) if one is not None), None)
    if device is None:
        return arguments
    return map_each(lambda x: x.to(device) if isinstance(x, Tensor) else x, arguments)
