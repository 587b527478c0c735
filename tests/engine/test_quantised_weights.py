"""Linear modules whose weights are of another class, as torchao quantises them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ALTI, ALTILogit, LayerAttentionNorm, ValueZeroingEffect, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.testbed import load_model
from tests.engine.compare import assert_same


class Quantised(Tensor):
    """A weight that linear modules multiply with, and that cannot be transposed. Products are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.T.__get__, torch.Tensor.permute, torch.Tensor.t):
            raise NotImplementedError("Quantised has no permute")
        result = super().__torch_function__(func, types, args, kwargs)
        linear = func is torch.nn.functional.linear
        return result.as_subclass(Tensor) if linear else result


def quantise(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().as_subclass(Quantised), requires_grad=False)
    return model


@pytest.mark.parametrize("method", [LayerAttentionNorm, ALTI])
def test_norms_equal_those_of_plain_weights(method: Any) -> None:
    model, tokenizer = load_model()
    inputs = tokenizer("the hats [MASK] here.", return_tensors="pt")
    expected = method(model, find_layers(model)).attribute(inputs)
    assert_same(method(quantise(model), find_layers(model)).attribute(inputs), expected, tolerance=1e-5)


def test_effects_equal_those_of_plain_weights() -> None:
    model, tokenizer = load_model("causal")
    inputs = tokenizer("the hat", return_tensors="pt")
    expected = ValueZeroingEffect(model, find_layers(model)).attribute(inputs, target=(-1, 5))
    found = ValueZeroingEffect(quantise(model), find_layers(model)).attribute(inputs, target=(-1, 5))
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_logits_need_plain_weights() -> None:
    model, tokenizer = load_model("causal")
    quantise(model)
    with pytest.raises(ArgumentError, match="is a Quantised"):
        ALTILogit(model, find_layers(model)).attribute(tokenizer("the hat", return_tensors="pt"), target=(-1, 5))
