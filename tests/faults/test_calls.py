"""An error at the n-th call of a function reaches the user, and leaves the model, torch and the thread as they were.

The errors take turns. The exhaustive part tries the first and the last call of each line. Every call with every error
takes more than an hour:
`CAPTUM_VZ_EVERY_CALL=1 pytest -m exhaustive tests/faults/test_calls.py -k test_error_at_a_call`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from captum_vz._engine.taps import changes
from captum_vz.errors import RefusedError
from tests.engine.parameters import sampled
from tests.faults.interruption import Tracer, first_of_each, places_of
from tests.faults.models import SUBJECTS
from tests.faults.state import differences, state_of

FAST, SLOW = 12, 400  # places of each subject; no subject has more lines
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
# Functions by which the pickler copies a layer's state. An error there is like one of the state's own code: no copy.
COPIERS: Any = (changes._Copier.persistent_id, changes._Loader.persistent_load)
COPYING = {(changes.__file__, one.__code__.co_firstlineno) for one in COPIERS}


class InterruptionError(Exception):
    """An error that no code but the tests' knows."""


ERRORS = {"error": InterruptionError, "Ctrl-C": KeyboardInterrupt, "memory": torch.OutOfMemoryError}


class FailAt(TorchFunctionMode):
    """Raises an error at the n-th function of torch that is called by name. It counts all of them without an error."""

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.at = at
        self.error = error
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:  # a setting, which cannot fail: no cleaning up could stand it
            return func(*args, **(kwargs or {}))
        self.count += 1
        if self.error is not None and self.count == self.at:
            raise self.error
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", sampled([FAST, SLOW], FAST))
@pytest.mark.parametrize("name", SUBJECTS)
def test_error_at_a_call(name: str, count: int) -> None:
    """If memory is short, or state is copied, the attribution may go on: its numbers are those without the error."""
    subject = SUBJECTS[name]()
    expected, before = subject.scores(), state_of(subject.model)
    places = places_of(subject.attribute)
    tried = list(zip(first_of_each(places, count), cycle(ERRORS), strict=False))
    if count == SLOW and "CAPTUM_VZ_EVERY_CALL" in os.environ:
        tried = list(product(range(len(places)), ERRORS))
    for place, kind in tried:
        tracer = Tracer(place, ERRORS[kind]())
        found = None
        try:
            found = tracer.run(subject.scores)
        except ERRORS[kind]:
            pass
        except RefusedError:
            # Memory is never short where a mode is entered or left. If it is there, the replays do not hold.
            assert kind == "memory"
        assert not differences(before, state_of(subject.model)), tracer.places[-1]
        goes_on = kind == "memory" or (kind == "error" and tracer.places[-1] in COPYING)
        assert found is None or (goes_on and equal(found, expected)), tracer.places[-1]
    assert equal(subject.scores(), expected)


@pytest.mark.parametrize("most", sampled([18, 400], 18))
@pytest.mark.parametrize("name", SUBJECTS)
def test_error_in_a_function_of_torch(name: str, most: int) -> None:
    subject = SUBJECTS[name]()
    with FailAt() as counting:
        expected = subject.scores()
    before = state_of(subject.model)
    # "by name" calls torch thousands of times: about as many as `most` of these places are tried.
    places = range(1, counting.count + 1, max(3, counting.count // most))
    for place, kind in zip(places, cycle((*ERRORS, "memory of a CPU")), strict=False):
        error = RuntimeError(NO_MEMORY) if kind == "memory of a CPU" else ERRORS[kind]("no memory")
        found = None
        with suppress(type(error)), FailAt(place, error):
            found = subject.scores()
        assert not differences(before, state_of(subject.model)), place
        assert found is None or (kind.startswith("memory") and equal(found, expected)), place


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Equal up to the rounding of another chunk size."""
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(found, expected, strict=True))
