"""What runs the work of a study: one process; those of `accelerate launch` and `torchrun`; or actors on Ray Data.

The processes of a launcher share the work and end together. On Ray, an actor on each device streams blocks of examples.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from uuid import uuid4

import torch

from captum_vz._files import TEMPORARY
from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.methods.given import PLUGIN
from captum_vz.methods.registry import METHODS
from captum_vz.study.folder import Source, on_device
from captum_vz.study.folder.work import Plan, Work, Worker
from captum_vz.study.scoring.metrics import METRICS

with needs_extra("captum_vz.study", "study"):
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env

T = TypeVar("T")

#: What `engine` may be.
ENGINES: Final = ("local", "accelerate", "ray")
STAYS: Final = "Finished shards stay: start again with the same settings to continue."
#: How often Ray begins a block, if its worker dies.
TRIES: Final = 4


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


def run_on_ray(
    plan: Plan,
    left: Sequence[Work],
    models: Mapping[str, Source],
    options: Mapping[str, Any],
    advance: Callable[[int], object],
) -> None:
    """Compute the missing parts of a study, one block of one model after the other, on all devices of a Ray cluster.

    Without GPUs, each CPU is a device. A block whose worker dies runs again, at most three times. If Ray is not running
    in this process, it is started on this machine, and stopped at the end.

    Args:
        plan: The plan. The workers write to its folder, so all machines must see it.
        left: The work.
        models: For each name the model, or what loads it. The functions of all arguments are sent to the workers.
        options: Further arguments of :class:`~captum_vz.study.Scorer`.
        advance: Called with the number of examples of each finished block.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        RuntimeError: Ray cannot be started, or fails, or a worker has died too often at one block.
    """
    if not left:
        return
    with _cluster() as ray:
        has = ray.cluster_resources()
        gpus = int(has.get("GPU", 0))
        count = min(len(left), gpus or int(has.get("CPU", 1)))
        ray.data.DataContext.get_current().enable_progress_bars = False
        blocks = ray.data.from_items([{"work": place} for place in range(len(left))], override_num_blocks=len(left))
        own = _own(plan.methods, METHODS), _own(plan.metrics, METRICS)
        notes = f".{socket.gethostname()}.{os.getpid()}{TEMPORARY}"  # as `remove_temporary` finds them
        done = blocks.map_batches(
            _Blocks,
            fn_constructor_args=(
                _packed(ray, (plan, list(left), dict(models), dict(options), own, notes, os.getcwd())),
            ),
            batch_size=1,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=1),
            num_cpus=1,
            num_gpus=1 if gpus else 0,
        )
        try:
            for row in done.iter_rows():
                if row["error"]:
                    raise pickle.loads(row["error"])
                advance(int(row["examples"]))
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"Ray failed ({type(error).__name__}). {STAYS}") from error


class _Blocks:
    """The worker of one device. It keeps a model until a block of another one comes."""

    def __init__(self, packed: bytes) -> None:
        self.plan, self.left, self.models, self.options, own, self.notes, where = pickle.loads(packed)
        with suppress(OSError):  # names of files may be relative
            os.chdir(where)
        # A copy of a registered method is not that method, so a method of the package is looked up here.
        self.plan.methods = {name: one if name in own[0] else METHODS[name] for name, one in self.plan.methods.items()}
        self.plan.metrics = {name: one if name in own[1] else METRICS[name] for name, one in self.plan.metrics.items()}
        self.stack = ExitStack()
        self.worker: Worker | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"examples": [], "error": []}
        for place in batch["work"]:
            work: Work = self.left[int(place)]
            error = b""
            try:
                with self._begun(int(place), work):
                    self._worker(work.model).do(work, lambda count: None)
            except Exception as raised:  # an error of the study is raised where the study was called
                error = pickle.dumps(portable(raised))
            found["examples"].append(work.block.size)
            found["error"].append(error)
        return found

    @contextmanager
    def _begun(self, place: int, work: Work) -> Iterator[None]:
        """Note that a block is begun. The note stays if this process dies: Ray would begin the block again forever."""
        note = self.plan.folder / f".begun-{place}{self.notes}"
        with open(note, "ab") as file:
            file.write(b".")
        if note.stat().st_size > TRIES:
            note.unlink()
            raise RuntimeError(
                f"workers of Ray died {TRIES} times while they computed shard {work.block.number} of {work.model!r}; "
                f"they may have run out of memory. {STAYS}"
            )
        try:
            yield
        finally:
            note.unlink(missing_ok=True)

    def _worker(self, model: str) -> Worker:
        if self.worker is None or self.worker.model != model:
            self.stack.close()
            load = partial(self.stack.enter_context, on_device(self.models[model], own_device()))
            self.worker = Worker(self.plan, model, load, self.options)
        return self.worker


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, which is stopped at the end if it was started here."""
    with needs_extra("engine='ray'", "ray"):
        import ray
        import ray.data
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        except Exception as error:  # Ray raises plain exceptions
            ray.shutdown()
            raise RuntimeError(f"Ray cannot be started on this machine: {error}") from error
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def _own(given: Mapping[str, Any], registered: Mapping[str, Any]) -> set[str]:
    """The names of what is not this package's."""
    return {name for name, one in given.items() if one.own or registered.get(name) is not one}


def _packed(ray: Any, things: Any) -> bytes:
    """Objects as bytes. The functions of plugins go with their code, because workers cannot import a plugin."""
    plugins = [module for name, module in sys.modules.items() if name.startswith(PLUGIN)]
    for module in plugins:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = ray.cloudpickle.dumps(things)
    finally:
        for module in plugins:
            ray.cloudpickle.unregister_pickle_by_value(module)
    return packed
