"""What the tests of the folded replay share."""

import pytest

from tests.budget import set_budget


@pytest.fixture(autouse=True)
def fold_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold layers that are too small to gain by it, as the tests' models are."""
    set_budget(monkeypatch, folding_calls=0)
