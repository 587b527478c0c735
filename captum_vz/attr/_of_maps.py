"""What the rollouts share in their constructors."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

OtherMixingRule: TypeAlias = Literal["refuse", "ignore"]


def of_maps(name: str) -> Any:
    """A property that is the attribute `name` of `maps`, also when it is reassigned."""

    def get(method: Any) -> Any:
        return getattr(method.maps, name)

    def put(method: Any, value: Any) -> None:
        setattr(method.maps, name, value)

    return property(get, put, doc=f"`{name}` of `maps`.")
