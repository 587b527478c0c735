"""A call of the user's function on a batch, in which Captum may repeat examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from captum_vz._private import tree_leaves
from captum_vz.attr._call.arguments import bind_forward, examples_of


@dataclass(frozen=True)
class Call:
    """One call of the user's function on a batch of examples.

    Attributes:
        function: The function.
        inputs: Its first argument, or a mapping of all arguments by their names.
        further: The arguments after the first.
        batch: The number of examples.
        named: The keyword arguments of a call that also has positional ones.
    """

    function: Callable[..., Any]
    inputs: Any
    further: tuple[Any, ...] | None
    batch: int
    named: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> Call:
        """The call `function(*args, **kwargs)`. A mapping is passed by keyword, its only example repeated."""
        if len(args) == 1 and isinstance(args[0], Mapping):
            named = {name: _repeated(value, batch) for name, value in args[0].items()}
            return cls(function, {**named, **kwargs}, None, batch)
        if not args and kwargs:
            return cls(function, kwargs, None, batch)
        return cls(function, args[0] if args else None, args[1:] or None, batch, kwargs)

    @property
    def given_named(self) -> Callable[..., Any]:
        """The function with `named`, its keyword arguments, if it also has positional ones."""
        return partial(self.function, **self.named) if self.named else self.function

    def bound(self) -> Callable[[], Any]:
        """A function without arguments that makes the call. ArgumentError: the inputs have a wrong form."""
        return bind_forward(self.given_named, self.inputs, self.further)

    def examples(self, rows: list[int]) -> Call:
        """The call for some examples of the batch."""
        if rows == [*range(self.batch)]:
            return self
        inputs, further = examples_of(self.inputs, self.further, rows, self.batch)
        return Call(self.function, inputs, further, len(rows), examples_of(self.named, None, rows, self.batch)[0])

    def distinct(self, apart: bool) -> tuple[bytes | None, list[int], list[int]]:
        """A key of the distinct examples; where each stands first in the batch; and which one each example is.

        The key is None if the call holds an object whose content is unknown. Without `apart`, all examples are taken
        for distinct, because replicas have parts of the batch.
        """
        whole, each, known = blake2b(), [blake2b(b"" if apart else b"%d " % i) for i in range(self.batch)], True
        inputs = dict(self.inputs) if isinstance(self.inputs, Mapping) else self.inputs
        whole.update(f"{[*inputs] if isinstance(inputs, dict) else ''} {[*self.named]} ".encode())
        for leaf in tree_leaves((inputs, self.further, self.named)):
            if isinstance(leaf, Tensor):
                of_batch = bool(leaf.dim()) and len(leaf) == self.batch
                whole.update(f"{leaf.dtype} {tuple(leaf.shape[of_batch:])} {of_batch} ".encode())
                for state, row in zip(each if of_batch else [whole], leaf if of_batch else [leaf], strict=True):
                    state.update(_bytes(row))
            else:
                known = known and isinstance(leaf, (str, bool, int, float, type(None)))
                whole.update(f"{type(leaf)} {leaf!r} ".encode())
        keys = [state.digest() for state in each]
        first = {key: keys.index(key) for key in keys}
        order = {key: place for place, key in enumerate(first)}
        whole.update(b"".join(first))
        return whole.digest() if known else None, [*first.values()], [order[key] for key in keys]


def _repeated(value: Any, batch: int) -> Any:
    """A tensor of one example, once for each example of the batch."""
    one = isinstance(value, Tensor) and value.dim() and len(value) == 1
    return value.expand(batch, *value.shape[1:]) if one else value


def _bytes(x: Tensor) -> bytes:
    x = x.detach().contiguous().reshape(-1)
    return x.cpu().view(torch.uint8).numpy().tobytes() if x.numel() else b""
