"""The arguments `values`, `attention` and `heads`, which name parts of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from captum_vz._engine import ValueProjection
from captum_vz.errors import ArgumentError, UnsupportedLayerError

Part: TypeAlias = nn.Module | nn.Parameter
Select: TypeAlias = Callable[[Tensor], Tensor]
Where: TypeAlias = Part | tuple[Part, Select]
Values: TypeAlias = Where | Sequence[Where] | Callable[[nn.Module], Where] | None
Attention: TypeAlias = str | nn.Module | Sequence[nn.Module]

FORMS = (
    "pass a submodule or parameter of the layer, or (part, a function that selects the values from its result). For "
    "several layers, pass a list of these, or a function of the layer"
)


def attentions_of_layers(attention: Any, layers: Sequence[nn.Module]) -> list[str]:
    """Which attention of each layer is meant: "self", "cross", or a dot and the name of a module of the layer."""
    if isinstance(attention, str) and attention in ("self", "cross"):
        return [attention] * len(layers)
    parts = list(attention) if isinstance(attention, (list, tuple, nn.ModuleList)) else [attention]
    form = "'self', 'cross', or the attention module of the layer. For several layers, pass a list of such modules"
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        shown = repr(attention) if isinstance(attention, str) else f"of type {type(attention).__name__}"
        raise ArgumentError(f"attention is {shown}: pass {form}.")
    if len(parts) != len(layers):
        raise ArgumentError(f"attention has {len(parts)} modules for {len(layers)} layers: pass {form}.")
    return [f".{_name(part, layer, 'attention', form)}" for part, layer in zip(parts, layers, strict=True)]


def values_of_layers(values: Any, layers: Sequence[nn.Module]) -> list[ValueProjection]:
    """Where the values of each layer are. Empty if `values` is None."""
    if values is None:
        return []
    if isinstance(values, list):
        if len(values) != len(layers):
            raise ArgumentError(f"values has {len(values)} entries for {len(layers)} layers: {FORMS}.")
        return [_row(one, layer) for one, layer in zip(values, layers, strict=True)]
    by_layer = callable(values) and not isinstance(values, nn.Module)
    return [_row(values(layer) if by_layer else values, layer) for layer in layers]


def _row(where: Any, layer: nn.Module) -> ValueProjection:
    part, select = where if isinstance(where, tuple) and len(where) == 2 else (where, _itself)
    if not isinstance(part, (nn.Module, nn.Parameter)) or not callable(select):
        raise ArgumentError(f"values is of type {type(where).__name__}: {FORMS}.")
    name = _name(part, layer, "values", FORMS)
    return ValueProjection(name, select=_checked(select, name))


def _name(part: Part, layer: nn.Module, argument: str, forms: str) -> str:
    """The name of a part of a layer."""
    named = (*layer.named_modules(), *layer.named_parameters())
    name = next((name for name, one in named if one is part and name), None)
    if name is None:
        raise ArgumentError(
            f"{argument} is a {type(part).__name__} that is no part of the layer {type(layer).__name__}: {forms}."
        )
    return name


def _checked(select: Select, name: str) -> Select:
    """`select`, whose result has to be a view of values `(batch, in, d)` or `(batch, in, head, d_head)`."""
    axes = (3,) if select is _itself else (3, 4)  # of four axes, `select` has to return the tokens second

    def selected(projected: Tensor) -> Tensor:
        found = select(projected)
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if not isinstance(found, Tensor) or found.dim() not in axes:
            raise UnsupportedLayerError(
                f"values selects {shape} from what {name} returned, {tuple(projected.shape)}: expected values (batch, "
                "tokens, d), or of each head. Pass (part, function): the function returns the values as a view (batch, "
                "tokens, d) or (batch, tokens, heads, d_head)."
            )
        if found.untyped_storage().data_ptr() != projected.untyped_storage().data_ptr():
            raise UnsupportedLayerError(
                f"values selects a copy from what {name} returned: expected a view, into which zeros can be written. "
                "Select by indexing, chunk, unflatten and transpose."
            )
        return found

    return selected


def _itself(projected: Tensor) -> Tensor:
    return projected


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
