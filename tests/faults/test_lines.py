"""An interruption at any line leaves the model, torch and the thread as they were."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from captum_vz._engine.capture.records import Recorder
from captum_vz._engine.taps import changes
from captum_vz._engine.taps.functions import _Mode as SdpaMode
from captum_vz._engine.taps.projection import ParameterProjectionMode
from captum_vz._private import function_mode_state, pop_function_mode, push_function_mode, without_function_modes
from tests.engine.parameters import sampled
from tests.faults.interruption import Tracer, first_of_each, places_of
from tests.faults.models import SUBJECTS
from tests.faults.state import differences, state_of

FAST, SLOW = 25, 300  # places of each subject


@pytest.mark.parametrize("count", sampled([FAST, SLOW], FAST))
@pytest.mark.parametrize("name", SUBJECTS)
def test_interruption_at_a_line(name: str, count: int) -> None:
    subject = SUBJECTS[name]()
    expected, before = subject.scores(), state_of(subject.model)
    output = subject.run()
    for place in first_of_each(places_of("line", subject.attribute), count):
        tracer = Tracer("line", place, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            tracer.run(subject.attribute)
        assert not differences(before, state_of(subject.model)), tracer.places[-1]
    assert torch.equal(subject.run(), output)
    assert all(torch.equal(one, other) for one, other in zip(subject.scores(), expected, strict=True))


def test_lock_that_an_interruption_leaves_with_a_thread() -> None:
    """An interruption may come when a block ends and before its exit is called. Other threads would wait for good."""
    subject = SUBJECTS["torch"]()
    changes._lock.acquire()
    subject.attribute()
    other = Thread(target=subject.attribute, daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()


def test_interruption_before_function_modes_are_switched_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when a block ends and before its exit is called. Attention would be unseen from then on."""
    subject, enabled = SUBJECTS["torch"](), function_mode_state()
    expected = subject.scores()

    def interrupted(*args: Any, **kwargs: Any) -> None:
        without_function_modes().__enter__()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_attention", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subject.attribute()
    assert function_mode_state() == enabled
    assert all(torch.equal(one, other) for one, other in zip(subject.scores(), expected, strict=True))


@pytest.mark.parametrize("place", range(10))
def test_hooks_are_removed_after_an_interruption(place: int) -> None:
    """torch keeps what it knows of a hook in several dicts. None of them keeps anything of ours."""
    pops = iter(range(10))

    class Table(dict[int, Any]):
        def pop(self, *args: Any) -> Any:
            if next(pops, None) == place:
                raise KeyboardInterrupt
            return super().pop(*args)

    first, second = (lambda: None), (lambda: None)
    held = {1: first, 3: print}, {1: True, 3: True}, {2: second}, {2: True}, {1: 0}
    tables = tuple(map(Table, held))
    with pytest.raises(KeyboardInterrupt):
        changes._remove_hooks(tables, [first, second])
    changes._remove_hooks(tables, [first, second])
    assert tables == ({3: print}, {3: True}, {}, {}, {})


@pytest.mark.parametrize("mode", [ParameterProjectionMode(), ParameterProjectionMode(named=True), SdpaMode()])
def test_mode_that_torch_puts_back_late(mode: TorchFunctionMode) -> None:
    """torch takes a mode off while it handles a function. Interrupted there, it may put it back at any time."""
    subject = SUBJECTS["inline"]()
    output, expected = subject.run(), subject.scores()
    push_function_mode(mode)
    try:
        assert torch.equal(subject.run(), output)
        assert all(torch.equal(one, other) for one, other in zip(subject.scores(), expected, strict=True))
        assert not _get_current_function_mode_stack()
    finally:
        while _get_current_function_mode_stack():
            pop_function_mode()
