"""What `help` shows: each argument where a user looks for it, on two screens at most."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

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
    lines = re.findall(r"^ +\*{0,2}(\w+(?:, \w+)*): ", inspect.cleandoc(documentation or ""), re.MULTILINE)
    documented = {name for line in lines for name in line.split(", ")}
    return [name for name in inspect.signature(called).parameters if name not in ("self", *documented)]


def test_constructor_arguments() -> None:
    missing = {name: undocumented(one.__init__, one.__doc__) for name, one in CLASSES.items()}
    assert not {name: arguments for name, arguments in missing.items() if arguments}


def test_arguments() -> None:
    missing = {name: undocumented(one, one.__doc__) for name, one in FUNCTIONS.items()}
    assert not {name: arguments for name, arguments in missing.items() if arguments}


def test_length() -> None:
    lengths = {name: len((inspect.getdoc(one) or "").splitlines()) for name, one in {**PUBLIC, **METHODS}.items()}
    assert not {name: length for name, length in lengths.items() if length > TWO_SCREENS}


def test_example() -> None:
    assert not [name for name, one in CLASSES.items() if ">>>" not in (one.__doc__ or "")]
