"""What starts the processes of a study: this process, `accelerate launch` and `torchrun`, or Ray.

They share the work by the locks of the folder, so they need not know each other.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final

import torch

from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.methods.given import PLUGIN
from captum_vz.methods.registry import METHODS
from captum_vz.study.folder.work import Job
from captum_vz.study.scoring.metrics import METRICS

#: What `engine` may be.
ENGINES: Final = ("local", "accelerate", "ray")
STAYS: Final = "Finished parts stay: start again with the same settings to continue."
#: How often Ray starts a worker again that dies.
RETRIES: Final = 3


def check_engine(engine: str | None) -> None:
    """Refuse an engine that is unknown, or does not fit the number of processes that were launched."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if engine is not None and engine not in ENGINES:
        raise ArgumentError(f"engine is {engine!r}: pass one of {', '.join(map(repr, ENGINES))}.", "engine")
    if launched > 1 and engine in ("local", "ray"):
        raise ArgumentError(
            f"engine is {engine!r}, but {launched} processes were launched: pass 'accelerate', or launch one.", "engine"
        )


def own_device() -> torch.device:
    """The device of this process, of those that a launcher started on this machine."""
    # Rollouts are products in float64, which Apple's GPUs do not support.
    kind = next((one for one in ("cuda", "xpu") if getattr(torch, one).is_available()), "cpu")
    if kind == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % getattr(torch, kind).device_count())


def run_on_ray(job: Job, show: Callable[[int], object]) -> None:
    """Compute a job by a worker on each device of a Ray cluster. Without GPUs, each CPU is a device.

    A worker that dies starts again, and takes what is left. If Ray is not running in this process, it is started on
    this machine, and stopped at the end.

    Args:
        job: The job. All machines must see its folder. The functions in it are sent to the workers.
        show: Called with the number of examples that are left, now and then.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        RuntimeError: Ray cannot be started, or fails, or a worker has died too often.
    """
    with needs_extra("engine='ray'", "ray"):
        ray: Any = import_module("ray")
    left = sum(len(list(job.left(model))) for model in job.models)
    if not left:
        return
    with _cluster(ray):
        has = ray.cluster_resources()
        gpus = int(has.get("GPU", 0))
        worker = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=RETRIES)(_work)
        packed = _packed(ray, job)
        running = [worker.remote(packed) for _ in range(min(left, gpus or int(has.get("CPU", 1))))]
        try:
            while running:
                done, running = ray.wait(running, timeout=2)
                show(job.size_left())
                for error in filter(None, ray.get(done)):
                    raise pickle.loads(error)
        except ray.exceptions.RayError as error:
            told = f"Ray failed ({type(error).__name__}); a worker may have run out of memory"
            raise RuntimeError(f"{told}. {STAYS}") from error


def _work(packed: bytes) -> bytes | None:
    """Do a job in a worker of Ray, and return its error, which is raised where the study was called."""
    job, methods, metrics, where = pickle.loads(packed)
    with suppress(OSError):  # names of files may be relative
        os.chdir(where)
    # A copy of a registered method is not that method, so a method of the package is looked up here.
    job = job._replace(
        methods={name: METHODS[name] if name in methods else one for name, one in job.methods.items()},
        metrics={name: METRICS[name] if name in metrics else one for name, one in job.metrics.items()},
    )
    try:
        job.compute(own_device(), lambda count: None)
    except Exception as error:
        try:
            pickle.loads(found := pickle.dumps(error))
        except Exception:  # any class may fail to be copied
            found = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return found
    return None


@contextmanager
def _cluster(ray: Any) -> Iterator[None]:
    """Ray, which is stopped at the end if it was started here."""
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        except Exception as error:  # Ray raises plain exceptions
            ray.shutdown()
            raise RuntimeError(f"Ray cannot be started on this machine: {error}") from error
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def _packed(ray: Any, job: Job) -> bytes:
    """A job as bytes. The functions of plugins go with their code, because workers cannot import a plugin."""
    plugins = [module for name, module in sys.modules.items() if name.startswith(PLUGIN)]
    for module in plugins:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        registered = _registered(job.methods, METHODS), _registered(job.metrics, METRICS)
        packed: bytes = ray.cloudpickle.dumps((job, *registered, os.getcwd()))
    finally:
        for module in plugins:
            ray.cloudpickle.unregister_pickle_by_value(module)
    return packed


def _registered(given: Mapping[str, Any], registry: Mapping[str, Any]) -> set[str]:
    """The names of what is this package's."""
    return {name for name, one in given.items() if not one.own and registry.get(name) is one}
