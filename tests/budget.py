"""Replace the constants of a device's budget in tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from captum_vz._engine import numerics


def set_budget(monkeypatch: pytest.MonkeyPatch, **constants: Any) -> None:
    """Give all devices a budget with these constants until the test ends."""
    monkeypatch.setattr(
        numerics, "BUDGETS", {kind: replace(one, **constants) for kind, one in numerics.BUDGETS.items()}
    )
    monkeypatch.setattr(numerics, "OTHER_DEVICES", replace(numerics.OTHER_DEVICES, **constants))
