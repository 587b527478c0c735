"""Interrupt attributions by real signals at random moments. Run by `test_signals`, in a process of its own.

`python -m tests.faults.signals SUBJECT COUNT SEED` interrupts COUNT attributions, and prints what an interruption left,
a line each. An attribution may end before its signal, more often on a busy machine: it does not count.
"""

from __future__ import annotations

import random
import signal
import sys
import time
import warnings
from statistics import median

import torch

from tests.faults.models import SUBJECTS, Subject
from tests.faults.state import differences, state_of


def interrupted(subject: Subject, after: float) -> bool:
    """Run the attribution. Return whether the timer's signal, `after` seconds from now, ended it."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after)
            subject.attribute()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def seconds_of(subject: Subject) -> float:
    """How long one attribution takes."""
    begin = time.perf_counter()
    subject.scores()
    return time.perf_counter() - begin


def main(name: str, count: int, seed: int) -> int:
    """Interrupt `count` attributions, and check after each that the model computes as before."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C does
    warnings.simplefilter("ignore")
    draw = random.Random(seed)
    subject = SUBJECTS[name]()
    output, expected = subject.run(), subject.scores()
    seconds = median(seconds_of(subject) for _ in range(5))
    before = state_of(subject.model)
    number = left = 0
    while number < count:
        number += interrupted(subject, max(1e-6, draw.uniform(0, 1.1) * seconds))
        left += bool(differences(before, state_of(subject.model)))
        if not torch.equal(subject.run(), output):
            print("the model computes other numbers")
        if not all(torch.equal(one, other) for one, other in zip(subject.scores(), expected, strict=True)):
            print("the next scores are others")
        if found := differences(before, state_of(subject.model)):
            print("after the next pass:", found)
            before = state_of(subject.model)
    print(number, "interrupted,", left, "left something that the next pass took back")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
