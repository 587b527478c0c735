"""Attention without transformers: weights, function modes, half precision, and what is found by `find_layers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaModel

from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError, RefusedError
from tests.engine.compare import assert_same
from tests.engine.odd_torch import HEADS, WIDTH, HomeMade, OneForward, asks_for_weights, drawn, without_heads


def test_multihead_attention_with_weights() -> None:
    odd = asks_for_weights(uses=False)
    attention, block = odd.attribute("attention"), odd.layer
    torch.testing.assert_close(attention, block.seen)  # the block gets the weights that it asks for
    with torch.no_grad():
        block(*odd.given)
    torch.testing.assert_close(attention, block.seen)  # and the same weights as without an attribution


@pytest.mark.parametrize("inlined", [False, True])
def test_find_layers_of_home_made_model(inlined: bool) -> None:
    model = HomeMade(inlined)
    assert find_layers(model) == list(model.blocks)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 32), 2)
    assert find_layers(encoder) == list(encoder.layers)


def test_torch_is_unchanged_after_errors() -> None:
    model = HomeMade(inlined=False)
    before = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
    with pytest.raises(ArgumentError, match="An Embedding of 30 entries was given ids from 31 to 31"):
        ValueZeroing(model, model.blocks).attribute(torch.tensor([[31]]))
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
    assert torch.backends.mha.get_fastpath_enabled()


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    layer, x, outputs = nn.Sequential(Attends()), drawn(16).to(dtype), []
    exact = layer(x.double())
    ValueZeroing(lambda x: outputs.append(layer(x)), layer).attribute(x)
    error = (outputs[0].double() - exact).abs() / exact.abs().clamp_min(1e-3)
    assert error.max() < torch.finfo(dtype).eps


TORCHS = F.scaled_dot_product_attention


class Mode(TorchFunctionMode):
    """Scales queries. It compares with torch's own function, or with the current value of its public name."""

    def __init__(self, sharper: int, by_name: bool) -> None:
        super().__init__()
        self.sharper, self.by_name = sharper, by_name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is (F.scaled_dot_product_attention if self.by_name else TORCHS):
            args = (args[0] * self.sharper, *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("family", ["torch", "transformers"])
def test_own_function_mode(family: str, inside: bool, by_name: bool) -> None:
    block: nn.Module = OneForward(without_heads)
    x, forward = drawn(), block
    if family == "transformers":
        size = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 1.0}
        model = LlamaModel(LlamaConfig(**size, intermediate_size=8, vocab_size=8, num_hidden_layers=1)).double().eval()
        model.set_attn_implementation("sdpa")
        block, forward = model.layers[0], lambda x: model(inputs_embeds=x).last_hidden_state

    def attribute(sharper: int) -> Tensor:
        def run(x: Tensor) -> Tensor:
            with Mode(sharper, by_name):
                return forward(x)

        if inside:
            return ValueZeroing(run, block).attribute(x)
        with Mode(sharper, by_name):
            return ValueZeroing(forward, block).attribute(x)

    assert_same(attribute(1), ValueZeroing(forward, block).attribute(x))
    with pytest.raises(RefusedError, match=r"^The function mode Mode replaces .* computes something else"):
        attribute(3)
