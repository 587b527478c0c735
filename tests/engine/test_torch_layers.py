"""Attention without transformers: weights, function modes, half precision, and what is found by `find_layers`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from tests.engine.odd_torch import HEADS, WIDTH, HomeMade, asks_for_weights, drawn


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
