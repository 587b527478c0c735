"""Attention that transformers has no hand in: torch.nn's own layers, and home-made models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_vz import LayerAttention, ValueZeroing, find_layers

WIDTH, HEADS, TOKENS = 16, 4, 5


@contextmanager
def zeroed_value(token: int | None, call: int) -> Iterator[None]:
    """While the block runs, one attention call of a layer loses the value of one token."""
    torchs, calls = F.scaled_dot_product_attention, []

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(value)
        if token is not None and len(calls) == call + 1:
            value = value.clone()
            value[:, :, token] = 0
        return torchs(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = torchs


@torch.no_grad()
def twin(layer: nn.Module, args: Any, kwargs: Any, sources: int, call: int = 0) -> Tensor:
    """The raw map of one layer, one rerun a source. The layer's fast path is off, as for any hooked layer."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        outputs = []
        for token in (None, *range(sources)):
            with zeroed_value(token, call):
                outputs.append(layer(*args, **kwargs))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    clean, *moved = outputs
    return torch.stack([1 - F.cosine_similarity(clean, one, dim=-1) for one in moved], dim=-1)


def raw(layer: nn.Module, forward: Any, inputs: Any, **options: Any) -> Tensor:
    return ValueZeroing(forward, layer, normalize=False, **options).attribute(inputs)


each_layout = pytest.mark.parametrize("batch_first", [True, False])


@each_layout
@pytest.mark.parametrize(("norm_first", "nested"), [(True, False), (False, False), (False, True)])
def test_encoder_layers_of_torch(batch_first: bool, norm_first: bool, nested: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=batch_first, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested and batch_first).double().eval()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    layers = find_layers(encoder)
    assert layers == list(encoder.layers)
    found = raw(layers[0], lambda x: encoder(x, src_key_padding_mask=padding), x)
    expected = twin(layers[0], (x,), {"src_key_padding_mask": padding}, TOKENS)
    expected = expected if batch_first else expected.transpose(0, 1)
    real = ~padding
    torch.testing.assert_close(found, expected * real[:, :, None] * real[:, None, :], rtol=0, atol=1e-12)
    assert torch.backends.mha.get_fastpath_enabled()


@each_layout
@pytest.mark.parametrize("sources", [TOKENS, 3])
@pytest.mark.parametrize("attention", ["self", "cross"])
def test_decoder_layers_of_torch(batch_first: bool, sources: int, attention: str) -> None:
    """Also where the memory is as long as the sequence, so that shapes do not tell the two apart."""
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, batch_first=batch_first)
    decoder = nn.TransformerDecoder(layer, 2).double().eval()
    x, memory = (torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (TOKENS, sources))
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
    found = raw(decoder.layers[0], lambda x, m: decoder(x, m, tgt_mask=causal), (x, memory), attention=attention)
    cross = attention == "cross"
    length = sources if cross else TOKENS
    expected = twin(decoder.layers[0], (x, memory), {"tgt_mask": causal}, length, call=int(cross))
    expected = expected if batch_first else expected.transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert cross or not found.triu(1).any()


class AsksForWeights(nn.Module):
    """A block that calls nn.MultiheadAttention as its documentation does, weights and all, and uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        context, weights = self.attention(x, x, x)
        self.seen = weights if weights is not None else self.seen
        return x + context + self.mlp(x + context)


def test_multihead_attention_that_is_asked_for_its_weights() -> None:
    block = AsksForWeights().double().eval()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    attention = LayerAttention(block, block).attribute(x)
    assert block.seen is not None
    torch.testing.assert_close(attention, block.seen)  # they get what they asked for
    with torch.no_grad():
        block(x)
    torch.testing.assert_close(attention, block.seen)  # and it is what they get without us

    def without_weights(x: Tensor) -> Tensor:
        context, _ = block.attention(x, x, x, need_weights=False)
        return x + context + block.mlp(x + context)

    class Twin(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return without_weights(x)

    torch.testing.assert_close(raw(block, block, x), twin(Twin(), (x,), {}, TOKENS), rtol=0, atol=1e-12)


class Attention(nn.Module):
    """Causal attention of a home-made GPT, with grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.keys_values = nn.Linear(WIDTH, WIDTH)  # two of each, of width 4
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.queries(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.keys_values(x).unflatten(-1, (4, -1)).transpose(1, 2).chunk(2, dim=1)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(context.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class InlineBlock(Block):
    """The same with the attention's code in the block itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + Attention.forward(self.attn, self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class HomeMade(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH)
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("block", [Block, InlineBlock])
def test_a_home_made_model(block: type[Block]) -> None:
    model = HomeMade(block).double().eval()
    ids = torch.randint(30, (2, TOKENS))
    layers = find_layers(model)
    assert layers == list(model.blocks)
    found = ValueZeroing(model, layers, normalize=False).attribute(ids)
    with torch.no_grad():
        inputs = [model.embedding(ids)]
        inputs.append(layers[0](inputs[0]))
    for one, layer, x in zip(found, layers, inputs, strict=True):
        torch.testing.assert_close(one, twin(layer, (x,), {}, TOKENS), rtol=0, atol=1e-12)
        assert not one.triu(1).any()


def test_torch_is_as_it_was_after_a_pass_and_after_an_error() -> None:
    before = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
    model = HomeMade(Block).eval()
    ValueZeroing(model, model.blocks).attribute(torch.randint(30, (1, 3)))
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
    with pytest.raises(IndexError):
        ValueZeroing(model, model.blocks).attribute(torch.tensor([[31]]))
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_rounded_once_as_in_torchs_own(dtype: torch.dtype) -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attends()

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x)

    layer, x, outputs = Layer(), torch.randn(2, 16, WIDTH).to(dtype), []
    exact = layer(x.double())
    ValueZeroing(lambda x: outputs.append(layer(x)), layer).attribute(x)
    error = (outputs[0].double() - exact).abs() / exact.abs().clamp_min(1e-3)
    assert error.max() < torch.finfo(dtype).eps
