"""Attributes that the rollouts share."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

OtherMixingRule: TypeAlias = Literal["refuse", "ignore"]


def of_maps(name: str) -> Any:
    """A property that reads and writes the attribute `name` of `maps`."""

    def get(method: Any) -> Any:
        return getattr(method.maps, name)

    def put(method: Any, value: Any) -> None:
        setattr(method.maps, name, value)

    return property(get, put, doc=f"`{name}` of `maps`.")
