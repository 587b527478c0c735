"""Each night runs all classes. Else one class for each shell is tested, and those that have a test of their own.

Tests of `all_cases` run all classes at any time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from captum_vz import ValueZeroing, ValueZeroingEffect, ValueZeroingRollout
from tests.captum.configurations import AttentionGradient

# Maps of layers, maps that are joined, maps that need a graph, and what needs no map.
SHELLS = (ValueZeroing, ValueZeroingRollout, AttentionGradient, ValueZeroingEffect)


@pytest.hookimpl(tryfirst=True)  # before a sample of cases is drawn
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_grid = hasattr(item, "callspec") and not item.get_closest_marker("all_cases")
        if item.path.parent == Path(__file__).parent and is_grid:
            parameters = item.callspec.params
            method = parameters.get("method", getattr(parameters.get("configuration"), "method", None))
            if isinstance(method, type) and method not in SHELLS:
                item.add_marker(pytest.mark.exhaustive)
