"""`attention=` names an attention module, of layers with other attentions than a self- and a cross-attention."""

from __future__ import annotations

import copy
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
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
    verify,
)
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from tests.engine.compare import assert_same
from tests.reference import FAMILIES

WIDTH, HEADS, TOKENS, MEMORY = 16, 4, 5, 7


class Attention(nn.Module):
    """Attention of tokens to sources. It keeps its weights, for the twin."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.causal = causal

    def forward(self, x: Tensor, sources: Tensor) -> Tensor:
        query, key, value = (
            linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear, y in ((self.query, x), (self.key, sources), (self.value, sources))
        )
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(context.transpose(1, 2).flatten(2))


class ThreeAttentions(nn.Module):
    """Two self-attentions, with a cross-attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Attention(), Attention(causal=True)])
        self.cross = Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.parts[0](y, y)
        x = x + self.cross(self.norms[1](x), memory)
        y = self.norms[2](x)
        x = x + self.parts[1](y, y)
        return x + self.feed_forward(self.norms[3](x))


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
    torch.manual_seed(0)
    return Stack().double().eval().requires_grad_(False)


@pytest.fixture(name="inputs")
def some_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, count, WIDTH, dtype=torch.float64, generator=generator) for count in (TOKENS, MEMORY))


NAMES = ("parts.0", "cross", "parts.1")


def output_without(
    model: nn.Module, inputs: Any, module: Attention, batch: int, source: int, which: nn.Module
) -> Tensor:
    """What the module `which` returns if one value row of one example is zeroed where it is projected."""
    seen: list[Tensor] = []

    def zero(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        output = output.clone()
        if source >= 0:
            output[batch, source] = 0
        return output

    hooks = module.value.register_forward_hook(zero), which.register_forward_hook(lambda *args: seen.append(args[2]))
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen[-1][batch]


def twin(model: Stack, inputs: Any, index: int, name: str) -> Tensor:
    """The raw map of a layer: one zeroed value and one token at a time. The attention weights follow the inputs."""
    model = copy.deepcopy(model)
    layer = model.layers[index]
    module = layer.get_submodule(name)
    sources = MEMORY if name == "cross" else TOKENS
    found = torch.zeros(2, TOKENS, sources, dtype=torch.float64)
    for batch in range(2):
        clean = output_without(model, inputs, module, batch, -1, layer)
        for source in range(sources):
            zeroed = output_without(model, inputs, module, batch, source, layer)
            for token in range(TOKENS):
                one, other = zeroed[token], clean[token]
                found[batch, token, source] = 1 - (one @ other) / (one.norm() * other.norm())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_of_three_attentions(name: str, model: Stack, inputs: Any) -> None:
    layer = model.layers[1]
    method = ValueZeroing(model, layer, attention=layer.get_submodule(name), normalize=False)
    assert_same(method.attribute(inputs), twin(model, inputs, 1, name), 1e-12)
    half = method.attribute(inputs, token=3, perturbations_per_eval=2)
    assert_same(half, twin(model, inputs, 1, name)[:, 3], 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_one_module_for_each_layer(name: str, model: Stack, inputs: Any) -> None:
    modules = [layer.get_submodule(name) for layer in model.layers]
    for chosen in (modules, tuple(modules), nn.ModuleList(modules)):
        maps = ValueZeroing(model, model.layers, attention=chosen, normalize=False).attribute(inputs)
        for index, one in enumerate(maps):
            assert_same(one, twin(model, inputs, index, name), 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_effect_on_the_output(name: str, model: Stack, inputs: Any) -> None:
    layer = model.layers[0]
    effect = ValueZeroingEffect(model, layer, attention=layer.get_submodule(name))
    found = effect.attribute(inputs, target=(2, 3))
    found = found[name == "cross"]
    for batch in range(2):
        clean = output_without(model, inputs, layer.get_submodule(name), batch, -1, model)
        for source in range(found.shape[1]):
            zeroed = output_without(model, inputs, layer.get_submodule(name), batch, source, model)
            assert_same(found[batch, source], clean[2, 3] - zeroed[2, 3], 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_attention_weights(name: str, model: Stack, inputs: Any) -> None:
    layer = model.layers[1]
    module = layer.get_submodule(name)
    given: list[tuple[Tensor, Tensor]] = []
    hook = module.register_forward_pre_hook(lambda _, args: given.append(args))
    model(*inputs)
    hook.remove()
    x, sources = given[0]
    query, key = (
        linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear, y in ((module.query, x), (module.key, sources))
    )
    scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
    if module.causal:
        scores = scores.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf)
    found = LayerAttention(model, layer, attention=module).attribute(inputs)
    assert_same(found, scores.softmax(-1).mean(1))
    lengths = LayerAttentionNorm(model, layer, attention=module).attribute(inputs)
    assert lengths.shape == found.shape


class Prompted(ThreeAttentions):
    """States of one prompt for each image, `(batch, 1, tokens, d)`, as in SAM's decoder."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x[:, 0], memory)[:, None]


@pytest.mark.parametrize("name", NAMES)
def test_one_prompt_for_each_image(name: str, model: Stack, inputs: Any) -> None:
    layer = Prompted().double().eval()
    layer.load_state_dict(model.layers[0].state_dict())
    x, memory = inputs
    found = ValueZeroing(layer, layer, attention=layer.get_submodule(name), normalize=False)
    assert_same(found.attribute((x[:, None], memory)), twin(model, inputs, 0, name), 1e-12)
    with pytest.raises(UnsupportedLayerError, match="this method is for one vector a token"):
        LayerAttentionNorm(layer, layer, attention=layer.cross).attribute((x[:, None], memory))
    several = x[:, None].expand(-1, 3, -1, -1)
    with pytest.raises(UnsupportedLayerError, match="Expected one vector for each token"):
        ValueZeroing(layer, layer, attention=layer.cross).attribute((several, memory))


@pytest.mark.parametrize(("attention", "name"), [("self", "self_attn"), ("cross", "encoder_attn")])
def test_module_is_the_same_as_its_word(attention: str, name: str) -> None:
    case = FAMILIES["bart-decoder"].build()
    modules = [layer.get_submodule(name) for layer in case.layers]
    by_word = ValueZeroing(case.model, case.layers, attention=attention).attribute(case.inputs)
    assert_same(ValueZeroing(case.model, case.layers, attention=modules).attribute(case.inputs), by_word, 0)


def test_error_names_the_modules(model: Stack, inputs: Any) -> None:
    layer = model.layers[0]
    names = "'parts.0', 'cross' or 'parts.1'"
    with pytest.raises(UnsupportedLayerError, match=rf"3 times .*get_submodule\(name\), where name is {names}, or"):
        ValueZeroing(model, layer).attribute(inputs)


@pytest.mark.parametrize(
    ("choose", "error"),
    [
        (lambda layer: layer.parts, "do not attend one after the other"),
        (lambda layer: [layer.cross, layer.cross], "do not attend one after the other"),
        (lambda layer: nn.Linear(2, 2), "attention is a Linear that is no part of the layer ThreeAttentions"),
        (lambda layer: layer.feed_forward, "feed_forward of the layer ThreeAttentions called 0 attentions"),
        (lambda layer: 3, "attention is of type int: pass 'self', 'cross', or"),
        (lambda layer: [], "attention is of type list: pass 'self'"),
        (lambda layer: "middle", "attention is 'middle': pass 'self', 'cross', or"),
        (lambda layer: None, "attention is of type NoneType: pass"),
    ],
)
def test_what_is_no_attention_is_refused(choose: Any, error: str, model: Stack, inputs: Any) -> None:
    layer = model.layers[0]
    for method in (ValueZeroing, LayerAttention, ValueZeroingEffect):
        with pytest.raises(AssertionError, match=error):
            method(model, layer, attention=choose(layer)).attribute(inputs)


def test_other_methods_refuse_modules(model: Stack, inputs: Any) -> None:
    layer = model.layers[0]
    with pytest.raises(ArgumentError, match="include='attention'"):
        LayerAttentionNorm(model, layer, include="residual", attention=layer.cross)
    with pytest.raises(ArgumentError, match="attention is not 'self'"):
        LayerAttentionNorm(model, layer, attention=layer.cross).mixing_ratio(inputs)
    for rollout in (ValueZeroingRollout, AttentionRollout):
        with pytest.raises(ArgumentError, match="multiplies maps of self-attention"):
            rollout(model, layer, attention=layer.cross).attribute(inputs)
    with pytest.raises(UnsupportedLayerError, match="attention 3 times"):
        ALTI(model, layer).attribute(inputs)
    with pytest.raises(ArgumentError, match="attention is of type Attention"):
        verify(model, inputs, layer, attention=layer.cross)
