"""The token vectors that a stack of layers starts from, as a leaf of the graph, to differentiate layers with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from captum_vz._engine.taps.changes import Changes
from captum_vz.errors import ArgumentError, UnsupportedLayerError

ADVICE = "pass the module that returns the vectors as `embeddings`, such as model.get_input_embeddings()"


class EmbeddingLeaf:
    """One call of a forward function in which the token vectors `(batch, tokens, d)` are a leaf of the graph.

    The token vectors are the output of `module`. If `module` is None, they are the input of the first layer of the
    stack that contains `layers`, with the axes in the order of that layer.
    """

    def __init__(self, forward_func: Callable[..., Any], layers: Sequence[nn.Module], module: nn.Module | None) -> None:
        self.forward_func, self._layers, self._module = forward_func, layers, module
        self._vectors: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward function with gradients enabled, whatever the caller's setting."""
        with torch.enable_grad(), Changes() as changes:
            self._thread = get_ident()
            if self._module is not None:
                changes.hook(partial(self._module.register_forward_hook, self._returned))
                return self.forward_func(*args, **kwargs)

            def begin(model: nn.Module) -> None:
                first = _first(model, self._layers)
                changes.hook(partial(first.register_forward_pre_hook, self._given, with_kwargs=True))

            with first_module_holding(self._layers, begin):
                return self.forward_func(*args, **kwargs)

    @property
    def vectors(self) -> Tensor:
        """The leaf. Available after the call. ArgumentError: no vectors were found."""
        if self._vectors is None:
            source = f"a module that holds its stack, and no other {type(self._layers[0]).__name__} before it"
            if self._module is not None:
                source = f"the {type(self._module).__name__} that is passed as `embeddings`"
            raise ArgumentError(
                f"forward_func ran a layer, but it did not first run, in the same thread, {source}: {ADVICE}. For "
                "DataParallel, pass the module that it wraps."
            )
        return self._vectors

    def _take(self, found_in: str, vectors: Any) -> Any:
        """Make the first vectors that are found the leaf, and return what the model continues with."""
        if self._vectors is not None:
            return vectors
        found = f"{vectors.dtype} {tuple(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
        if not (isinstance(vectors, Tensor) and vectors.dim() == 3 and vectors.is_floating_point()):
            raise ArgumentError(
                f"{found_in} {found}, which is not one vector for each token. Expected numbers (batch, tokens, d): "
                f"{ADVICE}."
            )
        self._vectors = vectors.detach().requires_grad_()
        return self._vectors.clone()  # the model may write to it, and a leaf must not be written to

    # All threads call these hooks. A thread that runs the layer while one is being added may call it without kwargs.
    def _returned(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._take("embeddings returned", output) if get_ident() == self._thread else None

    def _given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if get_ident() != self._thread:
            return None
        found_in, named = f"The first layer, a {type(module).__name__}, was given", kwargs or {}
        if args:
            return (self._take(found_in, args[0]), *args[1:]), named
        return args, {name: self._take(found_in, x) if name == next(iter(named)) else x for name, x in named.items()}


@contextmanager
def first_module_holding(layers: Sequence[nn.Module], show: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `show` with the first module to run that contains `layers[0]`, before it runs, in a `with` block.

    The module is found when it runs in this thread, because the model inside a forward function is not known. `show`
    is not called if a layer of the same class runs before such a module.
    """
    thread = get_ident()
    shown = False

    def look(module: nn.Module, args: Any) -> None:
        nonlocal shown
        if shown or get_ident() != thread:
            return
        # A function may call the layers one by one. Then no module shows which of them is the first.
        alone = type(module) is type(layers[0])
        shown = alone or layers[0] in module.modules()
        if shown and not alone:
            show(module)

    with Changes() as changes:
        changes.hook(partial(register_module_forward_pre_hook, look))
        yield


def _first(model: nn.Module, layers: Sequence[nn.Module]) -> nn.Module:
    """The first layer of the stack, the outermost list of modules in `model` that contains the layers."""
    stack = next((one for one in _lists(model) if layers[0] in one.modules()), model)
    kind = type(layers[0])
    elsewhere = set(model.modules()) - set(stack.modules())
    if not elsewhere.isdisjoint(layers):
        raise ArgumentError(
            "layer lists layers of several stacks. Expected layers of one stack, because each stack starts from "
            f"its own vectors: pass the layers of one stack, or {ADVICE}."
        )
    alike = [module for module in stack.modules() if type(module) is kind]
    above = [one for one in _lists(stack) if alike[0] in one.modules()]
    if not ((above or len(alike) == 1) and all(alike[0] in next(one.children()).modules() for one in above)):
        raise UnsupportedLayerError(
            f"{type(model).__name__} does not show which layer of the stack is the first. Expected a ModuleList or "
            f"Sequential that begins with a {kind.__name__}, the class of the first of `layer`: {ADVICE}."
        )
    return alike[0]


def _lists(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
