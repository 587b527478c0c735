"""Layers that mix positions after the attention: packed pairs would disturb each other.

The hard cases are those in which the clean sequence does not show the mixing: one example, no padding, all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz._engine.structure.modules import LayerTrust
from tests.engine.blocks import (
    WIDTH,
    Ahead,
    Block,
    CausalMean,
    Convolution,
    Mean,
    mask_of_window,
    sequences,
    zeroed_in_its_batch,
    zeroed_one_by_one,
)
from tests.engine.compare import assert_same
from tests.engine.odd import LONG
from tests.engine.parameters import sampled
from tests.reference import FAMILIES, Case, Family, naive_value_zeroing
from tests.reference.case import randomize
from tests.reference.families import ENCODER_SIZE, T5_ATTENTION, T5_SIZE

pytestmark = pytest.mark.all_cases  # each is another layer


class OfHalf(nn.Module):
    """Mixes the positions of one half of the sequence, by a large or a small share."""

    def __init__(self, second: bool, share: float = 1.0) -> None:
        super().__init__()
        self.second, self.share = second, share

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        own = slice(half, None) if self.second else slice(half)
        mixed = x.clone()
        mixed[:, own] = x[:, own].lerp(x[:, own].mean(1, keepdim=True), self.share)
        return mixed


class Leading(nn.Module):
    """Changes the first positions of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.arange(x.shape[1]) < 2
        return torch.where(first[:, None], x.flip(-1), x)


MIXTURES: list[Callable[[], nn.Module]] = [
    *(Convolution, Mean, Ahead, CausalMean, Leading),
    *(partial(OfHalf, second, share) for second, share in ((False, 1e-3), (True, 1.0))),
]


def trust_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every layer count as library code."""
    monkeypatch.setattr(LayerTrust, "of", lambda layer: LayerTrust(library=True, independent=True))


@pytest.mark.parametrize("tokens", sampled([3, 4, 20], 4))
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_mixing_shows_in_the_pairs(
    mixture: Callable[[], nn.Module], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the code is trusted, no run before the pairs shows the mixing."""
    trust_all(monkeypatch)
    block, x = Block(after=mixture()), sequences(1, tokens)
    expected = zeroed_one_by_one(block, x)
    assert_same(ValueZeroing(block, block).attribute(x), expected)
    for row in range(tokens):
        assert_same(ValueZeroing(block, block).attribute(x, token=row), expected[:, row])


@pytest.mark.parametrize("tokens", [6, LONG])
def test_mean_that_hardly_changes(tokens: int) -> None:
    """With tiny values, the check of the clean output in float32 hardly shows the mixing.

    The error of a packed replay would be as small as the check's tolerance.
    """
    block, x = Block(after=Mean()), sequences(1, tokens)
    with torch.no_grad():
        block.attention.value.weight.mul_(1e-4)
        block.attention.value.bias.mul_(1e-4)
    expected = zeroed_one_by_one(block, x)
    layer_map = ValueZeroing(block.float(), block).attribute(x.float())
    assert_same(layer_map.double(), expected, tolerance=0.02)


def test_source_seen_by_a_neighbour() -> None:
    block, x, mask = Block(after=Convolution()), sequences(2), mask_of_window(6, window=2)
    expected = zeroed_one_by_one(block, x, mask)
    assert (expected[:, 4, 2] > 1e-4).all()  # outside the window of row 4, inside that of row 3
    for row in range(6):
        scores = ValueZeroing(block, block).attribute((x, mask), token=row)
        assert_same(scores, expected[:, row])


@pytest.mark.parametrize("trusted", [False, True])
def test_source_seen_only_by_a_neighbour(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0 of a causal model sees only itself, and its own value is zero. It depends on row 1, which sees both."""
    if trusted:
        trust_all(monkeypatch)
    block, x, mask = Block(after=Ahead()), sequences(1), mask_of_window(6, window=6)
    x[:, 0] = block.attention_norm.bias.detach()
    with torch.no_grad():
        block.attention.value.bias.zero_()
    expected = zeroed_one_by_one(block, x, mask)
    assert_same(ValueZeroing(block, block).attribute((x, mask), token=0), expected[:, 0])


class ExpertsChoose(nn.Module):
    """Each of two experts takes the positions that fit it best, a share of all positions."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        answer = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            served = self.served(self.router(flat).softmax(-1), number)
            answer = answer.index_add(0, served, expert(flat[served]))
        return answer.view_as(x)

    def served(self, liking: Tensor, number: int) -> Tensor:
        return liking[:, number].topk(int(len(liking) * self.share)).indices


class FirstCome(ExpertsChoose):
    """Each position chooses an expert. An expert takes the first of these positions, up to a share of all positions."""

    def served(self, liking: Tensor, number: int) -> Tensor:
        chosen = (liking.argmax(-1) == number).nonzero().flatten()
        return chosen[: int(len(liking) * self.share)]


@torch.no_grad()
@pytest.mark.parametrize(("batch", "tokens"), [(2, 6), (1, LONG)])
@pytest.mark.parametrize("share", sampled([0.25, 0.5, 0.9], 0.5))
@pytest.mark.parametrize("experts", [ExpertsChoose, FirstCome])
@pytest.mark.filterwarnings("ignore:.*depend on each other")
def test_experts_with_room_for_some(experts: type[ExpertsChoose], share: float, batch: int, tokens: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        block, x = Block(after=experts(share)), torch.randn(batch, tokens, WIDTH, dtype=torch.float64)
        expected = zeroed_in_its_batch(block, x)
        assert_same(ValueZeroing(block, block).attribute(x), expected)
        assert_same(ValueZeroing(block, block).attribute(x, token=tokens // 2), expected[:, tokens // 2])


def check_one_by_one(case: Case) -> None:
    maps = ValueZeroing(case.model, case.layers).attribute(case.inputs)
    for index, layer_map in enumerate(maps):
        assert_same(layer_map, naive_value_zeroing(case, index))


@pytest.mark.parametrize("capacity", sampled([3, 5, 64], 5))
def test_experts_of_limited_capacity(capacity: int) -> None:
    torch.manual_seed(3)  # with capacity 5, pairs of row 5 fit, and pairs of all rows do not
    size = T5_SIZE | {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 2, "num_experts": 2}
    config = transformers.SwitchTransformersConfig(**size, expert_capacity=capacity)
    config._attn_implementation = "eager"
    model = transformers.SwitchTransformersModel(config).double().eval()
    randomize(model)
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersTop1Router":
            module.dtype = torch.float64
    tokens = {"input_ids": torch.randint(4, 60, (1, 10)), "decoder_input_ids": torch.randint(4, 60, (1, 2))}
    attention = replace(T5_ATTENTION, weights="encoder_attentions")
    case = Case(Family("", {}, "encoder.block", attention, mask=None), model, tokens)
    check_one_by_one(case)
    row = ValueZeroing(case.model, case.layers[1]).attribute(case.inputs, token=5)
    assert_same(row, naive_value_zeroing(case, 1)[:, 5])


@pytest.mark.parametrize("name", ["bart-decoder", "t5-decoder"])
def test_encoder_as_long_as_the_decoder(name: str) -> None:
    case = FAMILIES[name].case
    tokens = torch.randint(4, ENCODER_SIZE["vocab_size"], (1, 7))
    source = {key: x[:1] for key, x in case.inputs.items() if key in ("input_ids", "input_features")}
    check_one_by_one(replace(case, inputs={**source, "decoder_input_ids": tokens}))
