"""What `view` is given, as methods with a list of maps each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError

SUM_ERROR = 1e-3  # of rows that are said to sum to 1

EXPECTED = (
    "a map (out, in), a list or stack of layer maps, a dict of titles to maps, or a dict of methods to lists of maps"
)


@dataclass(frozen=True)
class Panel:
    """One map of a method.

    Attributes:
        label: Such as "layer 3" or "rollout".
        scores: `(out, in)` in float64: shares of rows that sum to 1 or are zero; scores as given if there are signs.
        totals: The sums of the rows before they were divided, `(out,)`. None: rows are given as shares.
    """

    label: str
    scores: Tensor
    totals: Tensor | None


@dataclass(frozen=True)
class Method:
    """A method, its maps in the order of the slider, and whether scores have signs."""

    name: str
    panels: tuple[Panel, ...]
    signed: bool


def read_methods(maps: Any, rollout: Any, shape: tuple[int, int]) -> list[Method]:
    """The methods of `view`'s argument `maps`, all maps `shape` (out, in)."""
    if isinstance(maps, Mapping) and any(_is_many(one) for one in maps.values()):
        found = {str(name): _labelled(one, f"{name}: ") for name, one in maps.items()}
    else:
        found = {"": _labelled(maps, "")}
    for name, one in _rollouts(rollout, list(found)).items():
        found[name]["rollout"] = one
    if not found or not all(found.values()):
        raise ArgumentError(f"maps holds no map: expected {EXPECTED}.")
    return [_method(name, panels, shape) for name, panels in found.items()]


def _rollouts(rollout: Any, names: list[str]) -> dict[str, Any]:
    """The rollouts by the names of their methods."""
    if rollout is None:
        return {}
    given = {str(name): one for name, one in rollout.items()} if isinstance(rollout, Mapping) else {names[0]: rollout}
    unknown = [name for name in given if name not in names]
    if unknown or (len(names) > 1 and not isinstance(rollout, Mapping)):
        raise ArgumentError(
            f"rollout is {'a dict of ' + ', '.join(unknown) if unknown else 'one map'}, and the methods are "
            f"{', '.join(names)}: pass a dict of these names to maps."
        )
    return given


def _is_many(value: Any) -> bool:
    """Whether a value of a dict is a method's list of maps, and not one map."""
    if isinstance(value, Tensor):
        return value.dim() > 3 or (value.dim() == 3 and len(value) > 1)
    return isinstance(value, (Mapping, Sequence))


def _labelled(maps: Any, place: str) -> dict[str, Any]:
    """The maps of one method by their labels."""
    if isinstance(maps, Mapping):
        return {str(label): one for label, one in maps.items()}
    if isinstance(maps, Tensor) and maps.dim() == 2:
        return {"map": maps}
    if isinstance(maps, (Tensor, Sequence)) and not isinstance(maps, str):
        return {f"layer {index}": one for index, one in enumerate(maps)}
    raise ArgumentError(f"{place}got {type(maps).__name__}: expected {EXPECTED}.")


def _method(name: str, panels: Mapping[str, Any], shape: tuple[int, int]) -> Method:
    place = f"{name}, " if name else ""
    checked = {label: _one_example(one, shape, f"{place}{label}") for label, one in panels.items()}
    signed = any(bool((one < 0).any()) for one in checked.values())
    return Method(name, tuple(_panel(label, one, signed) for label, one in checked.items()), signed)


def _one_example(scores: Any, shape: tuple[int, int], place: str) -> Tensor:
    """A map `(out, in)` in float64 on the CPU."""
    if not isinstance(scores, Tensor):
        raise ArgumentError(f"{place}: got {type(scores).__name__}, expected a tensor (out, in) or (1, out, in).")
    found = tuple(scores.shape)
    if scores.dim() == 3 and len(scores) != 1:
        raise ArgumentError(f"{place}: got a batch {found}. Pass the maps of one example, such as one[0] of each map.")
    example = scores[0] if scores.dim() == 3 else scores
    if tuple(example.shape) != shape:
        raise ArgumentError(
            f"{place}: got a map {found}, expected {shape}: {shape[0]} tokens (rows) and {shape[1]} source tokens. "
            "Pass columns= if sources are other tokens."
        )
    if not example.isfinite().all():
        raise ArgumentError(f"{place}: got NaN or infinity, which cannot be shown. Pass finite scores.")
    return example.detach().cpu().double()


def _panel(label: str, scores: Tensor, signed: bool) -> Panel:
    if signed:
        return Panel(label, scores, None)
    sums = scores.sum(1)
    shares = scores / torch.where(sums > 0, sums, 1)[:, None]
    given_as_shares = bool(((sums - 1).abs() <= SUM_ERROR)[sums > 0].all())
    return Panel(label, shares, None if given_as_shares else sums)
