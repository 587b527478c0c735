"""Replace the constants of a device's budget in tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from captum_vz._engine.numerics import tensors


def set_budget(monkeypatch: pytest.MonkeyPatch, **constants: Any) -> None:
    """Give all devices a budget with these constants until the test ends."""
    monkeypatch.setattr(tensors, "BUDGETS", {kind: replace(one, **constants) for kind, one in tensors.BUDGETS.items()})
    monkeypatch.setattr(tensors, "OTHER_DEVICES", replace(tensors.OTHER_DEVICES, **constants))
