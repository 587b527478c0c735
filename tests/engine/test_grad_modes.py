"""Unknown code that computes something else under another mode of gradients. The decision is the same in all modes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from captum_vz import ValueZeroing
from captum_vz.errors import UnsupportedLayerError
from tests.engine.blocks import block_of, sequences, zeroed_one_by_one
from tests.engine.compare import assert_same
from tests.engine.odd_attentions import Computed, attend, by_hand, plain


def only_without_gradients(module: object, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value) + (0 if torch.is_grad_enabled() else value)


def numpy_alone(module: object, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value) + torch.from_numpy(value.numpy())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("compute", "cause"), [(only_without_gradients, "other numbers under"), (numpy_alone, "fails under")]
)
def test_code_that_is_another_with_gradients(compute: Callable[..., Tensor], cause: str, inference: bool) -> None:
    block, x = block_of(Computed(compute)), sequences(2)
    with torch.inference_mode(inference), pytest.raises(UnsupportedLayerError, match=cause):
        ValueZeroing(block, block).attribute(x)


def refuses_gradients(module: object, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As flex attention does on a CPU."""
    if torch.is_grad_enabled():
        raise NotImplementedError("no backward")
    with torch.inference_mode():
        return by_hand(query, key, value)


def another_with_gradients(module: object, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return by_hand(query, key, value) + (0 if torch.is_grad_enabled() else value)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("compute", [refuses_gradients, another_with_gradients])
def test_named_values_need_no_gradients(compute: Callable[..., Tensor], inference: bool) -> None:
    """They are zeroed where they are projected, whatever the layer does with them then. No graph has to show that."""
    block, x = block_of(Computed(compute)), sequences(2)
    with torch.inference_mode(inference):
        found = ValueZeroing(block, block, values=block.attention.value).attribute(x)
    with torch.no_grad():
        assert_same(found, zeroed_one_by_one(block, x))


def test_weights_made_in_inference_mode() -> None:
    """No graph can hold them, so copies stand for them in the run with a graph."""
    with torch.inference_mode():
        block = block_of(Computed(plain))
    found = ValueZeroing(block, block).attribute(x := sequences(2))
    with torch.no_grad():
        assert_same(found, zeroed_one_by_one(block, x))
