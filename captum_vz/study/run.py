"""Models x methods x examples, part after part, by this process, by those of a launcher, or by Ray.

Processes share the work by the locks of the folder, so they need not know each other.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from captum_vz import __version__
from captum_vz._files import remove_temporary
from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.methods import METHODS, given_methods
from captum_vz.methods.given import PLUGIN
from captum_vz.metrics.intervals import check_bootstrap
from captum_vz.study.examples import Example, as_examples
from captum_vz.study.folder import check_groups, claim, fingerprint, own_device
from captum_vz.study.folder.work import Job, check_model, check_model_weights
from captum_vz.study.results import Study, write_results
from captum_vz.study.scoring.identity import code_identity
from captum_vz.study.scoring.metrics import METRICS, given_metrics
from captum_vz.subjects import model_sources

#: The most examples of a part: what is computed again if a process is killed.
BLOCK: Final = 64
#: The most tokens in a batch.
BATCH_TOKENS: Final = 4096
#: What `engine` may be.
ENGINES: Final = ("local", "accelerate", "ray")
STAYS: Final = "Finished parts stay: start again with the same settings to continue."
#: How often Ray starts a worker again that dies.
RETRIES: Final = 3


def run_study(
    models: Any,
    examples: Any,
    output: str | Path,
    methods: Any = None,
    metrics: Any = None,
    *,
    batch_size: int = 32,
    content_only: bool = False,
    confidence: float = 0.95,
    resamples: int = 1999,
    engine: str | None = None,
    quiet: bool = False,
) -> Study:
    """Evaluates methods on examples with models. A killed study continues when it is started again.

    The examples are cut into parts of 64. After any interruption, a start with the same arguments computes the parts
    that are missing. The results equal the results of an uninterrupted study. An example that runs out of memory is
    skipped, and computed again at a new start. A file that was changed, or other weights, are an error.

    Any number of processes may call this function with the same arguments: a process claims a part by a lock, and takes
    over those of processes that have died. `accelerate launch` and `torchrun` start processes on the devices of a
    machine. They may run on several machines that share the folder.

    A study grows: a call with other models, methods, metrics or examples adds them to the folder, and computes only
    what is missing. The results are those of everything in the folder. Metrics that only read scores run no model. A
    method or a metric whose source has changed is computed again. Metrics that a model cannot have are left out for
    it, and its skipped examples say why.

    The folder holds ``study.json`` (the settings, the list of files, and what a reader needs to repeat the study),
    ``examples``, ``scores`` and ``values`` (Parquet files with rows), ``summary.csv``, ``differences.csv`` (of each
    pair of methods), ``skipped.csv`` and ``figures``.

    Args:
        models: What :func:`captum_vz.explain` takes: a name, a folder, a pair of a model and its tokenizer, a pipeline.
            Or several names, or a mapping from names to these, or to functions that return a model and its tokenizer.
            A model is moved to the device of the process, and back. Its weights are compared with those of the
            finished parts, even if no work is left. A function is called only if work is left.
        examples: The examples, :class:`~captum_vz.study.Example` objects or dictionaries of their attributes, a table
            of pyarrow, or a `datasets.Dataset`. Their ids are all different.
        output: The folder. It may hold a study with the same `content_only`, which then grows.
        methods: Names of :data:`~captum_vz.study.METHODS`, or methods of your own, see
            :func:`~captum_vz.study.as_method`. A method that fails costs its own rows, and the reason is recorded.
            None: :data:`~captum_vz.study.DEFAULT_METHODS`.
        metrics: Names, see :func:`~captum_vz.study.metric_named`, or a mapping from names to metrics of your own.
            None: cue alignment and blank-out.
        batch_size: The most sentences in a batch.
        content_only: See :class:`~captum_vz.study.Scorer`.
        confidence: The confidence level of the intervals in the summary, see :func:`~captum_vz.metrics.summarize`.
        resamples: The number of bootstrap resamples of the examples.
        engine: "local": this process. "accelerate": one of the processes of `accelerate launch` or `torchrun`, on a
            device of its own. "ray": a worker for each GPU, or each CPU if there is no GPU, of the cluster that
            `ray.init` has connected to, or of this machine. None: "accelerate" if several processes were launched,
            otherwise "local". All give the same rows.
        quiet: Whether there is no progress bar.

    Returns:
        The results: the `summary`, the `rows`, and the `skipped` examples with their reasons.

    Raises:
        ValueError: Unknown names; no examples or models; repeated ids; a model that can have none of the metrics; or a
            folder that holds a study with other settings or other weights, or a broken file.
        OSError: The folder cannot be written, or the disk is full. Finished parts stay.

    >>> import tempfile
    >>> from captum_vz.study import Example, run_study
    >>> from captum_vz.testbed import agreement_sentences, load_model
    >>> examples = [Example.from_record(record) for record in agreement_sentences(4)]
    >>> models, methods = {"agreement": load_model}, ["value-zeroing", "random"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run_study(models, examples, folder, methods, "cue_dot", quiet=True).summary
    >>> summary.query("layer == 3 and group == 'all'")[["method", "metric", "examples"]].values.tolist()
    [['value-zeroing', 'cue_dot', 4]]
    """
    models = model_sources(models)
    chosen, measures, examples = given_methods(methods), given_metrics(metrics), as_examples(examples)
    _check_examples(examples)
    fixed = {"captum_vz": __version__, "content_only": content_only}
    if not models or batch_size < 1:
        raise ValueError(f"models is {list(models)} and batch_size {batch_size}: pass at least 1 of each.")
    check_bootstrap(confidence, resamples)
    check_engine(engine)
    options = {"batch_size": batch_size, "batch_tokens": BATCH_TOKENS, "content_only": content_only}
    loaded = {name: source for name, source in models.items() if not callable(source)}
    for name, source in loaded.items():
        check_model(name, source, chosen, measures, options)
    folder = Path(output)
    code = {name: code_identity(one if one.source is None else one.source, one.version) for name, one in chosen.items()}
    measured = {name: code_identity(one.values, one.version) for name, one in measures.items()}
    blocks = claim(folder, fixed, list(models), code, measured, examples, BLOCK)
    for name, (model, tokenizer) in loaded.items():
        check_model_weights(folder, name, fingerprint(model, tokenizer))
    job = Job(folder, models, chosen, measures, {"methods": code, "metrics": measured}, blocks, options)
    total, checked = job.size_left(), _with_checked(job)
    with tqdm(total=total, unit="example", desc="study", disable=quiet or not total) as bar:
        if engine == "ray":
            run_on_ray(job, lambda left: bar.update(total - left - bar.n))
        else:
            checked.compute(own_device(), bar.update)
    remove_temporary(folder)
    write_results(folder, measures, confidence, resamples)
    return Study(folder)


def _with_checked(job: Job) -> Job:
    """The job, after all models that it must load were checked. The first of them stays loaded."""
    models = dict(job.models)
    for name, source in reversed(list(job.models.items())):
        if callable(source) and any(job.needs_model(one) for _, missing in job.left(name) for one in missing):
            loaded = source()
            check_model(name, loaded, job.methods, job.metrics, job.options)
            models = {**job.models, name: loaded}
    return job._replace(models=models)


def _check_examples(examples: Sequence[Example]) -> None:
    """Refuse examples that a summary would confuse."""
    if not examples:
        raise ValueError("examples is empty: pass at least one.")
    repeated = [id for id, count in Counter(example.id for example in examples).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} ids are used by several examples, such as {repeated[0]!r}: pass different ids."
        )
    check_groups(examples)


def check_engine(engine: str | None) -> None:
    """Refuse an engine that is unknown, or does not fit the number of processes that were launched."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if engine is not None and engine not in ENGINES:
        raise ArgumentError(f"engine is {engine!r}: pass one of {', '.join(map(repr, ENGINES))}.", "engine")
    if launched > 1 and engine in ("local", "ray"):
        raise ArgumentError(
            f"engine is {engine!r}, but {launched} processes were launched: pass 'accelerate', or launch one.", "engine"
        )


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
