"""The work of a study on Ray Data: one actor for each device, which streams blocks of examples."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final

from captum_vz._files import TEMPORARY
from captum_vz.errors import needs_extra
from captum_vz.study.folder.processes import STAYS, own_device, portable
from captum_vz.study.folder.storage import Source, on_device
from captum_vz.study.folder.work import Plan, Work, Worker
from captum_vz.study.methods import METHODS
from captum_vz.study.scoring.given import PLUGIN
from captum_vz.study.scoring.metrics import METRICS

#: How often a block is begun, if its worker dies.
TRIES: Final = 4


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
