"""After an attribution, a layer's state is the state after one plain run of the model."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing, ValueZeroingRollout
from tests.engine.blocks import WIDTH, Block, Halves, sequences


class Remembers(nn.Module):
    """Keeps an average, a count, a sum (no buffer), the last mean and all means of its inputs."""

    average: Tensor
    count: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.sum = torch.zeros(WIDTH, dtype=torch.float64)
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.average.lerp_(x.flatten(0, -2).mean(0), 0.1)
        self.count = self.count + x[..., 0].numel()
        self.sum += x.flatten(0, -2).sum(0)
        self.last = x.mean().item()
        self.means.append(self.last)
        return self.inner(x)


def kept_by(block: nn.Module) -> list[Any]:
    memory = block.feed_forward
    assert isinstance(memory, Remembers)
    return [memory.average.tolist(), memory.count.item(), memory.sum.tolist(), memory.last, memory.means]


@pytest.mark.parametrize("kind", [Block, lambda: Halves(lambda x: x)], ids=["whole", "windows"])
@pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingRollout])
@pytest.mark.parametrize("inference", [False, True])
def test_averages_counts_and_attributes(kind: Any, method: Any, inference: bool) -> None:
    block, x = kind(), sequences(2)
    with torch.inference_mode(inference):
        block.feed_forward = Remembers(block.feed_forward).double()
        plain = copy.deepcopy(block)
        with torch.no_grad():
            plain(x)
        method(block, [block]).attribute(x)
    assert kept_by(block) == kept_by(plain)


def test_state_after_an_error() -> None:
    block, x = Block(), sequences(2)
    memory = block.feed_forward = Remembers(block.feed_forward).double()
    plain = copy.deepcopy(block)
    with torch.no_grad():
        plain(x)

    def fails(clean: Tensor, moved: Tensor) -> Tensor:
        if len(memory.means) > 1:  # replays have begun
            raise KeyboardInterrupt
        return (clean - moved).abs().sum(-1)

    with pytest.raises(KeyboardInterrupt):
        ValueZeroing(block, block, distance=fails).attribute(x)
    assert kept_by(block) == kept_by(plain)


class Normalised(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH).double()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.batch_norm(x.mT).mT)


@pytest.mark.parametrize("batch", [1, 2])
def test_batch_norm_in_train_mode(batch: int) -> None:
    """Examples of one batch depend on each other, so a batch of two is refused."""
    block, x = Normalised().train(), sequences(batch)
    plain = copy.deepcopy(block)
    plain(x)
    refused = pytest.raises(AssertionError, match="Normalised cannot be replayed")
    with nullcontext() if batch == 1 else refused:
        ValueZeroing(block, block).attribute(x)
    for found, expected in zip(block.buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected)


class WithCache(Block):
    """Keeps its states in an object that is an argument."""

    def forward(self, x: Tensor, kept: Any = None) -> Tensor:
        kept.states.append(x)
        return super().forward(x) * kept.gate(x).sigmoid()


def test_objects_given_to_a_layer() -> None:
    block, x, gate = WithCache(), sequences(2), nn.Linear(WIDTH, WIDTH).double()
    kept = SimpleNamespace(states=[], gate=gate)
    ValueZeroing(lambda x: block(x, kept), block).attribute(x)
    assert [state.shape for state in kept.states] == [x.shape]
    assert kept.gate is gate


class DrawsLots(Block):
    """Drops its change at random. The name of its rate does not contain "drop"."""

    keep_prob = 0.9

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        added = super().forward(x) - x
        return x + added * (torch.rand(len(x), 1, 1) < self.keep_prob) if self.training else x + added


def test_random_train_mode_is_refused() -> None:
    block, x = DrawsLots(), sequences(2)
    expected = ValueZeroing(block, block).attribute(x)
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="DrawsLots draws random numbers, so no two runs of it agree"):
        ValueZeroing(block.train(), block).attribute(x)
    assert torch.equal(ValueZeroing(block.eval(), block).attribute(x), expected)
