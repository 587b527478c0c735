"""Parameters of tests, most of which are slow."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import pytest
from transformers import LlamaModel

# What models call the argument that takes a cache: transformers 5.24 renamed it.
CACHES = [name for name in ("cache", "past_key_values") if name in inspect.signature(LlamaModel.forward).parameters]


def quick(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Values for `pytest.mark.parametrize`, all marked slow except `fast`. A tuple holds several arguments."""
    listed = list(values)
    assert all(one in listed for one in fast), f"{fast} are not all among {listed}"
    each = ((one, one if isinstance(one, tuple) else (one,)) for one in listed)
    return [pytest.param(*arguments, marks=() if one in fast else pytest.mark.slow) for one, arguments in each]
