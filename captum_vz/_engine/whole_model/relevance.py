"""Relevance: the gradients of some tensors of a model, changed by the rules of AttnLRP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook

from captum_vz._engine.structure.site import not_finite
from captum_vz._engine.taps.changes import Changes, undoing
from captum_vz._engine.whole_model.rules import Nonlinearities, change_gradients, whole_activations
from captum_vz._private import node_number, tree_map
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError


def relevance_gradients(
    explained: ExplainedTensors,
    forward: Callable[[], Any],
    number_of: Callable[[Any], Tensor],
    constant_weights: bool,
    name: str,
) -> Sequence[Tensor]:
    """The changed gradients of the explained tensors, in their order.

    Args:
        explained: The tensors, which are taken while `forward` runs.
        forward: The user's call.
        number_of: The number `()` that is explained, of an output.
        constant_weights: Whether attention weights are constants.
        name: The name of the method, for errors.

    Raises:
        UnsupportedLayerError: An operation has no rule, or the number does not depend on the tensors.
        RefusedError: A gradient is not finite.
    """
    with undoing():
        with torch.enable_grad(), Changes() as of_pass:
            explained.attach(of_pass)
            of_pass.hook(partial(register_module_forward_hook, whole_activations()))
            of_pass.enter(Nonlinearities())
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
    """The tensors whose relevance is wanted. They are taken from the model while it runs in this thread.

    Attributes:
        ids: The token ids, if the word embedding is explained.
        tensors: The tensors of each layer, by its number.
    """

    def __init__(self, layers: Sequence[nn.Module], of_input: bool) -> None:
        self.ids: Tensor | None = None
        self.tensors: dict[int, tuple[Tensor, ...]] = {}
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
        for index, layer in enumerate(self._layers):
            if self._of_input:
                add = layer.register_forward_pre_hook
                changes.hook(partial(add, partial(self._given, index), with_kwargs=True))
            else:
                changes.hook(partial(layer.register_forward_hook, partial(self._returned, index)))

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

    # All threads call these hooks. Another thread may call a hook without kwargs while it is added.
    def _embedded(self, module: nn.Module, args: Any, output: Any) -> Any:
        given = args[0] if isinstance(args, tuple) and args else None
        if self.tensors or get_ident() != self._thread or not isinstance(given, Tensor) or self.ids is None:
            return None
        vectors = isinstance(output, Tensor) and output.is_floating_point() and output.shape[:-1] == given.shape
        same = vectors and given.numel() == self.ids.numel() and not given.is_floating_point()
        if not same or not torch.equal(given.flatten(), self.ids.flatten().to(given)):
            return None
        return self._take(0, output)

    def _returned(self, index: int, module: nn.Module, args: Any, output: Any) -> Any:
        return self._take(index, output) if get_ident() == self._thread else None

    def _given(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        if get_ident() != self._thread:
            return None
        named = kwargs or {}
        if args:
            return self._take(index, args), named
        first = next(iter(named), None)
        return args, {name: self._take(index, x) if name == first else x for name, x in named.items()}
