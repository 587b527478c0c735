"""Tensors of a model whose gradients are wanted: the vectors of a stack, and relevance by the rules of AttnLRP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from captum_vz._engine.numerics.tolerance import not_finite
from captum_vz._engine.taps.changes import Changes, undoing
from captum_vz._engine.whole_model.rules import call_with_slopes, change_gradients, whole_activations
from captum_vz._private import node_number, tree_map
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError

ADVICE = "pass the module that returns the vectors as `embeddings`, such as model.get_input_embeddings()"


def relevance_gradients(
    explained: ExplainedTensors,
    forward: Callable[[], Any],
    number_of: Callable[[Any], Tensor],
    constant_weights: bool,
    name: str,
) -> Sequence[Tensor]:
    """The changed gradients of the explained tensors, in their order. See `change_gradients`.

    The tensors are taken while `forward`, the user's call, runs. `number_of` its output is the number that is
    explained. UnsupportedLayerError: an operation has no rule, or the number does not depend on the tensors.
    RefusedError: a gradient is not finite.
    """
    with undoing():
        with torch.enable_grad(), Changes() as of_pass:
            explained.attach(of_pass)
            of_pass.hook(partial(register_module_forward_hook, whole_activations()))
            of_pass.answer_functions(call_with_slopes)
            output = forward()
        tensors = explained.checked(name)
        with torch.enable_grad():
            begin = node_number(torch.zeros((), requires_grad=True).clone().grad_fn)
            number = number_of(output)
        ends = [get_gradient_edge(x).node for x in tensors]
        if not number.requires_grad or not change_gradients(number.grad_fn, ends, begin, constant_weights, name):
            raise UnsupportedLayerError(
                f"The target does not depend on {explained.name} by any gradient. forward_func must not switch "
                "gradients off (torch.no_grad, detach), and the target must be an output that depends on the layer."
            )
        gradients = torch.autograd.grad(number, tensors, allow_unused=True, materialize_grads=True)
        if not all(one.isfinite().all() for one in gradients):
            raise RefusedError(f"The gradients of {explained.name} are {not_finite(number.dtype)}")
        return gradients


class ExplainedTensors:
    """The tensors whose relevance is wanted. They are taken from the model while it runs in this thread."""

    def __init__(self, layers: Sequence[nn.Module], of_input: bool) -> None:
        self.ids: Tensor | None = None  # the token ids, if the word embedding is explained
        self.tensors: dict[int, tuple[Tensor, ...]] = {}  # of each layer, by its number
        self._layers, self._of_input, self._thread = layers, of_input, get_ident()

    @property
    def name(self) -> str:
        """What the tensors are, in words."""
        if not self._layers:
            return "the inputs" if self.ids is None else "the word embeddings"
        return (
            f"the {'input' if self._of_input else 'output'} of {', '.join(type(one).__name__ for one in self._layers)}"
        )

    def attach(self, changes: Changes) -> None:
        """Add the hooks that take the tensors."""
        if self.ids is not None:
            changes.hook(partial(register_module_forward_hook, self._embedded))
        hook = _input_hook if self._of_input else _output_hook
        for index, layer in enumerate(self._layers):
            changes.hook(hook(layer, partial(self._take, index)))

    def checked(self, name: str) -> list[Tensor]:
        """All tensors. RefusedError: a layer did not run."""
        missing = [layer for index, layer in enumerate(self._layers) if not self.tensors.get(index)]
        if missing or not self.tensors:
            what = f"run {type(missing[0]).__name__} with vectors" if missing else "embed the token ids as they are"
            raise ArgumentError(
                f"forward_func did not {what} in this thread: pass the module whose vectors {name} explains as layer, "
                "such as model.get_input_embeddings(). For DataParallel, pass the module that it wraps."
            )
        self.tensors = dict(sorted(self.tensors.items()))
        return [x for tensors in self.tensors.values() for x in tensors]

    def _take(self, index: int, values: Any) -> Any:
        """Keep the vectors among values, the last time that they come. The model continues with copies of them."""
        found: list[Tensor] = []

        def take(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                return x
            found.append(x if x.requires_grad else x.detach().requires_grad_())
            return found[-1].clone()  # the model may write to it

        values = tree_map(take, values)
        self.tensors[index] = tuple(found)
        return values

    def _embedded(self, module: nn.Module, args: Any, output: Any) -> Any:
        given = args[0] if isinstance(args, tuple) and args else None
        if self.tensors or get_ident() != self._thread or not isinstance(given, Tensor) or self.ids is None:
            return None
        vectors = isinstance(output, Tensor) and output.is_floating_point() and output.shape[:-1] == given.shape
        same = vectors and given.numel() == self.ids.numel() and not given.is_floating_point()
        if not same or not torch.equal(given.flatten(), self.ids.flatten().to(given)):
            return None
        return self._take(0, output)


def _output_hook(module: nn.Module, take: Callable[[Any], Any]) -> partial[Any]:
    """Registers a hook: in this thread, what `take` makes of a module's output stands in its place."""
    thread = get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return take(output) if get_ident() == thread else None

    return partial(module.register_forward_hook, hook)


def _input_hook(module: nn.Module, take: Callable[[Any], Any]) -> partial[Any]:
    """The same of a module's positional arguments, or of its first keyword argument if it has none."""
    thread = get_ident()

    # Another thread may call a hook without kwargs while it is added.
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        if get_ident() != thread:
            return None
        if args:
            return take(args), named
        return args, {name: take(x) if name == next(iter(named)) else x for name, x in named.items()}

    return partial(module.register_forward_pre_hook, hook, with_kwargs=True)


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
            if self._module is not None:
                changes.hook(_output_hook(self._module, partial(self._take, "embeddings returned")))
                return self.forward_func(*args, **kwargs)

            def begin(model: nn.Module) -> None:
                first = _first(model, self._layers)
                take = partial(self._take, f"The first layer, a {type(first).__name__}, was given")
                changes.hook(_input_hook(first, lambda x: (take(x[0]), *x[1:]) if isinstance(x, tuple) else take(x)))

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
