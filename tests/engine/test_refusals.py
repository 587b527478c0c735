"""Layers that cannot be explained are refused with a message, and the model is unchanged."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz._engine import AttentionSite
from captum_vz._engine.capture import Recorder
from captum_vz.errors import RefusedError
from tests.captum.footprint import footprint
from tests.engine.blocks import WIDTH, Block, Projections, SelfAttention, block_of, sequences, zeroed_one_by_one
from tests.engine.compare import assert_same
from tests.reference import FAMILIES, Case
from tests.reference.naive import record


def refused(model: nn.Module, layer: Any, message: str, inputs: Any = None, method: Any = ValueZeroing) -> None:
    before = footprint(model)
    with pytest.raises(AssertionError, match=message):
        method(model, layer).attribute(sequences(2) if inputs is None else inputs)
    assert footprint(model) == before


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention])
def test_stack_of_layers_is_refused(method: Any, number: int) -> None:
    stack = nn.Sequential(*(Block() for _ in range(number)))
    message = f"attention {number} times"
    refused(stack, stack, message, method=method)
    refused(stack, stack, message, inputs=sequences(1), method=method)


class PastCalls(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block.forward(x)
        return x


@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention])
def test_layer_run_without_its_hooks(method: Any) -> None:
    model = PastCalls(Block(), Block())
    refused(model, list(model), r"by `layer\(...\)`", method=method)


class InParts(nn.Module):
    """Keeps the parts of its blocks in lists, as vit-pytorch and x-transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([SelfAttention(), nn.LayerNorm(WIDTH)]) for _ in range(2)).double()

    def forward(self, x: Tensor) -> Tensor:
        for attention, norm in self.blocks:
            x = norm(x + attention(x))
        return x


def test_blocks_that_are_lists_of_parts() -> None:
    model = InParts()
    refused(model, find_layers(model), "pass the attention")
    assert ValueZeroing(model, model.blocks[0][0]).attribute(sequences(1)).shape == (1, 6, 6)


@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention])
def test_layer_and_its_part(method: Any) -> None:
    block = Block()
    for layers in ([block, block.attention], [block.attention, block]):
        refused(block, layers, "parts of others in", method=method)


@pytest.mark.parametrize("part", ["feed_forward", "feed_forward.0", "attention.value", "norm"])
@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention])
def test_part_without_attention(method: Any, part: str) -> None:
    block = Block()
    layer = block.get_submodule(part)
    name = type(layer).__name__
    refused(block, layer, f"{name} called no", method=method)


@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention])
def test_dropout_of_the_attention_function(method: Any) -> None:
    block = Block()
    block.attention.rates = [0.5]
    expected = method(block, block).attribute(sequences(2))
    block.train()
    refused(block, block, "weights in train", method=method)
    block.attention.rates = [0.0]
    assert_same(method(block, block).attribute(sequences(2)), expected)


def test_dropout_of_torchs_function_in_eval_mode() -> None:
    """torch's function drops weights in eval mode too, so no mode helps."""

    class Careless(Projections):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            context = nn.functional.scaled_dot_product_attention(*self.heads(x), dropout_p=0.5)
            return self.output(context.transpose(1, 2).flatten(2))

    block = block_of(Careless())
    refused(block, block, "Pass dropout_p=0.5")
    refused(block.train(), block, "weights in train")


def test_dropout_rate_in_eval_mode() -> None:
    block = Block()
    block.attention.rates, block.attention.careless = [0.5], True
    assert_same(ValueZeroing(block, block).attribute(sequences(2)), zeroed_one_by_one(block, sequences(2)))


def with_dropout(name: str, rate: float) -> Case:
    """A family with all dropout rates of its config set to `rate`."""
    family = FAMILIES[name]
    settings = getattr(transformers, family.model).config_class(**family.config).to_dict()
    rates = {key: rate for key, value in settings.items() if "drop" in key and isinstance(value, (int, float))}
    rates = {key: rate for key in rates if "layer" not in key and "path" not in key}
    return replace(family, config=family.config | rates).build()


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5-decoder"])
def test_train_mode_with_dropout_is_refused(name: str) -> None:
    """A layer drops by a module, or by a rate that its forward passes to torch's function."""
    for rate in (0.25, 0.0):
        case = with_dropout(name, rate)
        expected = ValueZeroing(case.model, case.layers).attribute(case.inputs)
        for layer in case.layers:
            layer.train()
        runs, _ = record(case)
        assert any(not torch.allclose(run.again(), run.again()) for run in runs) == bool(rate)
        if rate:
            refused(case.model, case.layers, r"dropout \(.*=0\.25", case.inputs)
        else:
            assert_same(ValueZeroing(case.model, case.layers).attribute(case.inputs), expected)


@pytest.mark.parametrize(
    ("distance", "message"),
    [
        (nn.MSELoss(), "gave () for two of"),
        (lambda a, b: (a - b).abs(), "gave (12, 16) for"),
        (lambda a, b: (a - b).norm(dim=-1, keepdim=True), "gave (12, 1) for"),
        (lambda a, b: torch.full(a.shape[:-1], torch.nan), "are not finite"),
        (lambda a, b: (a - b).square().sum(-1).reciprocal() + torch.inf, "are not finite"),
    ],
)
def test_wrong_distance(distance: Any, message: str) -> None:
    block = Block()
    with pytest.raises(AssertionError, match=re.escape(message)):
        ValueZeroing(block, block, distance=distance).attribute(sequences(2))


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2"])
def test_wrong_perturbations_per_eval(number: Any) -> None:
    block = Block()
    message = f"perturbations_per_eval is {number!r}: pass an integer of at least 1, or None"
    with pytest.raises(AssertionError, match=re.escape(message)):
        ValueZeroing(block, block).attribute(sequences(2), perturbations_per_eval=number)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(bad: float) -> None:
    block, x = Block(), sequences(2)
    x[1, 2, 3] = bad
    refused(block, block, "are not finite", x)
    refused(block, block, "are not finite", x, LayerAttention)


class SparseAttention(nn.Module):
    """Attention that no tap reads."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ self.value(x)


class Sparse(Block):
    """A block whose first attention cannot be read. Its second attention can."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = SparseAttention().double()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x + self.sparse(x), mask)


@pytest.mark.parametrize("attention", ["self", "cross"])
def test_unreadable_attention_comes_first(attention: str) -> None:
    """Otherwise the second attention would be taken for the first (Informer's decoder)."""
    block, x = Sparse(), sequences(2)
    with pytest.raises(AssertionError, match="before one that can"):
        ValueZeroing(block, block, attention=attention).attribute(x)


def test_unreadable_attention_comes_second() -> None:
    block, x = Block(after=SparseAttention().double()), sequences(2)
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x))


class KeepsKeys(Block):
    """Course notes: a layer that adds its tokens to those of its last run."""

    keys: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.keys = x if self.keys is None else torch.cat([self.keys, x], dim=1)
        return super().forward(x, mask) + self.keys[:, -x.shape[1] :].mean() * self.keys.shape[1]


def test_layer_with_a_cache_of_its_own() -> None:
    block = KeepsKeys()
    with pytest.raises(RefusedError, match="tensors of its run"):
        ValueZeroing(block, block).attribute(sequences(2))


@pytest.mark.parametrize("place", ["dropped_sources", "on_exit"])
@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention, ValueZeroingEffect])
def test_error_of_a_library_is_ours(method: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n's caches raised a ValueError when they were asked for their length."""
    fail: Any = partial(int, "?")
    if place == "dropped_sources":
        monkeypatch.setattr(AttentionSite, place, property(fail))
    else:
        monkeypatch.setattr(Recorder, place, fail)
    block = Block()
    with pytest.raises(RefusedError, match="reading it raised") as caught:
        method(block, block).attribute(sequences(2))
    assert isinstance(caught.value.__cause__, TypeError)


def test_error_of_a_distance_is_the_users() -> None:
    def distance(one: Tensor, other: Tensor) -> Tensor:
        raise ValueError("mine")

    block = Block()
    with pytest.raises(ValueError, match="mine") as caught:
        ValueZeroing(block, block, distance=distance).attribute(sequences(2))
    assert not isinstance(caught.value, RefusedError)
