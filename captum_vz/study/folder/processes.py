"""One process, or those of `accelerate launch` and `torchrun`, which share the work of a study and end together."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from uuid import uuid4

import torch

from captum_vz._files import TEMPORARY
from captum_vz.errors import ArgumentError, needs_extra

with needs_extra("captum_vz.study", "study"):
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env

T = TypeVar("T")

#: What `engine` may be.
ENGINES: Final = ("local", "accelerate", "ray")
STAYS: Final = "Finished shards stay: start again with the same settings to continue."


class StudyStoppedError(RuntimeError):
    """Another process of a study has failed, so this one stopped. Finished shards stay."""


class Processes:
    """The processes that run a study.

    Args:
        engine: One of :data:`ENGINES`. None: "accelerate" if several processes were launched, otherwise "local".

    Raises:
        ArgumentError: The engine is unknown, or does not fit the number of processes that were launched.
    """

    def __init__(self, engine: str | None = None) -> None:
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if engine is not None and engine not in ENGINES:
            raise ArgumentError(f"engine is {engine!r}: pass one of {', '.join(map(repr, ENGINES))}.")
        if launched > 1 and engine in ("local", "ray"):
            raise ArgumentError(
                f"engine is {engine!r}, but {launched} processes were launched: pass 'accelerate', or launch one."
            )
        state = _state()
        if launched != state.num_processes:
            raise RuntimeError(
                f"{launched} processes were launched, but accelerate shares work among {state.num_processes}: call "
                "run_study before any other use of accelerate, or create PartialState(cpu=True) for processes on CPUs."
            )
        self.device: torch.device = state.device
        self.index: int = state.process_index
        self.count: int = state.num_processes
        self._flag = self._broadcast(f".stopped-{uuid4().hex}.{socket.gethostname()}.{os.getpid()}{TEMPORARY}")

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes the results."""
        return self.index == 0

    def once(self, do: Callable[[], T]) -> T:
        """What the main process gets from `do`, in all processes. All raise its error."""
        found: Any = None
        if self.is_main:
            try:
                found = do()
            except Exception as error:
                if self.count == 1:
                    raise
                found = portable(error)
        found = self._broadcast(found)
        if isinstance(found, Exception):
            raise found
        return found

    def each(self, folder: Path, do: Callable[[Callable[[], None]], T]) -> T:
        """Let each process do its share. If one fails, the others stop after the shard that they compute.

        Args:
            folder: The folder that all processes see.
            do: Does the share of this process. It gets a function to call before each shard, which raises an error if
                another process has failed.

        Raises:
            StudyStoppedError: Another process has failed or ended.
        """
        if self.count == 1:
            return do(lambda: None)
        flag, failed, found = folder / self._flag, None, None
        try:
            with self._told_to_end():
                found = do(lambda: self._stop_if(flag))
        except StudyStoppedError:  # the process that failed says why, below
            pass
        except Exception as error:
            failed = error
            told = f"{self} failed, and waits until the others have finished their shards: {_line(error)}"
            print(f"captum-vz: {told}", file=sys.stderr, flush=True)
            with suppress(OSError):  # then the others find out at the end of their shares
                flag.touch()
        with self._talking(failed):
            reasons: list[str | None] = gather_object([None if failed is None else _line(failed)])
        if self.is_main:
            flag.unlink(missing_ok=True)
        if failed is not None:
            raise failed
        for index, reason in enumerate(reasons):
            if reason is not None:
                raise StudyStoppedError(f"{self} stopped, because process {index + 1} failed ({reason}). {STAYS}")
        return cast(T, found)

    def __str__(self) -> str:
        """Such as "process 2 of 4"."""
        return f"process {self.index + 1} of {self.count}"

    def _stop_if(self, flag: Path) -> None:
        if flag.exists():
            raise StudyStoppedError(f"{self} stopped, because another process failed. {STAYS}")

    def _broadcast(self, found: T) -> T:
        """What the main process passes, in all processes."""
        held = [found]
        with self._talking():
            broadcast_object_list(held)
        return held[0]

    @contextmanager
    def _talking(self, failed: Exception | None = None) -> Iterator[None]:
        """Say in one line that another process is gone, or raise the own error `failed`."""
        try:
            yield
        except RuntimeError as error:  # of the library that connects the processes
            if failed is not None:
                raise failed from None
            why = "another process ended without a word; it may have been killed, or have run out of memory"
            raise StudyStoppedError(f"{self} stopped, because {why}. {STAYS}") from error

    @contextmanager
    def _told_to_end(self) -> Iterator[None]:
        """Say in one line why the process ends, if the launcher ends it."""

        def end(*_: Any) -> None:
            print(f"captum-vz: {self} was told to end by its launcher. {STAYS}", file=sys.stderr, flush=True)
            raise SystemExit(128 + signal.SIGTERM)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def own_device() -> torch.device:
    """The device of this process, as accelerate chooses it."""
    device: torch.device = _state().device
    return device


def _state() -> Any:
    # Rollouts are products in float64, which Apple's GPUs do not support. Accelerate must be asked to use CPUs.
    has_gpu = torch.cuda.is_available() or torch.xpu.is_available()
    cpu = not has_gpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    return PartialState(cpu=cpu, timeout=timedelta(days=30))  # some processes wait long for others at the end


def _line(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def portable(error: Exception) -> Exception:
    """An error that can be sent to other processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any class may fail to be copied
        return RuntimeError(_line(error))
    return error
