"""Parameters of tests, most of which are slow or one of many."""

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
    return _marked(values, fast, pytest.mark.slow)


def sampled(values: Iterable[Any], *sample: Any) -> list[Any]:
    """Values for `pytest.mark.parametrize`, all marked exhaustive except a sample. A tuple holds several arguments."""
    return _marked(values, sample, pytest.mark.exhaustive)


def _marked(values: Iterable[Any], without: tuple[Any, ...], mark: pytest.MarkDecorator) -> list[Any]:
    listed = list(values)
    assert all(one in listed for one in without), f"{without} are not all among {listed}"
    each = ((one, one if isinstance(one, tuple) else (one,)) for one in listed)
    return [pytest.param(*arguments, marks=() if one in without else mark) for one, arguments in each]
