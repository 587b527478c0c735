"""Fixtures of the folded replay's tests."""

import pytest

from tests.budget import set_budget


@pytest.fixture(autouse=True)
def fold_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold also small layers, for which folding does not pay."""
    set_budget(monkeypatch, folding_calls=0)
