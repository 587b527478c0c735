"""Studies record refusals and failures with their reason. `compare` raises them."""

from typing import Any

import pytest
from torch import Tensor

from captum_vz.errors import RefusedError, UnsupportedLayerError
from captum_vz.study import METHODS, Batch, as_method, compare
from tests.study.conftest import Shipped


class BrokenError(AssertionError):
    """An error of the model's own."""


@pytest.fixture
def broken(shipped: Shipped) -> Shipped:
    """A model that is built and found as usual, but whose forward fails."""
    model, tokenizer = shipped

    class Broken(type(model)):
        def forward(self, *_: Any, **__: Any) -> Any:
            raise BrokenError("the model's own")

    return Broken(model.config).eval(), tokenizer


def test_models_own_error_is_raised_by_compare(broken: Shipped) -> None:
    with pytest.raises(BrokenError, match="the model's own"):
        compare(broken, "some hat [MASK] small.")


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> str:
    """A method that refuses every model."""

    def rows(batch: Batch) -> Tensor:
        raise UnsupportedLayerError("this layer has no norm")

    monkeypatch.setitem(METHODS, "picky", as_method(rows))
    return "picky"


def test_refusal_of_named_method_raised(picky: str, shipped: Shipped) -> None:
    with pytest.raises(RefusedError, match="this layer has no norm"):
        compare(shipped, "some hat [MASK] small.", ["random", picky])
