"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def first_tensor(output: Any) -> Tensor | None:
    """A module's output, or the first element of it where it returns tuples, in tuples; None if that is no tensor."""
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def map_each(change: Callable[[Any], Any], arguments: Any) -> Any:
    """A layer's arguments changed one by one; what it is given twice stays one (states, as queries and as values)."""
    changed: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if id(value) not in changed:
            changed[id(value)] = change(value)
        return changed[id(value)]

    return tree_map(once, arguments)


def gather_rows(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`x[first, second]` of places that count from 0: whole rows at a time, in a fraction of that one's time."""
    place = first * x.shape[1] + second
    return x.flatten(0, 1).index_select(0, place.flatten()).unflatten(0, place.shape)


def for_query_heads(shared: Tensor, heads: int, dim: int = 1) -> Tensor:
    """What key-value heads hold along `dim`, for each of the query heads, of which several may share one."""
    times = heads // shared.shape[dim]
    return shared if times == 1 else shared.repeat_interleave(times, dim=dim)


def mask_as_bool(mask: Tensor) -> Tensor:
    """What an attention mask lets through: of booleans or 0 and 1, itself; of added numbers, all but the smallest.

    Models hide with anything from -10000 to the smallest number of the dtype; position biases stay far above that.
    """
    return mask > -9e3 if mask.is_floating_point() else mask.bool()


def describe(output: Tensor | None) -> str:
    return "no tensor" if output is None else f"a tensor of shape {tuple(output.shape)}"


def repeat_examples(value: Any, copies: int, batch: int) -> Any:
    """`copies` of a tensor that has one entry an example, one behind the other; anything else as it is."""
    if not isinstance(value, Tensor) or not value.dim() or len(value) != batch:
        return value
    return value.repeat(copies, *[1] * (value.dim() - 1))


def clone_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def first_numbers(output: Any) -> Tensor | None:
    """The first tensor of an output that holds numbers for each example."""
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.dim() and x.is_floating_point()]
    return found[0] if found else None
