"""The token vectors that a model starts from, to differentiate its layers by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# What to put in the place of vectors that were found.
Take = Callable[[Tensor], Tensor]


class Embedded:
    """One call of a forward function, in which the vectors of its tokens `(batch, tokens, d)` are a leaf of the graph.

    They are what `module` returns; or what `inputs` begins with, if these are vectors; or what the model looks up for
    the ids that they begin with: it is seen when it is looked up, so that the module that does it need not be known.

    Attributes:
        inputs: What to call it with in place of the user's inputs.
    """

    def __init__(self, forward_func: Callable[..., Any], inputs: Any, module: nn.Module | None) -> None:
        self.forward_func = forward_func
        self.inputs = inputs
        self._vectors: Tensor | None = None
        self._finding: AbstractContextManager[Any] = nullcontext()
        if module is not None:
            self._finding = _returned_by(module, self._take)
            return
        key, first = _first(inputs)
        if not isinstance(first, Tensor):
            return  # whoever makes the call says what is wrong with it
        vectors = first.is_floating_point()
        assert first.dim() == 2 + vectors, (
            f"inputs begins with {first.dtype} {tuple(first.shape)}: pass token ids (batch, tokens), or vectors "
            "(batch, tokens, d) for a forward_func that takes them. For other inputs (images, sound), pass the module "
            "that makes vectors of them as `embeddings`."
        )
        if not vectors:
            self._finding = _LookedUp(first, self._take)
            return
        with torch.enable_grad():
            leaf = self._take(first)
        if isinstance(inputs, Mapping):
            self.inputs = {**inputs, key: leaf}
        else:
            self.inputs = (leaf, *inputs[1:]) if isinstance(inputs, tuple) else leaf

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward function with gradients, whatever the caller has switched off."""
        with torch.enable_grad(), self._finding:
            return self.forward_func(*args, **kwargs)

    @property
    def vectors(self) -> Tensor:
        """The leaf, once it was found."""
        assert self._vectors is not None, (
            "forward_func looked up no vectors for the token ids that inputs begins with: looked for a call of "
            "torch.nn.functional.embedding with these ids, in this thread (DataParallel runs others: pass the module "
            "that it wraps). Pass the module whose output the vectors are as `embeddings`, and see that it runs."
        )
        return self._vectors

    def _take(self, vectors: Tensor) -> Tensor:
        """Make vectors the leaf, if they are the first, and give what goes on in their place."""
        if self._vectors is not None:
            return vectors
        assert isinstance(vectors, Tensor) and vectors.dim() == 3, (
            f"embeddings returned {tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__}: "
            "pass a module that returns vectors (batch, tokens, d)."
        )
        self._vectors = vectors.detach().requires_grad_()
        return self._vectors.clone()  # a model may write into it


def _first(inputs: Any) -> tuple[str, Any]:
    if not isinstance(inputs, Mapping):
        return "", inputs[0] if isinstance(inputs, tuple) and inputs else inputs
    for key in ("inputs_embeds", "input_ids"):
        if isinstance(inputs.get(key), Tensor):
            return key, inputs[key]
    raise AssertionError(
        f"inputs holds {', '.join(map(repr, inputs))}, but neither input_ids nor inputs_embeds: pass the module whose "
        "output the tokens' vectors are as `embeddings`."
    )


class _LookedUp(TorchFunctionMode):
    """Finds what is looked up for `ids` in a `with` block, in this thread. Nothing is registered with the model."""

    def __init__(self, ids: Tensor, take: Take) -> None:
        super().__init__()
        self.ids = ids
        self.take = take

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.embedding or args[0].shape != self.ids.shape:
            return result
        return self.take(result) if torch.equal(args[0], self.ids.to(args[0].device)) else result


@contextmanager
def _returned_by(module: nn.Module, take: Take) -> Iterator[None]:
    """Finds what a module returns in a `with` block, in this thread."""
    thread = get_ident()

    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        return take(output) if get_ident() == thread else None

    with module.register_forward_hook(replace):
        yield
