"""Seconds and bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def medians(contenders: Mapping[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each contender, all of them run in every round, in an order that alternates."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for run in contenders.values():
            run()  # warms caches and allocators
        for number in range(rounds):
            names = list(contenders) if number % 2 == 0 else list(reversed(contenders))
            for name in names:
                synchronize(device)
                start = time.perf_counter()
                contenders[name]()
                synchronize(device)
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def operations(run: Callable[[], Any]) -> int:
    """How many floating-point operations `run` takes, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def peak_bytes(run: Callable[[], Any], device: str) -> int | None:
    """How much more memory was in use at the highest moment of `run` than before it; None where it cannot be told."""
    with torch.no_grad():
        if device != "cpu":
            synchronize(device)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            return torch.cuda.max_memory_allocated() - before
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the highest resident size so far
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
    """Wait for the device: its work is queued, not done, when a call returns."""
    if device != "cpu":
        torch.cuda.synchronize()
