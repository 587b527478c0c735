"""Many attributions leave the number of tensors, memory, threads and files flat. No global keeps a tensor."""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import suppress
from contextvars import copy_context
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.parameters import sampled
from tests.faults.models import SUBJECTS, Subject
from tests.faults.test_calls import FailAt, InterruptionError

FAST, SLOW = 6, 1000
MEMORY = 4 << 20  # bytes by which the memory of the process may waver


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


def files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def memory() -> int:
    """Bytes that the process holds."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("count", sampled([FAST, SLOW], FAST))
@pytest.mark.parametrize("name", SUBJECTS)
def test_many_attributions(name: str, count: int) -> None:
    subject = SUBJECTS[name]()
    for _ in range(max(3, count // 10)):
        subject.attribute()
    before = tensors(), threading.active_count(), files()
    grown: list[int] = []
    # The allocator takes a step now and then. A leak takes one each time.
    while len(grown) < 3 and min(grown, default=MEMORY) >= MEMORY:
        held = memory()
        for _ in range(count):
            subject.attribute()
        grown.append(memory() - held)
    assert (tensors(), threading.active_count(), files()) == before
    assert min(grown) < MEMORY, grown


@pytest.mark.parametrize("name", SUBJECTS)
def test_many_errors(name: str) -> None:
    subject = SUBJECTS[name]()
    with FailAt() as counting:
        subject.attribute()
    fail(subject, counting.count // 2)
    before = tensors()
    for place in range(1, counting.count, counting.count // 4):
        fail(subject, place)
    assert tensors() == before


def fail(subject: Subject, place: int) -> None:
    with suppress(InterruptionError), FailAt(place, InterruptionError()):
        subject.attribute()


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_global_keeps_a_tensor(name: str) -> None:
    SUBJECTS[name]().attribute()
    assert not kept()


def kept() -> set[str]:
    """The names of globals of this package, and of context variables, that hold tensors."""
    places: dict[str, Any] = {variable.name: value for variable, value in copy_context().items()}
    for name, module in sys.modules.items():
        if name.partition(".")[0] == "captum_vz":  # not the modules of users' files
            # Python keeps the last result of a doctest in its builtins.
            places |= {f"{name}.{key}": value for key, value in vars(module).items() if key != "__builtins__"}
    return {name for name, value in places.items() if holds_tensor(value)}


def holds_tensor(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (type, ModuleType)) or callable(value):
        return False
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple)) else []
    inner += list(getattr(value, "__dict__", {}).values())
    return any(holds_tensor(one, depth - 1) for one in inner)


def test_kept_tensors_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captum_vz._engine.taps.handler.held", [torch.zeros(1)], raising=False)
    assert kept() == {"captum_vz._engine.taps.handler.held"}
