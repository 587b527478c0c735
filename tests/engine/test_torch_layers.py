"""Attention without transformers: layers of torch.nn, and home-made models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaModel

from captum_vz import LayerAttention, ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from tests.engine.parameters import quick

WIDTH, HEADS, TOKENS = 16, 4, 5


@contextmanager
def zeroed_value(token: int | None, zeroed: Collection[int]) -> Iterator[None]:
    """Zero the value of one token in some attention calls of a layer, inside a `with` block."""
    torchs, calls = F.scaled_dot_product_attention, []

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(value)
        if token is not None and len(calls) - 1 in zeroed:
            value = value.clone()
            value[..., token, :] = 0
        return torchs(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = torchs


@torch.no_grad()
def twin(layer: nn.Module, args: Any, kwargs: Any, sources: int, calls: Collection[int] = (0,)) -> Tensor:
    """The raw map of one layer, one rerun a source. torch's fast path is off, as for any hooked layer."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        outputs = []
        for token in (None, *range(sources)):
            with zeroed_value(token, calls):
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
    """With a memory as long as the sequence, shapes do not distinguish the two attentions."""
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, batch_first=batch_first)
    decoder = nn.TransformerDecoder(layer, 2).double().eval()
    x, memory = (torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (TOKENS, sources))
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
    found = raw(decoder.layers[0], lambda x, m: decoder(x, m, tgt_mask=causal), (x, memory), attention=attention)
    cross = attention == "cross"
    length = sources if cross else TOKENS
    expected = twin(decoder.layers[0], (x, memory), {"tgt_mask": causal}, length, calls=[int(cross)])
    expected = expected if batch_first else expected.transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert cross or not found.triu(1).any()


class AsksForWeights(nn.Module):
    """A block that asks nn.MultiheadAttention for its weights, as torch's documentation does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        context, weights = self.attention(x, x, x)
        self.seen = weights if weights is not None else self.seen
        return x + context + self.mlp(x + context)


def test_multihead_attention_with_weights() -> None:
    block = AsksForWeights().double().eval()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    attention = LayerAttention(block, block).attribute(x)
    assert block.seen is not None
    torch.testing.assert_close(attention, block.seen)  # the block gets the weights that it asks for
    with torch.no_grad():
        block(x)
    torch.testing.assert_close(attention, block.seen)  # and the same weights as without an attribution

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
        self.keys_values = nn.Linear(WIDTH, WIDTH)  # two keys and two values of width 4
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
    """The same, with the attention's code in the block."""

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


def test_torch_is_unchanged_after_errors() -> None:
    before = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
    model = HomeMade(Block).eval()
    ValueZeroing(model, model.blocks).attribute(torch.randint(30, (1, 3)))
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
    with pytest.raises(ArgumentError, match="An Embedding of 30 entries was given ids from 31 to 31"):
        ValueZeroing(model, model.blocks).attribute(torch.tensor([[31]]))
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
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


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def merged(context: Tensor) -> Tensor:
    return context.transpose(1, 2).flatten(2)


def difference(x: Tensor) -> Tensor:
    """Differential attention: the difference of two attentions over the same values."""
    first, second = heads_of(x), heads_of(x.flip(-1))
    attend = F.scaled_dot_product_attention
    return merged(attend(first, second, first) - attend(second, second, first) / 2)


def head_by_head(x: Tensor) -> Tensor:
    heads = heads_of(x).split(1, dim=1)
    return merged(torch.cat([F.scaled_dot_product_attention(head, head, head) for head in heads], dim=1))


def without_heads(x: Tensor) -> Tensor:
    mask = torch.ones(len(x), TOKENS, TOKENS, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(x, x, x, mask)


def local_and_global(x: Tensor) -> Tensor:
    near = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-1)
    one, other = heads_of(x).split(1, dim=1)
    attend = F.scaled_dot_product_attention
    return merged(torch.cat([attend(one, one, one, near), attend(other, other, other)], dim=1))


class OneForward(nn.Module):
    """A block whose forward calls an attention function."""

    def __init__(self, attention: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def written_over(x: Tensor) -> Tensor:
    """Writes into the memory of its values after the attention."""
    values = x * 2
    context = merged(F.scaled_dot_product_attention(heads_of(x), heads_of(x), heads_of(values)))
    values.neg_()
    return context


def test_overwritten_values() -> None:
    block, x = OneForward(written_over), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(raw(block, block, x), twin(block, (x,), {}, TOKENS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", [difference, head_by_head, local_and_global, without_heads])
def test_attention_in_parts(attention: Callable[[Tensor], Tensor]) -> None:
    block, x = OneForward(attention), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    expected = twin(block, (x,), {}, TOKENS, calls=range(2))
    torch.testing.assert_close(raw(block, block, x), expected, rtol=0, atol=1e-12)
    half = raw(block.bfloat16(), block, x.bfloat16())
    expected = twin(block.double(), (x.bfloat16().double(),), {}, TOKENS, calls=range(2))
    torch.testing.assert_close(half.double(), expected, rtol=1e-3, atol=1e-6)


def test_weights_of_parts_are_refused() -> None:
    block = OneForward(difference)
    with pytest.raises(AssertionError, match="computed in 2 parts, each with weights of its own"):
        LayerAttention(block, block).attribute(torch.randn(2, TOKENS, WIDTH, dtype=torch.float64))


class SideBySide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one(x) + self.other(x)


@pytest.mark.parametrize("attention", ["self", "cross"])
def test_two_self_attentions_are_refused(attention: str) -> None:
    layer = SideBySide().double().eval()
    with pytest.raises(AssertionError, match="two attentions over its own tokens, Attention and Attention"):
        raw(layer, layer, torch.randn(2, TOKENS, WIDTH, dtype=torch.float64), attention=attention)


class ReadsBackwards(nn.TransformerEncoderLayer):
    """Passes keys and values in the reverse order."""

    def _sa_block(self, x: Tensor, *masks: Any, is_causal: bool = False) -> Tensor:
        y = x.flip(1)
        return self.self_attn(x, y, y, need_weights=False)[0]


def upper_half(x: Tensor) -> Tensor:
    """Entries above the median of all positions. Other entries become zero."""
    return x * (x > x.flatten(0, -2).median(0).values)


class OnlyUpperHalf(nn.TransformerEncoderLayer):
    """Keeps the upper half of the feed-forward layer's output."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return upper_half(super()._ff_block(x))


LAYERS_OF_USERS: dict[str, Callable[..., nn.TransformerEncoderLayer]] = {
    "a method of the attention": ReadsBackwards,
    "a method of the feed-forward": OnlyUpperHalf,
    "a function": partial(nn.TransformerEncoderLayer, activation=upper_half),
}


@torch.no_grad()
@pytest.mark.parametrize("norm_first", quick([True, False], True))
@pytest.mark.parametrize("kind", LAYERS_OF_USERS)
def test_changed_layers_of_torch(kind: str, norm_first: bool) -> None:
    """The `forward` of these layers is torch's."""
    for seed in range(4):
        torch.manual_seed(seed)
        layer = LAYERS_OF_USERS[kind](WIDTH, HEADS, 32, batch_first=True, norm_first=norm_first).double().eval()
        x = torch.randn(1, 20, WIDTH, dtype=torch.float64)
        expected = twin(layer, (x,), {}, 20)
        expected = expected.flip(-1) if isinstance(layer, ReadsBackwards) else expected
        torch.testing.assert_close(raw(layer, layer, x), expected)


class Unread(nn.Module):
    """A decoder's layer whose first attention no tap reads, or that has only a cross-attention."""

    def __init__(self, reads_itself: bool, stops_nan: bool) -> None:
        super().__init__()
        self.reads_itself, self.stops_nan = reads_itself, stops_nan
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.double().eval()

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor | None = None) -> Tensor:
        if self.stops_nan:
            x, memory = x.nan_to_num(), memory.nan_to_num()
        if self.reads_itself:
            x = x + (x @ x.mT).softmax(-1) @ x
        x = x + self.cross(x, memory, memory, key_padding_mask=hidden, need_weights=False)[0]
        return x + self.mlp(x)


@pytest.mark.parametrize("stops_nan", [True, False])
@pytest.mark.parametrize("sources", [TOKENS, 3])
def test_unread_attention_before_cross_attention(sources: int, stops_nan: bool) -> None:
    x, memory = (torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (TOKENS, sources))
    layer = Unread(True, stops_nan)
    with pytest.raises(AssertionError, match="something else that mixes its tokens"):
        raw(layer, layer, (x, memory))
    layer = Unread(False, stops_nan)
    torch.testing.assert_close(raw(layer, layer, (x, memory)), twin(layer, (x, memory), {}, sources))


@pytest.mark.parametrize("stops_nan", [True, False])
@pytest.mark.parametrize("sources", [TOKENS, TOKENS + 2])
def test_hidden_sources_of_cross_attention(sources: int, stops_nan: bool) -> None:
    x, memory = (torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (TOKENS, sources))
    hidden = torch.zeros(2, sources, dtype=torch.bool)
    hidden[0, 1:3] = True
    layer = Unread(False, stops_nan)
    inputs = x, memory, hidden
    torch.testing.assert_close(raw(layer, layer, inputs), twin(layer, inputs, {}, sources))


class WithMore(nn.Module):
    """An attention with more sources than the layer's tokens, after them."""

    def __init__(self, **more: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **more)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.double().eval()

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return x + self.mlp(x)


@pytest.mark.parametrize("more", ["add_bias_kv", "add_zero_attn"])
@pytest.mark.parametrize("padding", [[0, 0, 0, 1, 1], [1, 1, 0, 0, 0]], ids=["right", "left"])
def test_padding_before_bias_sources(more: str, padding: list[int]) -> None:
    layer, x = WithMore(**{more: True}), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    padded = torch.tensor([[0] * TOKENS, padding]).bool()
    expected = twin(layer, (x, padded), {}, TOKENS + 1) * ~padded[:, :, None]
    torch.testing.assert_close(raw(layer, layer, (x, padded)), expected, rtol=0, atol=1e-12)


class LooksAtWeights(AsksForWeights):
    """A block that computes with the weights in every run."""

    def forward(self, x: Tensor) -> Tensor:
        context, weights = self.attention(x, x, x)
        self.seen = weights.clamp_min(1e-9).log()
        return x + context + self.mlp(x + context)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_weights_used_in_the_layer(device: str | None) -> None:
    """A default device is a function mode. Under function modes torch calls its own function twice."""
    block, x = LooksAtWeights().double().eval(), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    plain = AsksForWeights().double().eval()
    plain.load_state_dict(block.state_dict())
    expected = raw(plain, plain, x)
    with nullcontext() if device is None else torch.device(device):
        found = raw(block, block, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sharper", [1, 3])
def test_replaced_function_of_torch(monkeypatch: pytest.MonkeyPatch, sharper: int) -> None:
    """A function that computes the same is accepted. Any other function is refused."""
    torchs = F.scaled_dot_product_attention
    block, x = OneForward(without_heads), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    expected = raw(block, block, x)

    def users(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torchs(query * sharper, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", users)
    if sharper == 1:
        torch.testing.assert_close(raw(block, block, x), expected, rtol=0, atol=1e-12)
    else:
        with pytest.raises(AssertionError, match=r"Another function replaces .* computes something else"):
            raw(block, block, x)
    assert F.scaled_dot_product_attention is users


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
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    if family == "transformers":
        size = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 1.0}
        model = LlamaModel(LlamaConfig(**size, intermediate_size=8, vocab_size=8, num_hidden_layers=1)).double().eval()
        model.set_attn_implementation("sdpa")
        block, forward = model.layers[0], lambda x: model(inputs_embeds=x).last_hidden_state
    else:
        forward = block

    def attribute(sharper: int) -> Tensor:
        def run(x: Tensor) -> Tensor:
            with Mode(sharper, by_name):
                return forward(x)

        if inside:
            return ValueZeroing(run, block).attribute(x)
        with Mode(sharper, by_name):
            return ValueZeroing(forward, block).attribute(x)

    torch.testing.assert_close(attribute(1), ValueZeroing(forward, block).attribute(x), rtol=0, atol=1e-12)
    with pytest.raises(AssertionError, match=r"^The function mode Mode replaces .* computes something else"):
        attribute(3)
