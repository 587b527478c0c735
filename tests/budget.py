"""Replace the constants of a device's budget in tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from captum_vz._engine.numerics import budget


def set_budget(monkeypatch: pytest.MonkeyPatch, **constants: Any) -> None:
    """Give all devices a budget with these constants until the test ends."""
    monkeypatch.setattr(budget, "BUDGETS", {kind: replace(one, **constants) for kind, one in budget.BUDGETS.items()})
    monkeypatch.setattr(budget, "OTHER_DEVICES", replace(budget.OTHER_DEVICES, **constants))
