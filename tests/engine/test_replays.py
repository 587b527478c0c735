"""The replays: each serves the families that it is for, and keeps the contract of `Replay`."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from captum_vz import ValueZeroing
from captum_vz._engine import traced_replays, value_zeroing
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.replay import Replay, ReplayChunk, ReplayProblem
from tests.budget import set_budget
from tests.engine.blocks import (
    Block,
    Conditioned,
    Convolution,
    Halves,
    HandedOn,
    Mean,
    Reader,
    scale_each_position,
    sequences,
    zeroed_one_by_one,
)
from tests.engine.compare import assert_same
from tests.engine.odd import LONG
from tests.engine.odd_changes import some_places
from tests.engine.parameters import quick
from tests.reference import FAMILIES, SEQUENCE_TO_SEQUENCE, naive_value_zeroing

REPLAYS = {replay.name: replay for replay in value_zeroing.REPLAYS}
ATTENTIONS = [(name, "self") for name in FAMILIES]
ATTENTIONS += [(name, "cross") for name, family in SEQUENCE_TO_SEQUENCE.items() if family.cross]
QUICK = [("bert", "self"), ("gpt2", "self"), ("albert", "self"), ("bart-decoder", "cross"), ("t5-decoder", "self")]
each_attention = pytest.mark.parametrize(("name", "attention"), quick(ATTENTIONS, *QUICK))


class Refused:
    """A replay that holds for no layer."""

    name = "refused"

    def fits(self, problem: ReplayProblem) -> bool:
        return True

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        raise CannotReplayError("not to be used here")
        yield


def use(monkeypatch: pytest.MonkeyPatch, *replays: Replay) -> None:
    """Let maps be computed by these replays only: by replays that are made for a test."""
    monkeypatch.setattr(value_zeroing, "REPLAYS", replays)


@each_attention
def test_every_family_as_packed_pairs(name: str, attention: str) -> None:
    case = FAMILIES[name].case
    with traced_replays() as traces:
        maps = ValueZeroing(case.model, case.layers, attention=attention).attribute(case.inputs)
    assert all(trace.replay is not None and trace.replay.name.startswith("packed pairs") for trace in traces)
    for index, layer_map in enumerate(maps):
        assert_same(layer_map, naive_value_zeroing(case, index, attention=attention))


@each_attention
def test_every_family_by_the_definition(name: str, attention: str) -> None:
    case = FAMILIES[name].case
    of = ValueZeroing(case.model, case.layers, attention=attention)
    some = ValueZeroing(case.model, case.layers, attention=attention, heads=[0, 2], distance="l1", normalize=False)
    groups = {"feature_mask": torch.arange(of.attribute(case.inputs)[0].shape[2])[None] // 2}
    row = {"token": [2, 1, 0][: case.batch], **groups, "perturbations_per_eval": 2}

    def answers() -> list[Any]:
        return [of.attribute(case.inputs), of.attribute(case.inputs, **row), some.attribute(case.inputs, **groups)]

    packed = answers()
    with traced_replays("definition"):
        for whole, expected in zip(answers(), packed, strict=True):
            assert_same(whole, expected)


@pytest.mark.parametrize(("tokens", "per_group", "runs"), [(64, 1, 0), (65, 1, 65), (65, 2, 0), (130, 2, 65)])
def test_many_runs_are_told(tokens: int, per_group: int, runs: int) -> None:
    """One warning names the layer and what its definition costs, from 65 runs on. Groups of sources run together."""
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=50, **size), add_pooling_layer=False).eval()
    groups = torch.arange(tokens)[None] // per_group
    with traced_replays("definition"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ids = torch.arange(tokens)[None] % 40 + 5
        ValueZeroing(model, model.encoder.layer[1]).attribute(ids, feature_mask=groups)
    told = [str(one.message) for one in caught]
    expected = rf"layer 0 \(BertLayer\) runs {runs} times, once for each group of sources, .*Pass feature_mask"
    assert len(told) == (runs > 0)
    assert all(re.search(expected, one) for one in told)


def test_refusal_names_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block()
    one, other = Refused(), Refused()
    one.name, other.name = "one replay", "another replay"
    use(monkeypatch, one, other)
    message = r"Block cannot be replayed: .*one replay: not to be used here; another replay: not to be used here"
    with pytest.raises(AssertionError, match=message):
        ValueZeroing(block, block).attribute(sequences(2, 20))


# The contract: what `Replay` promises of every entry of REPLAYS.


@dataclass
class Example:
    """A layer for which a replay is, and its map by reruns with one value zeroed."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    expected: Tensor
    attention: str = "self"

    def method(self) -> ValueZeroing:
        return ValueZeroing(self.layer, self.layer, attention=self.attention, normalize=False)


def block_example(block: nn.Module, batch: int, tokens: int, *more: Tensor) -> Example:
    x = sequences(batch, tokens)
    return Example(block, (x, *more), zeroed_one_by_one(block, x, *more, normalize=False))


def decoder_example() -> Example:
    """A decoder's layer whose memory is as long as its sequence: no shape shows which tensor is packed."""
    layer = DecoderLayer().double().eval()
    x, memory = sequences(2), sequences(2).flip(0) + 1
    expected = zeroed_one_by_one(layer, x, memory, value="block.attention.value", normalize=False)
    return Example(layer, (x, memory), expected)


class DecoderLayer(nn.Module):
    """A block, and a cross-attention after it."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.reader = Block(after), Reader()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.reader(self.block(x), None, memory)


EXAMPLES: dict[str, Callable[[], Example]] = {
    "folded pairs": lambda: block_example(Block(), 2, 20),
    "packed pairs": lambda: block_example(Block(), 2, 6),
    "packed pairs, first tensor only": decoder_example,
    "definition": lambda: block_example(Block(after=Convolution()), 2, 6),
    "definition, more arguments": lambda: block_example(
        Conditioned(scale_each_position), 6, 6, torch.rand(6, 16, dtype=torch.float64) + 0.5
    ),
    "definition, windows": lambda: block_example(Halves(lambda x: x), 2, 6),
}
each_replay = pytest.mark.parametrize("name", EXAMPLES)


def replay_of(name: str) -> Replay:
    """The replay of an example."""
    return REPLAYS[name.partition(", ")[0] if name.startswith("definition") else name]


@pytest.fixture
def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    """The example of the replay `name`, where folding is taken for few pairs, and no other replay is."""
    torch.manual_seed(0)
    set_budget(monkeypatch, folding_calls=0)
    with traced_replays(replay_of(name).name):
        yield EXAMPLES[name]()


@each_replay
def test_replay_equals_the_twin(name: str, example: Example) -> None:
    with traced_replays(replay_of(name).name) as traces:
        found = example.method().attribute(example.inputs)
    assert [trace.replay and trace.replay.name for trace in traces] == [replay_of(name).name]
    assert_same(found, example.expected, tolerance=1e-12)
    assert (example.expected.amax(-1) > 1e-8).all()


@each_replay
def test_same_numbers_in_any_chunks(name: str, example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk_bytes in (2**12, 2**15, 2**26):
        set_budget(monkeypatch, chunk_bytes=chunk_bytes)
        for at_most in (None, 1, 2, 5):
            found = example.method().attribute(example.inputs, perturbations_per_eval=at_most)
            assert_same(found, example.expected, tolerance=1e-12)


class Passing:
    """A replay that passes on the chunks of another."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.name = replay.name

    def fits(self, problem: ReplayProblem) -> bool:
        return self.replay.fits(problem)

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        return self.replay(problem)


@each_replay
@pytest.mark.parametrize("at_most", [None, 1, 2])
def test_active_pairs_come_once(
    name: str, at_most: int | None, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[Tensor] = []
    active: list[Tensor] = []
    groups: list[int] = []  # of each chunk

    class Counted(Passing):
        def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
            count = torch.zeros_like(problem.active, dtype=torch.long)
            for chunk in self.replay(problem):
                count.index_put_((chunk.target, chunk.group), torch.tensor(1), accumulate=True)
                batch = problem.targets.batch[chunk.target]
                groups.append(len(torch.stack([batch, chunk.group]).unique(dim=1).T))
                yield chunk
            counts.append(count)
            active.append(problem.active)

    use(monkeypatch, Counted(replay_of(name)))
    example.method().attribute(example.inputs, perturbations_per_eval=at_most)
    (count,), (wanted,) = counts, active
    assert at_most is None or max(groups) <= at_most * len(example.expected)
    assert count.max() == 1
    missing = (wanted & (count == 0)).view(example.expected.shape)
    assert not (example.expected[missing] > 1e-15).any()  # these targets cannot depend on these groups


@each_replay
def test_no_tensor_outlives_the_replay(name: str, example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Any]] = []

    class Kept(Passing):
        def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
            one = problem.site.attention
            tensors = (one.values, one.context, one.weights, problem.output, problem.targets.members, problem.active)
            kept.extend(weakref.ref(x) for x in (problem, problem.site.layer, one, *tensors) if x is not None)
            for chunk in self.replay(problem):
                kept.extend((weakref.ref(chunk.output), weakref.ref(chunk.clean)))
                yield chunk

    use(monkeypatch, Kept(replay_of(name)))
    gc.disable()  # the collector of cycles would free them too late
    try:
        example.method().attribute(example.inputs)
        assert len(kept) > 6
        assert not any(one() is not None for one in kept)
    finally:
        gc.enable()


class Misled(Passing):
    """A replay that is given a wrong clean output at some places. It keeps the reasons of its errors."""

    def __init__(self, replay: Replay, place: slice | int, share: float) -> None:
        super().__init__(replay)
        self.place, self.share, self.reasons = place, share, list[str]()

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        output = problem.output.clone()
        rows = output.view(-1, output.shape[-1])
        rows[self.place] += self.share * rows[self.place].flip(-1)
        try:
            yield from self.replay(replace(problem, output=output))
        except CannotReplayError as error:
            self.reasons.append(str(error))
            raise


@each_replay
@pytest.mark.parametrize("wrong", [slice(None), 0, 5, -1], ids=["all", "first", "middle", "last"])
def test_wrong_clean_output_is_noticed(
    name: str, wrong: slice | int, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each target's clean output is compared with that of the clean pass."""
    misled = Misled(replay_of(name), wrong, 1e-3)
    use(monkeypatch, misled)
    with pytest.raises(AssertionError, match="cannot be replayed"):
        example.method().attribute(example.inputs)
    assert misled.reasons


def test_error_near_the_size_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is rounding for the layer's output, and not for the little that its attention adds."""
    block = Block(finish=lambda own, context, x: 1e-9 * own.output(context))
    for share, outcome in ((1e-10, pytest.raises(AssertionError, match="wrong by more than")), (0, nullcontext())):
        use(monkeypatch, Misled(REPLAYS["packed pairs"], slice(None), share))
        with outcome:
            ValueZeroing(block, block).attribute(sequences(2))


def test_places_beyond_the_clean_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that treats some places of a long run in its own way is noticed before its scores are compared."""
    use(monkeypatch, Passing(REPLAYS["packed pairs"]))
    with pytest.raises(AssertionError, match="place in the run"):
        some_places(LONG, 37).attribute()


# For each replay, a layer in which the rows that it runs side by side depend on each other. The definition runs the
# examples of a batch one after the other then, but not those in windows.
DEPENDENT: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "folded pairs": lambda: (Block(after=Mean()), sequences(2, 20)),
    "packed pairs": lambda: (Block(after=Mean()), sequences(2)),
    "packed pairs, first tensor only": lambda: (DecoderLayer(Mean()).double().eval(), (sequences(2), sequences(2) + 1)),
    "definition, windows": lambda: (HandedOn(lambda x: x), sequences(2)),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_rows_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    set_budget(monkeypatch, folding_calls=0)
    layer, inputs = DEPENDENT[name]()
    only = traced_replays(replay_of(name).name)
    with only as traces, pytest.raises(AssertionError, match="cannot be replayed"):
        ValueZeroing(layer, layer).attribute(inputs)
    assert list(traces[0].failed) == [replay_of(name).name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", range(4, 12))
def test_no_change_is_zero_to_the_last_bit(dtype: torch.dtype, tokens: int) -> None:
    # Of a number of rows that is no multiple of 4, MKL rounds the last ones in another way than the rest.
    config = BertConfig(
        vocab_size=20, hidden_size=64, num_attention_heads=4, num_hidden_layers=1, intermediate_size=128
    )
    torch.manual_seed(0)
    model = BertModel(config).eval().to(dtype)
    layer = model.encoder.layer[0]
    nn.init.zeros_(layer.attention.output.dense.weight)
    with traced_replays("packed pairs"), pytest.warns(UserWarning, match="no source changes"):
        scores = ValueZeroing(model, layer, normalize=False).attribute(torch.arange(tokens)[None], token=-1)
    assert not scores.any()
