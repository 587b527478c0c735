"""The argument `heads`: a selection of query heads in all its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from captum_vz.errors import ArgumentError

# A selection of query heads, for all layers or for one layer.
Heads = int | Sequence[int] | None


def select_heads(heads: Any, index: int, layers: int, count: int) -> tuple[int, ...] | None:
    """The selected heads of layer `index` of `layers`, which has `count` heads. None: all heads."""
    if _is_list(heads) and any(entry is None or _is_list(entry) for entry in heads):
        if len(heads) != layers:
            raise ArgumentError(
                f"heads has {len(heads)} selections, one for each layer, but there are {layers} layers. Pass {layers}."
            )
        heads = heads[index]
    if heads is None:
        return None
    chosen = tuple(heads) if _is_list(heads) else (heads,)
    if not chosen or not all(type(head) is int and 0 <= head < count for head in chosen):
        raise ArgumentError(
            f"heads is {heads!r}, but layer {index} has the query heads 0 to {count - 1}: pass an int, a list of ints, "
            "or a list with one selection for each layer."
        )
    return chosen


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
