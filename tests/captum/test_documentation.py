"""What `help` shows: each argument where a user looks for it, on two screens at most."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import captum_vz
from captum_vz import attr, functional, metrics

TWO_SCREENS = 100
PUBLIC = {name: getattr(module, name) for module in (attr, functional, metrics) for name in module.__all__}
CLASSES = {name: one for name, one in PUBLIC.items() if inspect.isclass(one) and hasattr(one, "attribute")}
METHODS = {
    f"{name}.{method}": getattr(one, method)
    for name, one in CLASSES.items()
    for method in ("attribute", "run", "terms", "mixing_ratio", "join_run")
    if hasattr(one, method)
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: one for name, one in PUBLIC.items() if inspect.isfunction(one)},
    **METHODS,
    "find_layers": captum_vz.find_layers,
    "verify": captum_vz.verify,
}


def undocumented(called: Callable[..., Any], documentation: str | None) -> list[str]:
    """The parameters of a function that have no line in the `Args` of a docstring."""
    documented = re.findall(r"^ +\*{0,2}(\w+): ", inspect.cleandoc(documentation or ""), re.MULTILINE)
    return [name for name in inspect.signature(called).parameters if name not in ("self", *documented)]


@pytest.mark.parametrize("name", CLASSES)
def test_constructor_arguments(name: str) -> None:
    assert undocumented(CLASSES[name].__init__, CLASSES[name].__doc__) == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments(name: str) -> None:
    assert undocumented(FUNCTIONS[name], FUNCTIONS[name].__doc__) == []


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_length(name: str) -> None:
    documented = {**PUBLIC, **METHODS}[name]
    assert len((inspect.getdoc(documented) or "").splitlines()) <= TWO_SCREENS


@pytest.mark.parametrize("name", CLASSES)
def test_example(name: str) -> None:
    assert ">>>" in (CLASSES[name].__doc__ or "")
