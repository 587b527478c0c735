"""Families that compute attention inline: where their values come from, one row a family.

Their weights are not to be seen, so the value projection's output is taken as the place where a value is zeroed. Only
whole sequences can be replayed. A row is keyed by the attention module's class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from captum_vz._engine.interface import lets_through


@dataclass(frozen=True)
class ValueProjection:
    """Where the values of an attention module are.

    Attributes:
        projection: Name of the submodule whose output `(batch, in, features)` holds the values.
        heads: Name of the attention module's attribute that counts its heads.
        head_columns: (head, heads, features) -> the features that are this head's values.
    """

    projection: str
    heads: str
    head_columns: Callable[[int, int, int], slice]

    def columns(self, module: nn.Module, features: int) -> list[slice]:
        """The features of each head's values."""
        heads = int(getattr(module, self.heads))
        return [self.head_columns(head, heads, features) for head in range(heads)]


def _own(head: int, heads: int, features: int) -> slice:
    """The projection holds values only, head by head."""
    width = features // heads
    return slice(head * width, (head + 1) * width)


def _last_third(head: int, heads: int, features: int) -> slice:
    """Queries, keys and values side by side, each head by head."""
    width = features // (3 * heads)
    return slice(2 * features // 3 + head * width, 2 * features // 3 + (head + 1) * width)


def _interleaved(head: int, heads: int, features: int) -> slice:
    """For each head its queries, keys and values."""
    width = features // (3 * heads)
    return slice((3 * head + 2) * width, (3 * head + 3) * width)


VALUE_PROJECTIONS = {
    "BloomAttention": ValueProjection("query_key_value", "num_heads", _interleaved),
    "GPTJAttention": ValueProjection("v_proj", "num_attention_heads", _own),
    "GPTNeoSelfAttention": ValueProjection("v_proj", "num_heads", _own),
    "MptAttention": ValueProjection("Wqkv", "n_heads", _last_third),
    "MPNetSelfAttention": ValueProjection("v", "num_attention_heads", _own),
    "DisentangledSelfAttention": ValueProjection("value_proj", "num_attention_heads", _own),
}


def family_of(module: nn.Module) -> ValueProjection | None:
    """The row for this module's class, or for one that it inherits from."""
    rows = (VALUE_PROJECTIONS.get(cls.__name__) for cls in type(module).__mro__)
    return next((row for row in rows if row is not None), None)


def is_value_projection(module: nn.Module, attention: nn.Module) -> bool:
    """Whether `module` is the one that projects the values of `attention`."""
    row = family_of(attention)
    return row is not None and getattr(attention, row.projection, None) is module


def visible_by_argument(args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, tokens: int) -> Tensor | None:
    """What a layer's mask lets through, `(batch, 1, out, in)`, told by the shape of the argument that holds it."""
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor) or value.dim() not in (2, 4) or value.shape[-1] != tokens:
            continue
        if value.shape[0] not in (1, batch) or (value.dim() == 2 and value.is_floating_point()):
            continue
        allowed = lets_through(value)
        return allowed if value.dim() == 4 else allowed[:, None, None, :]
    return None
