"""After an attribution, a layer's state is the state after one plain run of the model."""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from captum_vz import ALTI, ValueZeroing, ValueZeroingRollout
from tests.engine.blocks import (
    WIDTH,
    Block,
    Halves,
    sequences,
    zeroed_one_by_one,
)
from tests.engine.compare import assert_same


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
    """Examples of one batch share its statistics, which replays neither change nor see change."""
    block, x = Normalised().train(), sequences(batch)
    plain = copy.deepcopy(block)
    expected = zeroed_one_by_one(copy.deepcopy(block), x)
    plain(x)
    assert_same(ValueZeroing(block, block).attribute(x), expected)
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


class Counter:
    """A helper object, not a module."""

    def __init__(self) -> None:
        self.runs, self.total = 0, torch.zeros(WIDTH, dtype=torch.float64)


class Hoards(nn.Module):
    """Keeps what it saw in containers of every kind, at any depth."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.counter = inner, Counter()
        self.seen: set[int] = {-1}
        self.recent: deque[int] = deque([-1], maxlen=3)
        self.nested: dict[str, Any] = {"runs": {"count": 0}, "lengths": [[]]}
        self.numbers, self.bytes = np.zeros(2), bytearray(b"a")
        self.tensors = [torch.zeros(WIDTH, dtype=torch.float64)]
        self.pair = (torch.zeros(WIDTH, dtype=torch.float64), [0])
        self.ordered = OrderedDict(a=1, b=2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[..., 0].numel()
        self.seen.add(rows)
        self.recent.append(rows)
        self.nested["runs"]["count"] += 1
        self.nested["lengths"][0].append(rows)
        self.numbers += rows
        self.bytes.append(1)
        self.ordered.move_to_end("a")
        self.ordered["c"] = rows
        self.counter.runs += 1
        for total in (self.counter.total, self.tensors[0], self.pair[0]):
            total += x.flatten(0, -2).sum(0)
        self.pair[1][0] += 1
        return self.inner(x)

    def kept(self) -> list[Any]:
        tensors = [x.tolist() for x in (self.counter.total, self.tensors[0], self.pair[0])]
        others = [self.seen, self.recent, self.nested, self.numbers.tolist(), self.bytes, list(self.ordered.items())]
        return [*tensors, *others, self.counter.runs, self.pair[1]]


@pytest.mark.parametrize("kind", [Block, lambda: Halves(lambda x: x)], ids=["whole", "windows"])
@pytest.mark.parametrize("inference", [False, True])
def test_containers_and_helper_objects(kind: Any, inference: bool) -> None:
    block, x = kind(), sequences(2)
    with torch.inference_mode(inference):
        memory = block.feed_forward = Hoards(block.feed_forward)
        plain = copy.deepcopy(block)
        with torch.no_grad():
            plain(x)
        ValueZeroing(block, [block]).attribute(x)
    assert memory.kept() == plain.feed_forward.kept()
    assert memory.counter.runs == 1


class Accumulates(Block):
    """Adds what it was given to a tensor and to a set among its arguments."""

    def forward(self, x: Tensor, total: Tensor | None = None, seen: Any = None) -> Tensor:
        assert total is not None
        total += x.sum((0, 1))
        seen.add(len(x))
        return super().forward(x)


def test_tensors_and_sets_among_the_arguments() -> None:
    block, x = Accumulates(), sequences(2)
    total, seen = torch.zeros(WIDTH, dtype=torch.float64), {-1}
    found = ValueZeroing(lambda x: block(x, total, seen), block).attribute(x)
    assert torch.equal(total, x.sum((0, 1)))
    assert seen == {-1, 2}
    assert_same(found, zeroed_one_by_one(block, x, total, seen))


class WritesInput(Block):
    """Adds to its input in place, as code that saves memory does."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x += self.attention(self.attention_norm(x), mask)
        x += self.feed_forward(self.norm(x))
        return x


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layer_that_writes_into_its_input(dtype: torch.dtype, inference: bool) -> None:
    blocks = nn.Sequential(WritesInput(), WritesInput()).to(dtype).requires_grad_(False)
    x = sequences(2).to(dtype)
    with torch.inference_mode(inference):
        maps = ValueZeroing(lambda x: blocks(x.clone()), list(blocks)).attribute(x)
        hidden = x.double()
        for block, found in zip(blocks, maps, strict=True):
            exact, given = copy.deepcopy(block).double(), hidden.to(dtype).double()
            expected = zeroed_one_by_one(Copies(exact), given, value="inner.attention.value")
            if block is blocks[0] or dtype != torch.bfloat16:
                torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)
            hidden = Copies(exact)(given)


class Copies(nn.Module):
    """Gives a block an input of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.clone())


@pytest.mark.parametrize("method", [ValueZeroingRollout, ALTI])
def test_rollout_of_layers_that_write_into_their_inputs(method: Any) -> None:
    blocks = nn.Sequential(WritesInput(), WritesInput()).requires_grad_(False)
    plain = nn.Sequential(Block(), Block()).requires_grad_(False)
    plain.load_state_dict(blocks.state_dict())
    x = sequences(2)
    assert_same(method(lambda x: blocks(x.clone()), list(blocks)).attribute(x), method(plain, list(plain)).attribute(x))


def test_buffers_that_a_layer_writes() -> None:
    block, x = Block(), sequences(1)
    kept = nn.Buffer(torch.zeros(2))
    block.after = Advances(kept, lambda own: own.add_(1))
    ValueZeroing(block, block).attribute(x)
    assert kept.tolist() == [1, 1]
    loss = (block.feed_forward(x) * block.norm.weight).sum()
    ValueZeroing(block, block).attribute(x)
    loss.backward()  # parameters were not written


class Slots:
    """An object without a `__dict__`."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> None:
        self.calls += 1


def local_slots() -> Any:
    """An object of a class that cannot be pickled."""

    class Local(Slots):
        __slots__ = ()

    return Local()


class Advances(nn.Module):
    """Advances what it keeps at each run. It changes no numbers."""

    def __init__(self, kept: Any, advance: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kept = kept
        self.advance = advance

    def forward(self, x: Tensor) -> Tensor:
        self.advance(self.kept)
        return torch.zeros_like(x)


KEPT: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "slots": ([Slots()], lambda held: held[0].count(), lambda held: held[0].calls),
    "slots of a local class": (local_slots(), Slots.count, lambda own: own.calls),
    "Python's generator": (random.Random(0), random.Random.random, random.Random.getstate),
    "numpy's generator": (
        [np.random.default_rng(0)],
        lambda held: held[0].random(),
        lambda held: held[0].bit_generator.state,
    ),
    "numpy's old generator": (np.random.RandomState(0), np.random.RandomState.rand, lambda own: own.get_state()[2]),
}


@pytest.mark.parametrize("name", KEPT)
def test_objects_and_generators_are_put_back(name: str) -> None:
    kept, advance, shows = copy.deepcopy(KEPT[name])
    plain = copy.deepcopy(kept)
    advance(plain)
    block = Block()
    block.after = Advances(kept, advance)
    ValueZeroing(block, [block]).attribute(sequences(1))
    assert block.after.kept is kept
    assert shows(kept) == shows(plain)


def test_what_cannot_be_copied_is_shared() -> None:
    """The map is right, although replays change an iterator, a file, torch's generator and a closure."""
    block, x = Block(), sequences(1)
    expected = ValueZeroing(block, block).attribute(x)
    kept = [itertools.count(), io.TextIOWrapper(io.BytesIO()), torch.Generator(), (number for number in range(99))]
    block.after = Advances(kept, lambda held: (next(held[0]), held[1].write("a"), torch.rand(1, generator=held[2])))
    assert_same(ValueZeroing(block, block).attribute(x), expected)
    assert block.after.kept is kept


class Broken:
    """An object that can be pickled, and not made again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_warning_of_state_that_cannot_be_copied() -> None:
    block = Block()
    block.after = Advances([Broken()], lambda held: None)
    with pytest.warns(UserWarning, match="Replays may change what Block keeps, which cannot be copied"):
        ValueZeroing(block, block).attribute(sequences(1))


class NamesItself:
    """An object whose class has no name of a module, as classes of Cython."""

    __module__ = property(lambda self: "elsewhere")  # type: ignore[assignment]

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> None:
        self.calls += 1


def test_class_without_the_name_of_a_module() -> None:
    block, kept = Block(), NamesItself()
    block.after = Advances(kept, NamesItself.count)
    ValueZeroing(block, [block]).attribute(sequences(1))
    assert kept.calls == 1


def test_code_of_no_module() -> None:
    """Code that was executed from a string may have none."""
    scope: dict[str, Any] = {"Block": Block}
    exec("class Executed(Block):\n    def forward(self, x):\n        return super().forward(x)", scope)
    block, x = scope["Executed"](), sequences(2)
    assert type(block).forward.__module__ is None
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x))
