"""The fast part has every form of one class for each shell, and one form of each other class. The rest is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from captum_vz import ValueZeroing, ValueZeroingEffect, ValueZeroingRollout
from tests.captum.configurations import AttentionGradient

# Maps of layers, maps that are joined, maps that need a graph, and what needs no map.
SHELLS = (ValueZeroing, ValueZeroingRollout, AttentionGradient, ValueZeroingEffect)


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        if not isinstance(item, pytest.Function) or item.path.parent != Path(__file__).parent:
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        method = parameters.get("method", getattr(parameters.get("configuration"), "method", None))
        if method is None or method in SHELLS:
            continue
        case = item.path, item.originalname, method
        if case in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(case)
