"""What the tests call equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.reference.case import Case


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Assert that maps, or lists of maps, differ by float64's rounding at most, unless `tolerance` says otherwise."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def assert_batch_is_its_examples(method: Any, case: Case, **arguments: Any) -> Tensor:
    """Assert that the map of a padded batch holds the maps of its examples, and zeros at padding."""
    together: Tensor = method.attribute(case.inputs, **arguments)
    for index in range(case.batch):
        alone = method.attribute(case.example(index).inputs, **arguments)[0]
        length = len(alone)
        assert_same(together[index, :length, :length], alone)
        assert not together[index, length:].any()
        assert not together[index, :, length:].any()
    return together
