"""Real signals at random moments: what Ctrl-C does, wherever the code is."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.engine.parameters import sampled
from tests.faults.models import SUBJECTS


@pytest.mark.parametrize(
    ("name", "count"),
    sampled([("transformers", 5), *((name, 60) for name in SUBJECTS)], ("transformers", 5)),
)
def test_signals_at_random_moments(name: str, count: int) -> None:
    """In a process of its own, because a late signal must not end the tests. It prints what is not as before."""
    command = [sys.executable, "-m", "tests.faults.signals", name, str(count), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    told = re.fullmatch(r"(\d+) interrupted, (\d+) left something that the next pass took back\n", done.stdout)
    assert told, done.stdout + done.stderr
    assert int(told[1]) == count
    assert int(told[2]) <= 1  # torch itself may put a mode back late
