"""Run the user's forward function once, with hooks on its layers, and keep one result for each run of a layer."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from traceback import walk_tb
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from captum_vz._engine.capture import LayerRecord, Recorder
from captum_vz._engine.capture.layer_runner import LAYER_ERRORS, tokens_in_caches, with_leaf
from captum_vz._engine.numerics import (
    ResultsOfPass,
    VersionedTensor,
    first_tensor,
    is_out_of_memory,
    map_each,
    results_of_pass,
    tensors_in,
)
from captum_vz._engine.numerics.tolerance import nudged
from captum_vz._engine.taps import TAPS
from captum_vz._engine.taps.changes import (
    Changes,
    ModuleState,
    current_pass,
    is_hooked,
    output_hooks,
    repeated,
    undoing,
)
from captum_vz._engine.taps.handler import AttentionHandler, current_handler, thread_handler
from captum_vz._engine.taps.projection import ValueProjection, attach_to_named
from captum_vz._private import DropoutModule, accelerate_hook, forward_hooks, modules_of
from captum_vz.errors import RefusedError, UnsupportedLayerError

H = TypeVar("H", bound=AttentionHandler)


# Plain functions without state, so that a copy of a layer can carry them.
def on_submodule_enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """The hook that submodules call before they run."""
    if (handler := current_handler()) is not None:
        handler.on_enter(module)


def on_submodule_exit(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """The hook that submodules call when they return."""
    handler = current_handler()
    try:
        return None if handler is None else handler.on_exit(module, inputs, output)
    except LAYER_ERRORS as error:
        if isinstance(handler, Recorder):  # it only reads, so the error is none of the model's
            _raise_refused(handler.record, error)
        raise


@contextmanager
def layer_hooks(
    layers: Sequence[nn.Module],
    begin: Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], H],
    end: Callable[[H, tuple[Any, Any], Any, list[Any]], Any],
) -> Iterator[None]:
    """Handle the attention of each of `layers` whenever it runs inside the `with` block.

    `begin(index of the layer, layer, args, kwargs)` makes the handler of a run. `end(handler, (args, kwargs), output,
    hooks)` is called when the layer returns, with the arguments and the output after all hooks. `hooks` are the user's
    if they changed the output, each with whether it takes keyword arguments. What `end` returns, unless None, replaces
    the output. All hooks are gone when the block is left, also by an error.
    """
    this_pass = current_pass.get()

    def is_ours() -> bool:
        return current_pass.get() is this_pass  # all threads that use the model share its hooks

    def hooks_of(index: int) -> tuple[Callable[..., None], Callable[..., None], Callable[..., Any]]:
        running: dict[int, tuple[H, AttentionHandler | None, list[tuple[Tensor, VersionedTensor]]]] = {}

        # torch stores `with_kwargs` separately from the hook, so another thread may call a hook without kwargs while
        # the hook is being added or removed. Only runs of this pass are handled.
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if is_ours():
                # The user may have added hooks since. Ours are the first and the last that see the output.
                hooks: Any = forward_hooks(module)
                for number, hook in list(hooks.items()):
                    if hook in (returned, after):
                        hooks.move_to_end(number, last=hook is after)
                handler = begin(index, module, args, kwargs or {})
                running[id(module)] = handler, current_handler(), []
                thread_handler.set(handler)

        def returned(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if id(module) in running and is_ours() and output_hooks(module) and not running[id(module)][-1]:
                running[id(module)][-1].extend((one, VersionedTensor(one)) for one in tensors_in(output))

        def after(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
            if not is_ours():
                return None
            handler, outer, tensors = running.pop(id(module))
            thread_handler.set(outer)
            (kwargs, output), hooks = kwargs_and_output, output_hooks(module)
            now = tensors_in(output) if tensors else []
            # A hook that returns another tensor may change it in replays, even if it holds the same numbers now.
            same = len(tensors) == len(now) and all(
                one is new and old.is_unmodified() and (old.value is new or torch.equal(old.value, new))
                for (one, old), new in zip(tensors, now, strict=True)
            )
            # In a context of its own. transformers' collector of attentions and hidden states, which follows the
            # user's pass by a context variable, would otherwise collect those of replays.
            context = Context()
            context.run(current_pass.set, changes)
            context.run(results_of_pass.set, results_of_pass.get())
            return context.run(end, handler, (args, kwargs), output, [] if same else hooks)

        return before, returned, after

    walks = [modules_of(layer) for layer in layers]
    modules = list(dict.fromkeys(itertools.chain(*walks)))
    submodules = list(dict.fromkeys(itertools.chain(*[walk[1:] for walk in walks])))
    with Changes() as changes:
        changes.set(thread_handler, current_handler())
        for tap in TAPS:
            tap(modules, changes)
        changes.hook_each(submodules, on_submodule_enter, on_submodule_exit)
        for index, layer in enumerate(layers):
            before, returned, after = hooks_of(index)
            first, add_after = partial(layer.register_forward_pre_hook, before), layer.register_forward_hook
            others = partial(add_after, returned, prepend=True), partial(add_after, after, with_kwargs=True)
            changes.hook(partial(first, with_kwargs=True), *others)
        yield


def on_its_device(layer: nn.Module, arguments: Any) -> Any:
    """A layer's arguments on the device that it runs on."""
    # A wrapper of the layer's forward moves them if accelerate spreads a model over devices. Replays run without it.
    if (hook := accelerate_hook(layer)) is None:
        return arguments
    devices = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", (hook,))]
    device = next((one for one in reversed(devices) if one is not None), None)
    if device is None:
        return arguments
    return map_each(lambda x: x.to(device) if isinstance(x, Tensor) else x, arguments)


LayerResults = list[tuple[int, Tensor]]  # (index of the layer, its result), in the order in which the layers ran


@dataclass(eq=False, repr=False)
class LayerPass:
    """One pass of the user's forward function, and a result `(batch, ...)` for each run of each layer."""

    layers: Sequence[nn.Module]
    # Makes the result of one run. It is called when the layer returns, and the record is dropped then.
    compute: Callable[[LayerRecord], Tensor]
    _: KW_ONLY
    replays: bool = False  # whether `compute` replays layers. Until it has, inputs and outputs of modules are kept
    steps: bool = False  # whether `compute` needs the steps of layers. Copies of their hidden states are kept as long
    given: Sequence[ValueProjection] = ()  # where the user says that the values of each layer are
    chosen: Sequence[Sequence[int]] | None = None  # the numbers of the runs of each layer to record. None: all
    results: LayerResults = field(default_factory=list, init=False)  # after `run`
    _count: Counter[int] = field(default_factory=Counter, init=False)  # how often each layer has begun, by id

    def run(self, forward: Callable[[], Any]) -> Any:
        """What `forward` returns. A pass runs once. UnsupportedLayerError: a layer was not run."""
        for layer in self.layers:
            check_no_dropout(layer)
        # glibc returns blocks of up to 32 MiB to the system when they are freed, until a larger block was freed. Then
        # chunk buffers are reused. Nothing is written into this block, so that it takes no memory.
        torch.empty(31 << 20, dtype=torch.uint8, device="cpu")
        with undoing() as changes:
            if self.given:
                attach_to_named(self.layers, self.given, changes)
            changes.set(results_of_pass, ResultsOfPass())
            with torch.no_grad(), layer_hooks(self.layers, self.begin, self.end):
                output = forward()
        ran = {index for index, _ in self.results}
        for index, layer in enumerate(self.layers):
            if index not in ran:
                parts = " A ModuleList never runs: pass the attention module in it (vit-pytorch, x-transformers)."
                raise UnsupportedLayerError(
                    f"forward_func did not run layer {index} of {len(self.layers)}, a {type(layer).__name__}. Pass a "
                    "layer that forward_func calls in this thread by `layer(...)`, and not a copy of it."
                    f"{parts if isinstance(layer, nn.ModuleList) else ''}"
                )
        return output

    def begin(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionHandler:
        """The handler of a run of a layer that begins."""
        args, kwargs = on_its_device(layer, (args, kwargs))
        number, self._count[id(layer)] = self._count[id(layer)], self._count[id(layer)] + 1
        if self.chosen is not None and number not in self.chosen[index]:
            return AttentionHandler()
        state, given = ModuleState(layer, (args, kwargs)), self.given[index] if self.given else None
        if (shared := results_of_pass.get()) and (state.own_code or is_hooked(layer)):
            shared.forget()
        record = LayerRecord(layer, args, kwargs, index, number, keep_module_io=self.replays, state=state, given=given)
        record.steps = [] if self.steps else None
        return Recorder(record)

    def end(self, recorder: AttentionHandler, arguments: tuple[Any, Any], output: Any, hooks: list[Any]) -> None:
        """Compute the result of a run of a layer that returns."""
        if not isinstance(recorder, Recorder):
            return
        record = recorder.record
        try:
            # A hook that was added after ours may have changed the arguments.
            record.args, record.kwargs = on_its_device(record.layer, arguments)
            if clean := record.state.written_arguments():
                record.writes_arguments = True
                record.args, record.kwargs = map_each(lambda x: clean.get(id(x), x), (record.args, record.kwargs))
            record.hooks = hooks
            recorder.finish(output)
            with Changes() as changes:
                record.args, record.kwargs = record.state.copied((record.args, record.kwargs), changes)
                result = self.compute(record)
        except LAYER_ERRORS as error:
            _raise_refused(record, error)
        if shared := results_of_pass.get():
            shared.end_layer()
        self.results.append((record.index, result))


def _raise_refused(record: LayerRecord, error: Exception) -> NoReturn:
    """Raise an error in reading a layer as a refusal, unless it is one, lack of memory, or an error of the user's."""
    if isinstance(error, RefusedError) or is_out_of_memory(error) or _is_of_user(error):
        raise error
    raise RefusedError(
        f"{record.name} cannot be explained, because reading it raised {type(error).__name__}: {error}. Pass other "
        "layers, or report it with the model's class and the versions of torch and transformers."
    ) from error


def _is_of_user(error: BaseException) -> bool:
    """Whether the error was raised in what the user passes to a method, such as a distance or a norm."""
    # Our innermost module in the traceback, and the packages that it called. Methods call what the user passes. The
    # engine calls the model.
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    ours = max(place for place, name in enumerate(names) if name.startswith("captum_vz."))
    below = {name.partition(".")[0] for name in names[ours + 1 :]}
    libraries = {"torch", "transformers", "accelerate", "numpy", *sys.stdlib_module_names}
    return bool(below) and (names[ours].startswith("captum_vz.attr.") or not below <= libraries)


def given_states(
    forward: Callable[[], Any], layers: Sequence[nn.Module], changed: tuple[int, int] | None
) -> list[list[Tensor | None]]:
    """The hidden states that each layer is given in each run, with noise in the output of run `changed`, if any.

    `changed` is the index of a layer, and how often it ran before. Random numbers are the same in each call.
    """
    given: list[list[Tensor | None]] = [[] for _ in layers]
    runs: dict[AttentionHandler, tuple[int, int]] = {}

    def begin(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionHandler:
        if not given[index] and tokens_in_caches(layer, (args, kwargs)):
            raise RefusedError(
                f"forward_func cannot be called again to see which runs of layer {index} ({type(layer).__name__}) are "
                "related: it has a filled key-value cache. Pass a forward_func that runs the layer once."
            )
        states = (x for x in tensors_in((args, kwargs)) if x.is_floating_point() and x.dim() > 1)
        handler = AttentionHandler()
        runs[handler] = index, len(given[index])
        given[index].append(next((x.clone() for x in states), None))
        return handler

    def end(handler: AttentionHandler, arguments: Any, output: Any, hooks: Any) -> Any:
        found = first_tensor(output) if runs.pop(handler) == changed else None
        return None if found is None else with_leaf(found, nudged(found, 1.0), output)

    def call() -> None:
        torch.manual_seed(0)
        with layer_hooks(layers, begin, end):
            forward()

    try:
        repeated(call)
    except LAYER_ERRORS as error:  # what runs after the changed run may fail
        if changed is None or is_out_of_memory(error):
            raise
    return given


def check_no_dropout(layer: nn.Module) -> None:
    """Refuse active dropout: each run of the layer would differ, and distances would be noise."""
    named = layer.named_modules() if any(one.training for one in modules_of(layer)) else ()
    for name, module in named:
        if not module.training:
            continue
        rates = {"p": module.p} if isinstance(module, DropoutModule) else vars(module).copy()
        for key, rate in rates.items():
            if isinstance(rate, float) and rate > 0 and (key == "p" or "drop" in key):
                raise RefusedError(
                    f"{type(layer).__name__} is in train mode and has dropout ({name or 'itself'}: "
                    f"{key}={rate}), so no two runs of it agree. Call model.eval() first."
                )
