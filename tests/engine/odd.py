"""A row of the table of odd layers, and the naive twins that compute its map by definition.

The table is in `odd_attentions.py`, `odd_blocks.py`, `odd_changes.py`, `odd_windows.py` and `odd_torch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_vz import LayerAttention, LayerAttentionGradient, LayerAttentionNorm, ValueZeroing, ValueZeroingEffect
from captum_vz.errors import UnsupportedLayerError
from tests.engine.blocks import direction, zeroed_in_its_batch, zeroed_one_by_one

LONG = 18  # more tokens than the groups of which the definition runs first


@contextmanager
def zeroed_value(token: int | None, calls: Collection[int] | None = None) -> Iterator[None]:
    """Zero the value of one token in some calls of torch's attention, or in all. torch's fast path is off."""
    torchs, seen = F.scaled_dot_product_attention, []

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(value)
        if token is not None and (calls is None or len(seen) - 1 in calls):
            value = value.clone()
            value[..., token, :] = 0
        return torchs(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = attention
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = torchs
        torch.backends.mha.set_fastpath_enabled(True)


@torch.no_grad()
def by_call(layer: Any, *args: Any, sources: int | None = None, calls: Any = None, **kwargs: Any) -> Tensor:
    """The raw map of a layer that calls torch's attention, one rerun a source."""
    outputs = []
    for token in (None, *range(sources or args[0].shape[1])):
        with zeroed_value(token, calls):
            outputs.append(direction(layer(*args, **kwargs)))
    clean, *moved = outputs
    return torch.stack([(one - clean).square().sum(-1) / 2 for one in moved], dim=-1)


by_hook = torch.no_grad()(partial(zeroed_one_by_one, normalize=False))  # on `attention.value`, unless it is named
in_its_batch = partial(zeroed_in_its_batch, normalize=False)  # where examples depend on each other


@dataclass
class Odd:
    """A home-made layer, its inputs, and what is expected: the map of a naive twin, or a refusal.

    Attributes:
        layer: The layer. `model` runs it: the layer itself, unless it is given.
        inputs: What the model is given, `more` its further arguments.
        refused: Part of the message with which the methods `by` are refused. Empty: the map is right.
        twin: Computes the raw map from the layer, its inputs and its further arguments.
        options, arguments: What ValueZeroing, and its `attribute`, are given.
        token: A target for which the map is computed once more.
        target: What ValueZeroingEffect explains.
        around: A context in which the methods run.
    """

    layer: nn.Module
    inputs: Any
    refused: str = ""
    model: Any = None
    more: Any = ()
    twin: Callable[..., Tensor] = by_hook
    by: str = "zeroing"
    error: type[Exception] = UnsupportedLayerError
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    token: Any = None
    target: Any = (1, 0)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    tolerance: float = 1e-10

    @property
    def given(self) -> tuple[Any, ...]:
        return (*(self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)), *self.more)

    def attribute(self, by: str = "zeroing", **arguments: Any) -> Any:
        """What a method finds."""
        on, given = (self.model or self.layer, self.layer), (self.inputs, None, self.more or None)
        if by == "gradient":
            on = nn.Sequential(self.layer), self.layer
            return LayerAttentionGradient(*on).attribute(given[0], lambda y: y[:, 0].sum(-1), given[2])
        if by == "effect":
            return ValueZeroingEffect(*on).attribute(self.inputs, self.target, self.more or None)
        if by != "zeroing":
            return {"attention": LayerAttention, "norm": LayerAttentionNorm}[by](*on).attribute(*given)
        return ValueZeroing(*on, normalize=False, **self.options).attribute(*given, **self.arguments, **arguments)


Table = dict[str, Callable[[], Odd]]


def rows(name: str, row: Callable[..., Odd], *choices: Iterable[Any]) -> Table:
    """A row of the table for each combination of choices."""
    combined = product(*choices)
    return {": ".join((name, *(getattr(x, "__name__", str(x)) for x in one))): partial(row, *one) for one in combined}
