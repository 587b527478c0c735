"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

# What to put in the place of vectors that were found; the text says who has them.
ReplaceVectors = Callable[[str, Any], Any]
ADVICE = "pass the module that returns the vectors as `embeddings`, such as model.get_input_embeddings()"


class EmbeddingLeaf:
    """One call of a forward function, in which the vectors of its tokens are a leaf of the graph.

    They are what `module` returns, `(batch, tokens, d)`; if it is None, what goes into the first layer of the stack
    that `layers` are part of, with the axes in that layer's order.
    """

    def __init__(self, forward_func: Callable[..., Any], layers: Sequence[nn.Module], module: nn.Module | None) -> None:
        self.forward_func = forward_func
        self._vectors: Tensor | None = None
        if module is None:
            self._finding = _given_to_first(layers, self._take)
            self._source = f"a module that holds its stack, and no other {type(layers[0]).__name__} before that"
        else:
            self._finding = _returned_by(module, self._take)
            self._source = f"the {type(module).__name__} that is passed as `embeddings`"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward function with gradients, whatever the caller has switched off."""
        with torch.enable_grad(), self._finding:
            return self.forward_func(*args, **kwargs)

    @property
    def vectors(self) -> Tensor:
        """The leaf, once it was found."""
        assert self._vectors is not None, (
            "forward_func ran a layer, but not before it, in this thread (DataParallel runs others: pass the module "
            f"that it wraps), {self._source}: {ADVICE}, and see that it runs first."
        )
        return self._vectors

    def _take(self, who: str, vectors: Any) -> Any:
        """Make vectors the leaf, if they are the first, and give what goes on in their place."""
        if self._vectors is not None:
            return vectors
        found = f"{vectors.dtype} {tuple(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
        assert isinstance(vectors, Tensor) and vectors.dim() == 3 and vectors.is_floating_point(), (
            f"{who} {found}, which is not one vector a token (batch, tokens, d): {ADVICE}."
        )
        self._vectors = vectors.detach().requires_grad_()
        return self._vectors.clone()  # a model may write into it


@contextmanager
def _returned_by(module: nn.Module, take: ReplaceVectors) -> Iterator[None]:
    """Finds what a module returns in a `with` block, in this thread."""
    thread = get_ident()

    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        return take("embeddings returned", output) if get_ident() == thread else None

    with module.register_forward_hook(replace):
        yield


@contextmanager
def _given_to_first(layers: Sequence[nn.Module], take: ReplaceVectors) -> Iterator[None]:
    """Finds what the first layer of a stack is given in a `with` block, in this thread."""
    thread = get_ident()

    # Hooks are called by all threads. One that comes while another thread puts a hook on may call it without kwargs.
    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if get_ident() != thread:
            return None
        who, named = f"The first layer, a {type(module).__name__}, was given", kwargs or {}
        if args:
            return (take(who, args[0]), *args[1:]), named
        return args, {name: take(who, x) if place == 0 else x for place, (name, x) in enumerate(named.items())}

    def begin(model: nn.Module) -> None:
        hooks.enter_context(_first(model, layers).register_forward_pre_hook(replace, with_kwargs=True))

    with ExitStack() as hooks:
        hooks.enter_context(first_module_holding(layers, begin))
        yield


@contextmanager
def first_module_holding(layers: Sequence[nn.Module], show: Callable[[nn.Module], None]) -> Iterator[None]:
    """Shows, in a `with` block and in this thread, the module that holds the layers, as soon as it runs.

    Which model a function runs is not known: the first module to run that holds a layer of the stack shows the others.
    """
    thread = get_ident()
    shown = False

    def look(module: nn.Module, args: Any) -> None:
        nonlocal shown
        if shown or get_ident() != thread:
            return
        alone = type(module) is type(layers[0])  # layers that a function calls by hand: which is the first, none shows
        shown = alone or layers[0] in module.modules()
        if shown and not alone:
            show(module)

    with register_module_forward_pre_hook(look):
        yield


def _first(model: nn.Module, layers: Sequence[nn.Module]) -> nn.Module:
    """The first layer of a stack, which is all that the outermost list of modules holds in which `layers` are."""
    stack = next((one for one in _lists(model) if layers[0] in one.modules()), model)
    kind = type(layers[0])
    elsewhere = set(model.modules()) - set(stack.modules())
    assert elsewhere.isdisjoint(layers), (
        "layer lists layers of several stacks, each of which starts from vectors of its own: pass those of one, or "
        f"{ADVICE}."
    )
    alike = [module for module in stack.modules() if type(module) is kind]
    above = [one for one in _lists(stack) if alike[0] in one.modules()]
    assert (above or len(alike) == 1) and all(alike[0] in next(one.children()).modules() for one in above), (
        f"{type(model).__name__} does not show which layer of the stack is the first: looked for a ModuleList or "
        f"Sequential that begins with a {kind.__name__}, as the first of `layer` is; {ADVICE}."
    )
    return alike[0]


def _lists(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
