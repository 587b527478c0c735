"""Attributions in several threads, inside other modes, of copies, and inside Captum's NoiseTunnel."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from threading import Event
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from captum_vz import ValueZeroing
from tests.engine.blocks import WIDTH, Block
from tests.engine.parameters import sampled
from tests.faults.models import SUBJECTS
from tests.faults.state import differences, state_of

SECONDS = 600  # a thread that has not come by then never will


def test_pass_that_begins_during_another_and_outlives_it() -> None:
    """The compiler's setting is that from before the first pass, not that of the first pass."""
    subject = SUBJECTS["torch"]()
    first_runs, second_runs, first_is_over = Event(), Event(), Event()
    x = torch.randn(1, 4, WIDTH)
    before = state_of(subject.model)

    def attribute(now: Event, then: Event) -> None:
        def forward(x: Tensor) -> Tensor:
            now.set()
            assert then.wait(SECONDS)
            return subject.model(x)

        ValueZeroing(forward, list(subject.model.layers)).attribute(x)

    def first() -> None:
        attribute(first_runs, second_runs)
        first_is_over.set()

    def second() -> None:
        assert first_runs.wait(SECONDS)
        attribute(second_runs, first_is_over)

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(first), pool.submit(second)]:
            one.result(SECONDS)
    assert not differences(before, state_of(subject.model))


@contextmanager
def setting(name: str, inside: Any, outside: Any) -> Iterator[None]:
    getattr(torch, name)(inside)
    try:
        yield
    finally:
        getattr(torch, name)(outside)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "deterministic": lambda: setting("use_deterministic_algorithms", True, False),
    "default dtype": lambda: setting("set_default_dtype", torch.float64, torch.float32),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
# Each mode around each tap, and the modes that change tensors around copies of the model.
INSIDE = list(zip(["transformers", "torch", "by name", "inline"] * 2, SURROUNDINGS, strict=False))
INSIDE += [("copies of the model", one) for one in ("inference_mode", "default dtype", "autocast")]
INSIDE += [("transformers", "inference_mode"), ("by name", "autocast"), ("inline", "inference_mode")]


@pytest.mark.parametrize(
    ("name", "surrounding"), sampled(product([one for one in SUBJECTS if one != "gradients"], SURROUNDINGS), *INSIDE)
)
def test_inside_a_mode(name: str, surrounding: str) -> None:
    subject = SUBJECTS[name]()
    expected = subject.scores()
    # Autocast rounds what the layers are given to two digits.
    tolerance = 0.05 if surrounding == "autocast" else 1e-6
    with SURROUNDINGS[surrounding](), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = state_of(subject.model)
        found = subject.scores()
        assert not differences(before, state_of(subject.model))
    assert_same(found, expected, tolerance)
    assert_same(subject.scores(), expected)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_and_pickles(made: Callable[[Any], Any]) -> None:
    """Those that are made during a pass carry hooks that do nothing, and explain as their original does."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4, WIDTH, dtype=torch.float64)
    copies: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        copies.append(made(model[1].attention))
        return model(x)

    expected = ValueZeroing(forward, list(model)).attribute(x)
    again = made(model)
    assert_same(ValueZeroing(again, list(again)).attribute(x), expected)
    assert_same(made(ValueZeroing(model, list(model))).attribute(x), expected)
    again[1].attention = copies[0]
    torch.testing.assert_close(again(x), model(x))
    assert_same(ValueZeroing(again, list(again)).attribute(x), expected)


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to(other), other, rtol=0, atol=tolerance)
