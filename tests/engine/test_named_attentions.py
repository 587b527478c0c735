"""`attention=` names an attention module of a layer with several, or one module for each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_vz import (
    ALTI,
    AttentionRollout,
    LayerAttention,
    LayerAttentionNorm,
    ValueGates,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
    verify,
)
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from tests.engine.blocks import HEADS, WIDTH, Projections, sequences, without_value_of
from tests.engine.compare import assert_same
from tests.engine.odd import by_hook

TOKENS, MEMORY = 5, 7


class Attention(Projections):
    """Attention of tokens to sources."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def parts(self, x: Tensor, sources: Tensor) -> list[Tensor]:
        given = ((self.query, x), (self.key, sources), (self.value, sources))
        return [linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear, y in given]

    def forward(self, x: Tensor, sources: Tensor) -> Tensor:
        context = functional.scaled_dot_product_attention(*self.parts(x, sources), is_causal=self.causal)
        return self.output(context.transpose(1, 2).flatten(2))


class ThreeAttentions(nn.Module):
    """Two self-attentions, with a cross-attention between them. `(batch, 1, tokens, d)` are states of one prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Attention(), Attention(causal=True)])
        self.cross = Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, states: Tensor, memory: Tensor) -> Tensor:
        x = states[:, 0] if states.dim() == 4 else states
        y = self.norms[0](x)
        x = x + self.parts[0](y, y)
        x = x + self.cross(self.norms[1](x), memory)
        y = self.norms[2](x)
        x = x + self.parts[1](y, y)
        x = x + self.feed_forward(self.norms[3](x))
        return x[:, None] if states.dim() == 4 else x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ThreeAttentions(), ThreeAttentions()])

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return x


@pytest.fixture(name="model")
def a_model() -> Stack:
    return Stack().double().eval().requires_grad_(False)


INPUTS = sequences(2, TOKENS), sequences(2, MEMORY) + 1
NAMES = ("parts.0", "cross", "parts.1")
each_name = pytest.mark.parametrize("name", NAMES)


def twin(model: Stack, index: int, name: str) -> Tensor:
    x, memory = INPUTS
    for layer in list(model.layers)[:index]:
        x = layer(x, memory)
    sources = MEMORY if name == "cross" else TOKENS
    return by_hook(model.layers[index], x, memory, value=f"{name}.value", sources=sources)


@each_name
def test_each_of_three_attentions(name: str, model: Stack) -> None:
    modules = [layer.get_submodule(name) for layer in model.layers]
    for chosen in (modules, nn.ModuleList(modules)):
        maps = ValueZeroing(model, model.layers, attention=chosen, normalize=False).attribute(INPUTS)
        for index, one in enumerate(maps):
            assert_same(one, twin(model, index, name), 1e-12)
    method = ValueZeroing(model, model.layers[1], attention=modules[1], normalize=False)
    half = method.attribute(INPUTS, token=3, perturbations_per_eval=2)
    assert_same(half, twin(model, 1, name)[:, 3], 1e-12)


@each_name
def test_effect_on_the_output(name: str, model: Stack) -> None:
    module = model.layers[0].get_submodule(name)
    effect = ValueZeroingEffect(model, model.layers[0], attention=module)
    found = effect.attribute(INPUTS, target=(2, 3))[name == "cross"]
    clean = model(*INPUTS)[:, 2, 3]
    for source in range(found.shape[1]):
        with without_value_of(source, module.value):
            assert_same(found[:, source], clean - model(*INPUTS)[:, 2, 3], 1e-12)


@each_name
def test_attention_weights(name: str, model: Stack) -> None:
    layer = model.layers[1]
    module, given = layer.get_submodule(name), list[Any]()
    with module.register_forward_pre_hook(lambda _, args: given.append(args)):
        model(*INPUTS)
    query, key, _ = module.parts(*given[0])
    scores = query @ key.mT / (WIDTH // HEADS) ** 0.5
    if module.causal:
        scores = scores.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf)
    found = LayerAttention(model, layer, attention=module).attribute(INPUTS)
    assert_same(found, scores.softmax(-1).mean(1))
    assert LayerAttentionNorm(model, layer, attention=module).attribute(INPUTS).shape == found.shape


@each_name
def test_one_prompt_for_each_image(name: str, model: Stack) -> None:
    """As in SAM's decoder."""
    layer, (x, memory) = model.layers[0], INPUTS
    found = ValueZeroing(layer, layer, attention=layer.get_submodule(name), normalize=False)
    assert_same(found.attribute((x[:, None], memory)), twin(model, 0, name), 1e-12)
    with pytest.raises(UnsupportedLayerError, match="one vector a token"):
        LayerAttentionNorm(layer, layer, attention=layer.cross).attribute((x[:, None], memory))
    with pytest.raises(UnsupportedLayerError, match="Expected one vector"):
        ValueZeroing(layer, layer, attention=layer.cross).attribute((x[:, None].expand(-1, 3, -1, -1), memory))


@pytest.mark.all_cases  # each is another mistake
@pytest.mark.parametrize(
    ("choose", "error"),
    [
        (lambda layer: "self", "name is 'parts.0'"),
        (lambda layer: layer.parts, "one after the other"),
        (lambda layer: [layer.cross, layer.cross], "one after the other"),
        (lambda layer: nn.Linear(2, 2), "no part of the"),
        (lambda layer: layer.feed_forward, "called 0 attentions"),
        (lambda layer: 3, "of type int"),
        (lambda layer: [], "of type list"),
        (lambda layer: "middle", "is 'middle'"),
        (lambda layer: None, "of type NoneType"),
    ],
)
def test_what_is_no_attention_is_refused(choose: Any, error: str, model: Stack) -> None:
    layer = model.layers[0]
    for method in (ValueZeroing, LayerAttention, ValueZeroingEffect):
        with pytest.raises(AssertionError, match=error):
            method(model, layer, attention=choose(layer)).attribute(INPUTS)


def test_other_methods_refuse_modules(model: Stack) -> None:
    layer = model.layers[0]
    with pytest.raises(ArgumentError, match="include='attention'"):
        LayerAttentionNorm(model, layer, include="residual", attention=layer.cross)
    with pytest.raises(ArgumentError, match="is not 'self'"):
        LayerAttentionNorm(model, layer, attention=layer.cross).mixing_ratio(INPUTS)
    for rollout in (ValueZeroingRollout, AttentionRollout):
        with pytest.raises(ArgumentError, match="multiplies maps"):
            rollout(model, layer, attention=layer.cross).attribute(INPUTS)
    with pytest.raises(UnsupportedLayerError, match="attention 3 times"):
        ALTI(model, layer).attribute(INPUTS)
    with pytest.raises(ArgumentError, match="of type Attention"):
        verify(model, INPUTS, layer, attention=layer.cross)


# One module for each head, as in "Let's build GPT": all named parts lose their values together.


class Head(nn.Module):
    """One head, by hand or by torch's function."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if not self.by_hand:
            return functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return (q @ k.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1) @ v


class OfHeads(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(by_hand) for _ in range(HEADS))
        self.proj, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.proj(torch.cat([head(y) for head in self.heads], -1))


X = INPUTS[0]


@torch.no_grad()
def zeroed(block: nn.Module, heads: list[nn.Module], gate: float = 0.0) -> Tensor:
    """The output with the values of one source zeroed in some heads, `(source, batch, out, d)`."""
    found = []
    for source in range(TOKENS):
        factor = torch.where(torch.arange(TOKENS) == source, gate, 1.0)[:, None]
        hooks = [head.value.register_forward_hook(lambda _, args, v, by=factor: v * by) for head in heads]
        found.append(block(X))
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def expected_map(block: nn.Module, heads: list[nn.Module]) -> Tensor:
    distances = 1 - functional.cosine_similarity(zeroed(block, heads), block(X), dim=-1)
    return functional.normalize(distances.permute(1, 2, 0), p=1, dim=-1).detach()


def named(block: OfHeads, by: str, heads: slice = slice(None)) -> dict[str, Any]:
    parts = list(block.heads)[heads]
    return {by: parts if by == "attention" else [one.value for one in parts]}


each_form = pytest.mark.parametrize(
    ("by_hand", "by"), [(True, "values"), (False, "values"), (False, "attention")], ids=str
)


@pytest.mark.all_cases
@each_form
def test_named_heads_are_zeroed_together(by_hand: bool, by: str) -> None:
    block = OfHeads(by_hand)
    for heads in (slice(None), slice(1, 3)):
        found = ValueZeroing(block, block, **named(block, by, heads)).attribute(X)
        torch.testing.assert_close(found, expected_map(block, list(block.heads)[heads]), rtol=0, atol=1e-7)
    if by_hand or by == "attention":
        with pytest.warns(UserWarning, match="alone, without"):
            found = ValueZeroing(block, block, **{by: named(block, by)[by][0]}).attribute(X)
        torch.testing.assert_close(found, expected_map(block, [block.heads[0]]), rtol=0, atol=1e-7)


@pytest.mark.all_cases
@each_form
def test_effect_and_gates_of_all_heads(by_hand: bool, by: str) -> None:
    block = OfHeads(by_hand)
    model = nn.Sequential(block)
    found = ValueZeroingEffect(model, block, **named(block, by)).attribute(X, target=(-1, 2))
    change = (block(X) - zeroed(block, list(block.heads)))[:, :, -1, 2].T
    torch.testing.assert_close(found, change.detach(), rtol=0, atol=1e-9)
    gates = torch.ones(2, TOKENS).index_fill(1, torch.tensor(1), 0.5)
    gated = ValueGates(model, block, **named(block, by))(gates, X)
    torch.testing.assert_close(gated, zeroed(block, list(block.heads), 0.5)[1])


def test_several_layers_have_a_list_for_each() -> None:
    blocks = nn.Sequential(OfHeads(True), OfHeads(True))
    values = [[head.value for head in block.heads] for block in blocks]
    found = ValueZeroing(blocks, list(blocks), values=values).attribute(X)
    by_function = ValueZeroing(blocks, list(blocks), values=lambda block: [one.value for one in block.heads])
    assert all(map(torch.equal, found, by_function.attribute(X)))
    torch.testing.assert_close(found[0], expected_map(blocks[0], list(blocks[0].heads)), rtol=0, atol=1e-7)


def test_parts_that_are_no_values_are_refused() -> None:
    block = OfHeads(True)
    with pytest.raises(RefusedError, match="these are no values"):
        ValueZeroing(block, block, values=[head.key for head in block.heads]).attribute(X)
    with pytest.raises(ArgumentError, match="pass a submodule"):
        ValueZeroing(block, block, values=[]).attribute(X)
