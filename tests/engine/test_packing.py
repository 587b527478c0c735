"""Layers of the user's that reproduce their clean output, but would be wrong for zeroed values if they were trusted."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial, wraps

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from torch import Tensor, nn

from captum_vz import ValueZeroing, ValueZeroingEffect
from captum_vz._engine.capture import LayerRecord
from captum_vz._engine.numerics.tolerance import noise_like
from captum_vz._engine.structure.modules import is_library_code
from captum_vz._engine.taps.changes import ModuleState
from tests.benchmarks.measure import operations
from tests.engine.blocks import HEADS, WIDTH, Block, SelfAttention, direction, sequences
from tests.engine.compare import assert_same
from tests.engine.odd import LONG
from tests.reference import FAMILIES, Case

Order = Callable[[Tensor], Tensor]


def score(x: Tensor) -> Tensor:
    return (x * torch.linspace(-1, 1, WIDTH, dtype=x.dtype)).sum(-1)


ORDERS: dict[str, Order] = {
    "backwards": lambda x: torch.arange(x.shape[1]).flip(0).expand(x.shape[:2]),
    "one further": lambda x: torch.arange(x.shape[1]).roll(1).expand(x.shape[:2]),
    "by a score": lambda x: score(x).argsort(-1),
}
# Some positions are read twice, and some never.
PLACES = ORDERS | {
    "the odd ones": lambda x: (torch.arange(x.shape[1]) | 1).clamp(max=x.shape[1] - 1).expand(x.shape[:2])
}


def in_order(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[..., None].expand_as(x))


class Reordering(SelfAttention):
    """Reads keys and values in another order than queries. The order applies to tokens, or to their projections."""

    def __init__(self, order: Order, tokens: bool) -> None:
        super().__init__()
        self.order, self.tokens = order, tokens

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        order = self.order(x)
        if self.tokens:
            key, value = (linear(in_order(x, order)) for linear in (self.key, self.value))
        else:
            key, value = (in_order(linear(x), order) for linear in (self.key, self.value))
        parts = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.query(x), key, value))
        return self.output(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Sorting(SelfAttention):
    """Reorders all tokens, and restores the order of the output."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        order = self.order(x)
        return in_order(super().forward(in_order(x, order)), order.argsort(-1))


def by_tokens(block: Block, x: Tensor, places: Callable[[Tensor], Tensor]) -> Tensor:
    """The map of a block whose value projection holds token j where `places(attention input)` is j."""
    held = places(block.attention_norm(x))
    clean, columns = block(x), []
    for token in range(x.shape[1]):
        zero = block.attention.value.register_forward_hook(
            lambda module, inputs, values, token=token: values.masked_fill((held == token)[..., None], 0)
        )
        columns.append((direction(block(x)) - direction(clean)).square().sum(-1) / 2)
        zero.remove()
    scores = torch.stack(columns, dim=-1)
    return scores / scores.sum(-1, keepdim=True)


@torch.no_grad()
@pytest.mark.parametrize("tokens_or_values", [True, False])
@pytest.mark.parametrize("order", PLACES)
def test_values_in_another_order(order: str, tokens_or_values: bool) -> None:
    block, x = Block(), sequences(2, LONG)
    block.attention = Reordering(PLACES[order], tokens_or_values).double()

    def places(given: Tensor) -> Tensor:
        return PLACES[order](given) if tokens_or_values else torch.arange(LONG).expand(2, -1)

    expected = by_tokens(block, x, places)
    found = ValueZeroing(block, block)
    assert_same(found.attribute(x), expected)
    assert_same(found.attribute(x, token=1), expected[:, 1])


@torch.no_grad()
@pytest.mark.parametrize("order", ORDERS)
def test_a_layer_that_sorts_its_tokens(order: str) -> None:
    block, x = Block(), sequences(2, LONG)
    block.attention = Sorting(ORDERS[order]).double()
    assert_same(ValueZeroing(block, block).attribute(x), by_tokens(block, x, ORDERS[order]))


def test_order_that_a_nudge_changes() -> None:
    """The sum of normalized features consists of rounding errors."""
    block, x = Block(), sequences(2, 20)
    block.attention = Sorting(lambda x: x.sum(-1).argsort(-1)).double()
    with pytest.raises(AssertionError, match="several positions"):
        ValueZeroing(block, block).attribute(x)
    with pytest.raises(AssertionError, match="tokens in windows"):
        ValueZeroingEffect(lambda x: block(x).sum((1, 2)), block).attribute(x)


def cost(case: Case, layer: nn.Module) -> int:
    """The operations of a map. Checks of a layer run it more often. tests/engine_folded counts that none is run."""
    return operations(lambda: ValueZeroing(case.model, layer).attribute(case.inputs))


@pytest.mark.parametrize("name", ["bert", "llama", "bart-decoder"])
def test_library_layers_are_not_checked(name: str) -> None:
    """A check would cost as much as several forward passes. Hooks that transformers leaves behind are trusted too."""
    case = FAMILIES[name].case
    plain = cost(case, case.layers[0])
    case.model(**case.inputs, output_hidden_states=True, output_attentions=True)  # leaves hooks of transformers'
    assert cost(case, case.layers[0]) == plain
    with next(case.layers[0].children()).register_forward_hook(lambda module, inputs, output: output):
        assert cost(case, case.layers[0]) > plain


def test_changed_library_layers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES["bert"].case
    layer = case.layers[0]
    plain, own = cost(case, layer), layer.attention.forward
    monkeypatch.setattr(layer.attention, "forward", own)  # as accelerate leaves it
    assert cost(case, layer) == plain
    monkeypatch.setattr(layer.attention, "forward", lambda *args, **kwargs: own(*args, **kwargs))
    assert cost(case, layer) > plain


class Hook(ModelHook):
    """A hook of the user's."""


@pytest.mark.parametrize(
    ("hook", "trusted"),
    [
        (ModelHook(), True),
        (SequentialHook(ModelHook(), ModelHook()), True),
        (Hook(), False),
        (SequentialHook(ModelHook(), Hook()), False),
    ],
)
def test_hooks_of_accelerate_only_move(hook: ModelHook, trusted: bool) -> None:
    case = deepcopy(FAMILIES["bert"].case)
    plain = cost(case, case.layers[0])
    for module in case.layers[0].modules():
        add_hook_to_module(module, hook)
    assert (cost(case, case.layers[0]) == plain) is trusted


class Renamed(nn.Linear):
    """A class of the user's."""


def own(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of the user's that carries the name of the function that it wraps."""
    return wraps(function)(lambda *args: function(*args))


def with_forward(module: nn.Module, forward: Callable[..., Tensor]) -> nn.Module:
    module.forward = forward
    return module


def encoder_layer(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, activation=activation)


CODE: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "torch's": (lambda: nn.Linear(2, 2), True),
    "its own method, bound": (lambda: with_forward(nn.GELU(), nn.GELU().forward), True),
    "a function of torch": (lambda: encoder_layer(F.gelu), True),
    "a part of one": (lambda: encoder_layer(partial(F.gelu, approximate="tanh")), True),
    "a class": (lambda: Renamed(2, 2), False),
    "a method": (lambda: with_forward(nn.GELU(), own(nn.GELU().forward)), False),
    "the method of another": (lambda: with_forward(nn.GELU(), nn.Tanh().forward), False),
    "a function": (lambda: encoder_layer(lambda x: x.relu()), False),
    "a part of a function": (lambda: encoder_layer(partial(own(F.gelu))), False),
}


@pytest.mark.parametrize("code", CODE)
def test_library_code_is_recognised(code: str) -> None:
    module, expected = CODE[code]
    layer = module()
    assert is_library_code(LayerRecord(layer, (), {}, state=ModuleState(layer))) is expected


def test_changed_class_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "extra_repr", own(nn.Linear.extra_repr))
    layer = nn.Linear(2, 2)
    assert not is_library_code(LayerRecord(layer, (), {}, state=ModuleState(layer)))


def test_noise_where_there_are_no_numbers() -> None:
    x = torch.tensor([[torch.nan, 2.0], [1.0, torch.inf]])
    assert torch.equal(noise_like(x, 64.0), noise_like(x.nan_to_num(0, 0, 0), 64.0))
    assert noise_like(torch.zeros(2, 2), 64.0).all()
