"""One clean pass: run the user's forward function and hand over each watched layer as it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.interface import Attend, Listener, attention_selected, current_listener, listen


def first_tensor(output: Any) -> Tensor | None:
    """A module's output, or the first element of it where it returns a tuple; None if that is no tensor."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


@dataclass
class AttentionCall:
    """What one attention of a layer computed in the clean pass."""

    module: nn.Module  # whose forward called the attention function
    weights: Tensor  # (batch, head, out, in), after the softmax
    values: Tensor  # (batch, key-value head, in, d_head)
    context: Tensor  # (batch, out, head, d_head)
    visible: Tensor | None  # bool, broadcastable to weights: what the mask lets through; None: everything
    dropout: float
    # What became of the context: the answer that `module` returned, and the submodule that made it (None: no such
    # submodule, the context itself was returned).
    answer: Any = None
    projection: nn.Module | None = None
    answered: bool = False  # `module` returned the context or its projection, and nothing else happened to it
    _projected: list[tuple[nn.Module, Tensor]] = field(default_factory=list, repr=False)

    def submodule(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Follow the context from the attention function to what the attention module returns."""
        if self.answer is not None:
            return
        result = first_tensor(output)
        if module is self.module:
            self.answer = output
            if result is not None:
                for projection, projected in [(None, self.context), *self._projected]:
                    if _same(projected, result):
                        self.projection, self.answered = projection, True
                        break
            self._projected.clear()
        elif result is not None and inputs and _same(self.context, inputs[0]):
            self._projected.append((module, result))


def _same(expected: Tensor, found: Any) -> bool:
    """Whether the two hold the same numbers, whatever their shapes (heads are merged on the way)."""
    if not isinstance(found, Tensor) or expected.numel() != found.numel() or expected.shape[:2] != found.shape[:2]:
        return False
    return torch.equal(expected.flatten(2), found.flatten(2))


@dataclass
class Recording(Listener):
    """A layer's run in the clean pass: what went in, what its attentions did, what came out."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: list[AttentionCall] = field(default_factory=list)
    output: Any = None

    def attend(
        self, module: nn.Module, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        context, weights = attend(values)
        # Cloned: some modules gate the context in place.
        self.calls.append(AttentionCall(module, weights, values, context.clone(), visible, dropout))
        return context, weights

    def submodule(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self.calls:
            self.calls[-1].submodule(module, inputs, output)


def _tell_listener(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    # A plain function without state, so that a copy of a layer can carry it.
    listener = current_listener()
    if listener is not None:
        listener.submodule(module, inputs, output)


# The pass that this thread is in: hooks are shared by all threads that use the model.
_pass: ContextVar[object] = ContextVar("captum_vz_pass", default=None)


@contextmanager
def watching(layers: Sequence[nn.Module], on_return: Callable[[int, Recording], None]) -> Iterator[None]:
    """Call `on_return(index of the layer, its recording)` whenever one of `layers` returns inside the `with` block.

    All hooks of the package are registered here, and are gone when the block is left, by whatever way.
    """
    this_pass = object()
    token = _pass.set(this_pass)

    def ours(module: nn.Module) -> bool:
        # DataParallel runs its replicas in threads of their own, which inherit no context.
        return _pass.get() is this_pass or getattr(module, "_is_replica", False)

    def hooks(index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        running: dict[int, tuple[Recording, Listener | None]] = {}

        # A thread that runs the model while this pass puts its hooks on or takes them off may call them without
        # kwargs, for torch notes apart from a hook whether it wants them: only `ours` are looked at.
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if ours(module):
                recording = Recording(module, args, kwargs or {})
                running[id(module)] = recording, current_listener()
                listen(recording)

        def after(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
            if ours(module):
                recording, outer = running.pop(id(module))
                recording.output = kwargs_and_output[-1]
                listen(None)
                on_return(index, recording)
                listen(outer)

        return before, after

    submodules = {id(m): m for layer in layers for m in layer.modules() if m is not layer}
    outer = current_listener()
    try:
        with ExitStack() as stack:
            stack.enter_context(attention_selected(layers))
            for module in submodules.values():
                stack.enter_context(module.register_forward_hook(_tell_listener))
            for index, layer in enumerate(layers):
                before, after = hooks(index)
                stack.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(layer.register_forward_hook(after, with_kwargs=True))
            yield
    finally:
        listen(outer)
        _pass.reset(token)
