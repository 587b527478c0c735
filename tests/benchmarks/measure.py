"""Seconds and bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def medians(
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each contender. Every round runs all of them, in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for run in contenders.values():
            run()  # warm up caches and allocators
        for number in range(rounds):
            names = list(contenders) if number % 2 == 0 else list(reversed(contenders))
            for name in names:
                synchronize(device)
                start = clock()
                contenders[name]()
                synchronize(device)
                times[name].append(clock() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def operations(run: Callable[[], Any]) -> int:
    """The number of floating-point operations of `run`, counted by torch."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def peak_bytes(run: Callable[[], Any], device: str) -> int | None:
    """Peak memory during `run`, minus the memory in use before it. None if this system does not report it."""
    with torch.no_grad():
        if device != "cpu":
            synchronize(device)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            return torch.cuda.max_memory_allocated() - before
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak resident size
        except OSError:
            return None
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def synchronize(device: str) -> None:
    """Wait until the device has done its work, because a call returns before that."""
    if device != "cpu":
        torch.cuda.synchronize()
