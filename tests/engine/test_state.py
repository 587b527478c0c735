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
from tests.engine.blocks import WIDTH, Block, Halves, sequences, zeroed_one_by_one
from tests.engine.compare import assert_same


class Counter:
    """A helper object, not a module."""

    def __init__(self) -> None:
        self.runs, self.total = 0, torch.zeros(WIDTH, dtype=torch.float64)


class Hoards(nn.Module):
    """Keeps what it saw in buffers and in containers of every kind, at any depth."""

    average: Tensor
    count: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.counter = inner, Counter()
        self.register_buffer("average", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))
        self.means: list[float] = []
        self.seen: set[int] = {-1}
        self.recent: deque[int] = deque([-1], maxlen=3)
        self.nested: dict[str, Any] = {"runs": {"count": 0}, "lengths": [[]]}
        self.numbers, self.bytes = np.zeros(2), bytearray(b"a")
        self.pair = (torch.zeros(WIDTH, dtype=torch.float64), [0])
        self.ordered = OrderedDict(a=1, b=2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[..., 0].numel()
        self.average.lerp_(x.flatten(0, -2).mean(0), 0.1)
        self.count = self.count + rows
        self.last = x.mean().item()
        self.means.append(self.last)
        self.seen.add(rows)
        self.recent.append(rows)
        self.nested["runs"]["count"] += 1
        self.nested["lengths"][0].append(rows)
        self.numbers += rows
        self.bytes.append(1)
        self.ordered.move_to_end("a")
        self.ordered["c"] = rows
        self.counter.runs += 1
        self.pair[1][0] += 1
        for total in (self.counter.total, self.pair[0]):
            total += x.flatten(0, -2).sum(0)
        return self.inner(x)

    def kept(self) -> list[Any]:
        tensors = [x.tolist() for x in (self.average, self.count, self.counter.total, self.pair[0])]
        others = [self.seen, self.recent, self.nested, self.numbers.tolist(), self.bytes, list(self.ordered.items())]
        return [*tensors, *others, self.counter.runs, self.pair[1], self.last, self.means]


def hoarding(kind: Callable[[], nn.Module], x: Tensor) -> tuple[nn.Module, Hoards, list[Any]]:
    """A block, what keeps its state, and the state after a plain run."""
    block = kind()
    block.feed_forward = Hoards(block.feed_forward)
    plain = copy.deepcopy(block)
    with torch.no_grad():
        plain(x)
    return block, block.feed_forward, plain.feed_forward.kept()


@pytest.mark.parametrize("kind", [Block, lambda: Halves(lambda x: x)], ids=["whole", "windows"])
@pytest.mark.parametrize(("method", "inference"), [(ValueZeroing, True), (ValueZeroingRollout, False)])
def test_buffers_containers_and_objects(kind: Any, method: Any, inference: bool) -> None:
    x = sequences(2)
    with torch.inference_mode(inference):
        block, memory, expected = hoarding(kind, x)
        method(block, [block]).attribute(x)
    assert memory.kept() == expected
    assert memory.counter.runs == 1


def test_state_after_an_error() -> None:
    x = sequences(2)
    block, memory, expected = hoarding(Block, x)

    def fails(clean: Tensor, moved: Tensor) -> Tensor:
        if len(memory.means) > 1:  # replays have begun
            raise KeyboardInterrupt
        return (clean - moved).abs().sum(-1)

    with pytest.raises(KeyboardInterrupt):
        ValueZeroing(block, block, distance=fails).attribute(x)
    assert memory.kept() == expected


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


class Accumulates(Block):
    """Adds what it was given to a tensor, a set and an object among its arguments."""

    def forward(self, x: Tensor, total: Tensor | None = None, seen: Any = None, kept: Any = None) -> Tensor:
        assert total is not None
        total += x.sum((0, 1))
        seen.add(len(x))
        kept.states.append(x)
        return super().forward(x) * kept.gate(x).sigmoid()


def test_objects_among_the_arguments() -> None:
    block, x, gate = Accumulates(), sequences(2), nn.Linear(WIDTH, WIDTH).double()
    total, seen = torch.zeros(WIDTH, dtype=torch.float64), {-1}
    kept = SimpleNamespace(states=[], gate=gate)
    found = ValueZeroing(lambda x: block(x, total, seen, kept), block).attribute(x)
    assert torch.equal(total, x.sum((0, 1)))
    assert seen == {-1, 2}
    assert [state.shape for state in kept.states] == [x.shape]
    assert kept.gate is gate
    assert_same(found, zeroed_one_by_one(block, x, total, seen, kept))


class WritesInput(Block):
    """Adds to its input in place, as code that saves memory does."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x += self.attention(self.attention_norm(x), mask)
        x += self.feed_forward(self.norm(x))
        return x


class Copies(nn.Module):
    """Gives a block an input of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.clone())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layer_that_writes_into_its_input(dtype: torch.dtype, inference: bool) -> None:
    block, x = WritesInput().to(dtype).requires_grad_(False), sequences(2).to(dtype)
    with torch.inference_mode(inference):
        found = ValueZeroing(lambda x: block(x.clone()), block).attribute(x)
    expected = zeroed_one_by_one(Copies(block.double()), x.double(), value="inner.attention.value")
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.all_cases  # each reads other parts of a layer
@pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingRollout, ALTI])
def test_layers_that_write_into_their_inputs(method: Any) -> None:
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
    "Python's generator": (random.Random(0), random.Random.random, random.Random.getstate),
    "numpy's generator": (
        [np.random.default_rng(0)],
        lambda held: held[0].random(),
        lambda held: held[0].bit_generator.state,
    ),
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
    with pytest.warns(UserWarning, match="Replays may change"):
        ValueZeroing(block, block).attribute(sequences(1))


class NamesItself:
    """An object whose class has no name of a module, as classes of Cython."""

    __module__ = property(lambda self: "elsewhere")  # type: ignore[assignment]
    calls = 0


def test_code_and_classes_of_no_module() -> None:
    """Code that was executed from a string may have none."""
    scope: dict[str, Any] = {"Block": Block}
    exec("class Executed(Block):\n    def forward(self, x):\n        return super().forward(x)", scope)
    block, x, kept = scope["Executed"](), sequences(2), NamesItself()
    assert type(block).forward.__module__ is None
    block.after = Advances(kept, lambda own: setattr(own, "calls", own.calls + 1))
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(copy.deepcopy(block), x))
    assert kept.calls == 1
