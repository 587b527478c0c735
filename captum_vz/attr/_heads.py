"""`heads`: the query heads that are meant, in every form that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# One selection of query heads, for all layers or for one of them.
Heads = int | Sequence[int] | None


def select_heads(heads: Any, index: int, layers: int, count: int) -> tuple[int, ...] | None:
    """The heads that are chosen in layer `index`, checked against the `count` that it has."""
    if isinstance(heads, Sequence) and any(not isinstance(entry, int) for entry in heads):
        assert len(heads) == layers, f"heads has {len(heads)} selections, one a layer, but there are {layers} layers."
        heads = heads[index]
    if heads is None:
        return None
    chosen = (heads,) if isinstance(heads, int) else tuple(heads)
    assert chosen and all(isinstance(head, int) and 0 <= head < count for head in chosen), (
        f"heads is {heads!r}, but layer {index} has the query heads 0 to {count - 1}: "
        "pass an int, a list of ints, or a list with one selection for each layer."
    )
    return chosen
