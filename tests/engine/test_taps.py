"""The taps: attention calls reach the handler of the thread, and nothing stays behind. Every entry of TAPS passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from captum_vz import ValueZeroing
from captum_vz._engine.taps import TAPS
from captum_vz._engine.taps.changes import Changes, FunctionMode
from captum_vz._engine.taps.handler import NAME, AttentionCall, AttentionHandler, LoadedAlias, handled_by
from tests.engine.blocks import WIDTH, Block, block_of, sequences
from tests.engine.by_name import ByName
from tests.engine.compare import assert_same
from tests.engine.test_inline_layers import case as inline_case
from tests.faults.state import state_of
from tests.reference import FAMILIES

taps = {tap.__name__: tap for tap in TAPS}


@dataclass
class Example:
    """A tap, and a model whose attention it reads."""

    tap: Callable[..., None]
    model: nn.Module
    inputs: Any

    @contextmanager
    def attached(self, *layers: nn.Module) -> Iterator[None]:
        """Attach the tap to the model or to `layers`. What is imported by name is handed on by torch's name."""
        with Changes() as changes:
            modules = [module for layer in layers or [self.model] for module in layer.modules()]
            if self.tap is taps["tap_sdpa_by_name"]:
                taps["tap_sdpa"](modules, changes)
            self.tap(modules, changes)
            yield

    @torch.no_grad()
    def run(self) -> Tensor:
        output = self.model(**self.inputs) if isinstance(self.inputs, dict) else self.model(self.inputs)
        return output if isinstance(output, Tensor) else output[0]

    def state(self) -> dict[str, Any]:
        """All that a tap may change."""
        return state_of(self.model)


class Counting(AttentionHandler):
    """Counts what it is shown, and changes nothing."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.count = 0
        self.error = error

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        self.see()
        return call.compute(call.values)

    def on_exit(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.Parameter):
            self.see()

    def see(self) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error


def family(name: str) -> tuple[nn.Module, Any]:
    case = FAMILIES[name].build()
    return case.model, case.inputs


def torchs_layer() -> tuple[nn.Module, Any]:
    return nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True).double().eval(), sequences(2)


# The name of a tap -> a model that it reads. One model for each entry of TAPS at least.
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "tap_transformers": lambda: family("llama"),
    "tap_transformers, home-made": lambda: (Block(), sequences(2)),
    "tap_sdpa": torchs_layer,
    "tap_sdpa_by_name": lambda: (block_of(ByName()), sequences(2)),
    "tap_projections": lambda: inline_case("XLNet"),
}


@pytest.fixture(params=sorted({*MODELS, *taps}))
def example(request: pytest.FixtureRequest) -> Example:
    torch.manual_seed(0)
    return Example(taps[request.param.split(",")[0]], *MODELS[request.param]())


def test_calls_reach_the_handler(example: Example) -> None:
    clean, handler = example.run(), Counting()
    with example.attached(), handled_by(handler):
        assert_same(example.run(), clean, tolerance=1e-12)
    assert handler.count
    handler.count = 0
    with handled_by(handler):  # no tap is attached any more
        example.run()
    assert not handler.count


@pytest.mark.parametrize("error", [RuntimeError(), KeyboardInterrupt()], ids=repr)
def test_nothing_stays_after_errors(example: Example, error: BaseException) -> None:
    before = example.state()

    def fail() -> None:
        with example.attached():
            example.run()
            raise error

    with pytest.raises(type(error)):
        fail()
    assert example.state() == before
    with pytest.raises(type(error)), example.attached(), handled_by(Counting(error)):
        example.run()
    assert example.state() == before


def test_other_layers_are_untouched(example: Example) -> None:
    other = nn.Sequential(nn.Linear(2, 2))
    before, modes = example.state(), len(_get_current_function_mode_stack())
    with example.attached(other):
        assert example.state()["attention"] == before["attention"]
        assert len(_get_current_function_mode_stack()) == modes
    assert example.state() == before


def test_other_threads_compute_as_ever(example: Example) -> None:
    clean, handler = example.run(), Counting()
    with ThreadPoolExecutor(1) as pool, example.attached(), handled_by(handler):
        assert_same(pool.submit(example.run).result(), clean, tolerance=1e-12)
    assert not handler.count


def test_two_threads_at_once(example: Example) -> None:
    """The first thread to attach a tap leaves before the second."""
    before, clean = example.state(), example.run()
    attached, left = threading.Event(), threading.Event()

    def second() -> tuple[Tensor, int]:
        handler = Counting()
        with example.attached(), handled_by(handler):
            attached.set()
            assert left.wait(600)
            return example.run(), handler.count

    with ThreadPoolExecutor(1) as pool:
        with example.attached():
            running = pool.submit(second)
            assert attached.wait(600)
        left.set()
        output, count = running.result()
    assert_same(output, clean, tolerance=1e-12)
    assert count
    assert example.state() == before


def test_taps_nest(example: Example) -> None:
    before, handler = example.state(), Counting()
    with example.attached():
        with example.attached(), handled_by(handler):
            example.run()
        count = handler.count
        with handled_by(handler):
            example.run()
    assert handler.count > count > 0
    assert example.state() == before


def test_eager_is_looked_up_since_transformers_5() -> None:
    """Before, a layer that reads "eager" computes its attention inline, where nothing of it is seen."""
    name = LoadedAlias(NAME)
    assert name == "eager"
    name.looked_up = False
    assert name == NAME
    assert name != "eager"
    name.loaded = "sdpa"
    assert name == "sdpa"


@pytest.mark.parametrize("name", ["home-made", "torch", "bert", "imported"])
def test_mode_is_on_where_needed(name: str) -> None:
    """A mode is asked at each function of torch, which takes time."""
    build = {"torch": torchs_layer, "bert": lambda: family("bert"), "imported": MODELS["tap_sdpa_by_name"]}
    model, inputs = build.get(name, lambda: (Block(), sequences(2)))()
    layer, seen = (model.encoder.layer[0] if name == "bert" else model), list[bool]()

    def note(*args: Any) -> None:
        seen.append(any(isinstance(mode, FunctionMode) for mode in _get_current_function_mode_stack()))

    with layer.register_forward_pre_hook(note):
        ValueZeroing(model, layer).attribute(inputs)
    assert seen == [name == "imported"]
    assert not _get_current_function_mode_stack()
