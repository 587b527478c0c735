"""What the tests mean by equal."""

from __future__ import annotations

from typing import Any

import torch


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Maps, or lists of maps, that differ by rounding at most: in float64 unless a tolerance says otherwise."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
