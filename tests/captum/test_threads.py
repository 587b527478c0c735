"""Several threads use one model: two explain it and one runs it. All threads get correct numbers.

A barrier inside the forward functions holds both passes open while the model runs, so that they overlap for certain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing
from tests.captum.configurations import METHODS, each_method, tensors
from tests.captum.footprint import footprint
from tests.reference.case import Case
from tests.reference.families import FAMILIES

SECONDS = 600  # a barrier that is broken fails the test in place of hanging it


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Lets threads take turns fifty times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


def together(*actions: Callable[[], Any]) -> list[Any]:
    """Runs each action in a thread of its own, all at once; an error in one is raised here."""
    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(action) for action in actions]]


def meeting(case: Case, barrier: Barrier) -> Callable[..., Any]:
    """The model as a forward function that waits for the others before it runs and after."""

    def forward(**inputs: Tensor) -> Any:
        barrier.wait(SECONDS)
        output = case.model(**inputs)
        barrier.wait(SECONDS)
        return output

    return forward


def assert_equal(answer: Any, expected: Any) -> None:
    for one, other in zip(tensors(answer), tensors(expected), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
@each_method
def test_three_threads_share_a_model(method: Any, family: str, implementation: str) -> None:
    case = FAMILIES[family].build(attn_implementation=implementation)
    before = footprint(case.model)
    one, other, plain = ({name: value[b:] for name, value in case.inputs.items()} for b in range(3))
    other_method = METHODS[METHODS.index(method) - 1]
    expected = (
        method(case.model, case.layers).attribute(one),
        other_method(case.model, case.layers).attribute(other),
        case.model(**plain).last_hidden_state,
    )
    barrier = Barrier(3)
    forward = meeting(case, barrier)
    for _ in range(3):
        first, second, hidden = together(
            lambda: method(forward, case.layers).attribute(one),
            lambda: other_method(forward, case.layers).attribute(other),
            lambda: forward(**plain).last_hidden_state,
        )
        assert_equal(first, expected[0])
        assert_equal(second, expected[1])
        # Under sdpa the third thread may be served by eager attention for a while, which rounds otherwise.
        torch.testing.assert_close(hidden, expected[2], rtol=1e-12, atol=1e-12)
        assert footprint(case.model) == before


@each_method
def test_error_in_one_thread(method: Any) -> None:
    case = FAMILIES["bert"].build(attn_implementation="sdpa")
    before = footprint(case.model)
    expected = method(case.model, case.layers).attribute(case.inputs, token=1)
    started, failed = Event(), Event()

    def patient(**inputs: Tensor) -> Any:
        started.set()
        assert failed.wait(SECONDS)
        return case.model(**inputs)

    def fail() -> None:
        assert started.wait(SECONDS)
        with pytest.raises(AssertionError, match="99 is out of range"):
            method(case.model, case.layers).attribute(case.inputs, token=99)
        failed.set()

    answer, _ = together(lambda: method(patient, case.layers).attribute(case.inputs, token=1), fail)
    assert_equal(answer, expected)
    assert footprint(case.model) == before


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
@each_method
def test_pass_ends_during_another_pass(method: Any, kind: str) -> None:
    # torch lists a module's hooks once, then asks of each whether it wants keywords: by then ours may be gone.
    case = FAMILIES["bert"].build()
    expected = case.model(**case.inputs).last_hidden_state
    begun, inside, ended = Event(), Event(), Event()
    runner: list[int] = []

    def hold(*arguments: Any) -> None:
        if get_ident() in runner:
            inside.set()
            assert ended.wait(SECONDS)

    def forward(**inputs: Tensor) -> Any:
        begun.set()
        assert inside.wait(SECONDS)
        return case.model(**inputs)

    def explain() -> None:
        method(forward, case.layers).attribute(case.inputs, token=1)
        ended.set()

    def run() -> Tensor:
        assert begun.wait(SECONDS)
        runner.append(get_ident())
        return case.model(**case.inputs).last_hidden_state

    getattr(case.layers[0], kind)(hold)
    _, hidden = together(explain, run)
    assert torch.equal(hidden, expected)


# DataParallel: its module is explained, and a function that runs replicas in threads of their own is refused.


def test_module_of_several_devices() -> None:
    case = FAMILIES["bert"].build()
    parallel = nn.DataParallel(case.model)
    parallel.device_ids = [0, 1]  # as on two GPUs
    with pytest.warns(UserWarning, match="module is explained"):
        found = ValueZeroing(parallel, case.layers).attribute(case.inputs)
    assert_equal(found, ValueZeroing(case.model, case.layers).attribute(case.inputs))
