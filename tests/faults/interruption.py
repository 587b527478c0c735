"""Raise an error at the n-th call that an action goes through, by a trace function.

Calls of this package count, and of the code that sets up for it: context managers, and torch's hooks and modes. Calls
by which a pass takes its changes back do not count: it is not promised what an error there leaves. Interruptions inside
the model's own code are raised by the model's functions.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.utils import hooks

import captum_vz

PACKAGE = str(Path(captum_vz.__file__).parent)
OTHERS = {contextlib.__file__, torch.overrides.__file__, grad_mode.__file__, hooks.__file__, torch.amp.__path__[0]}
# The code with which a pass takes its changes back.
UNDOING = contextlib.ExitStack.__exit__.__code__
# Calls here are made between two bytecodes. Only Ctrl-C can raise an error there, and no promise covers it.
EXIT = contextlib._GeneratorContextManager.__exit__.__code__
# Generators that may be closed before their end. Closing counts as a call, whose errors Python drops.
HALF_USED = {"<genexpr>", "_ancestors"}
Place = tuple[str, int]


class Tracer:
    """Traces an action, and raises `error` at the place with the number `at`. None: it counts the places.

    Attributes:
        places: The (file, line) of each place, in the order in which they were reached.
    """

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        self.at = at
        self.error = error
        self.places: list[Place] = []
        self.raised = False

    def run(self, action: Callable[[], Any]) -> Any:
        """Run the action. What it raises, and the error, pass through.

        No garbage is collected meanwhile: an error in a generator that is thrown away reaches nobody.
        """
        before = sys.gettrace()
        gc.disable()
        sys.settrace(self._call)
        try:
            return action()
        finally:
            sys.settrace(before)
            gc.enable()

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        counts = code.co_filename.startswith(PACKAGE) or code.co_filename in OTHERS
        if self.raised or not counts or code is EXIT or code.co_name in HALF_USED or _takes_back(frame):
            return
        self.places.append((code.co_filename, frame.f_lineno))
        if self.at == len(self.places) - 1 and self.error is not None:
            self.raised = True
            raise self.error


def _takes_back(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not UNDOING:
        frame = frame.f_back
    return frame is not None


def places_of(action: Callable[[], Any]) -> list[Place]:
    """The places that an action goes through."""
    tracer = Tracer()
    tracer.run(action)
    return tracer.places


def first_of_each(places: list[Place], count: int) -> list[int]:
    """Numbers of places to interrupt at: the first and the last of each line, `count` of them spread evenly."""
    first: dict[Place, int] = {}
    last: dict[Place, int] = {}
    for number, place in enumerate(places):
        first.setdefault(place, number)
        last[place] = number
    numbers = sorted({*first.values(), *last.values()})
    return numbers[:: max(1, len(numbers) // count)]
