"""Models x methods x examples, part after part: by this process, by processes of a launcher, or by Ray.

Processes claim a missing part by a lock of its file in the folder, so they need not know each other.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tqdm import tqdm

from captum_vz._files import remove_temporary
from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.methods import METHODS, Method, given_methods
from captum_vz.methods.given import PLUGIN
from captum_vz.metrics.intervals import check_bootstrap
from captum_vz.study import folder as store
from captum_vz.study.examples import Example, as_examples
from captum_vz.study.folder import Block, code_identity, made_by
from captum_vz.study.folder.tables import SCORES, Lacking, add_rows, is_held, part_of, read_table
from captum_vz.study.results import Study, write_results
from captum_vz.study.scoring import Metric, Row, measure, skipped_row
from captum_vz.study.scoring.metrics import METRICS, given_metrics, lacks
from captum_vz.study.scoring.scorer import Scorer
from captum_vz.subjects import model_sources

with needs_extra("captum_vz.study", "study"):
    from filelock import Timeout

BLOCK: Final = 64  #: the most examples of a part: what is computed again if a process is killed
ENGINES: Final = ("local", "accelerate", "ray")  #: what `engine` may be
RETRIES: Final = 3  #: how often Ray starts a worker again that dies
#: A scorer of a model, and what its parts record: the digest of its weights, and what made them.
Ready = tuple[Scorer, dict[str, Any]]


def run_study(
    models: Any,
    examples: Any,
    output: str | Path,
    methods: Any = None,
    metrics: Any = None,
    *,
    tokenizer: Any = None,
    batch_size: int = 32,
    confidence: float = 0.95,
    resamples: int = 1999,
    engine: str | None = None,
    quiet: bool = False,
) -> Study:
    """Evaluates methods on examples with models. A killed study continues when it is started again.

    The examples are cut into parts of 64. After any interruption, a start with the same arguments computes the parts
    that are missing. The results equal the results of an uninterrupted study. An example that runs out of memory is
    skipped, and computed again at a new start. A file that was changed, or other weights, are an error.

    Any number of processes may call this function with the same arguments, also on machines that share the folder: a
    process claims a part by a lock, and takes over parts of processes that have died.

    A study grows: a call with other models, methods, metrics or examples adds them to the folder, and computes only
    what is missing. The results cover everything in the folder. Metrics that only read scores run no model. A
    method or a metric whose source has changed is computed again. Metrics that a model cannot have are left out for
    it, and its skipped examples say why. If a method fails, only its own rows are missing, and the reason is recorded.

    The folder holds ``study.json`` (the settings, the list of files, and what a reader needs to repeat the study),
    ``examples``, ``scores`` and ``values`` (Parquet files with rows), ``summary.csv``, ``differences.csv`` (of each
    pair of methods), ``skipped.csv`` and ``figures``.

    Args:
        models: What :func:`captum_vz.explain` takes, several names, or a mapping from names to these, or to functions
            that return a model and its tokenizer, which are called only if work is left. A model is moved to the device
            of the process, and back. Its weights are compared with the weights of the finished parts.
        examples: :class:`~captum_vz.study.Example` objects or dictionaries of their attributes, a table of pyarrow, or
            a `datasets.Dataset`. Their ids are all different.
        output: The folder. It may hold a study, which then grows.
        methods: See :class:`~captum_vz.study.Scorer`, like `metrics`.
        metrics: Names, see :func:`~captum_vz.study.metric_named`, or a mapping from names to metrics of your own.
        tokenizer: The tokenizer, if `models` is one model.
        batch_size: The most sentences in a batch.
        confidence: The confidence level of the intervals in the summary, see :func:`~captum_vz.metrics.summarize`.
        resamples: The number of bootstrap resamples of the examples.
        engine: "local": this process. "accelerate": one of the processes of `accelerate launch` or `torchrun`, on a
            device of its own. "ray": a worker for each GPU, or each CPU if there is no GPU, of the cluster that
            `ray.init` has connected to, or of this machine. None: "accelerate" if several processes were launched,
            otherwise "local". All give the same rows.
        quiet: Whether there is no progress bar.

    Raises:
        ValueError: Unknown names; no examples or models; repeated ids; a model that can have none of the metrics; or a
            folder that holds a study of another version or with other weights, or a broken file.
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
    models = model_sources(models if tokenizer is None else (models, tokenizer))
    chosen, measures, examples = given_methods(methods), given_metrics(metrics), as_examples(examples)
    if not models or batch_size < 1:
        raise ValueError(f"models is {list(models)} and batch_size {batch_size}: pass at least 1 of each.")
    if not examples:
        raise ValueError("examples is empty: pass at least one.")
    repeated = [id for id, count in Counter(example.id for example in examples).items() if count > 1]
    if repeated:
        raise ValueError(f"ids are used by several examples, such as {repeated[0]!r}: pass different ids.")
    store.check_groups(examples)
    check_bootstrap(confidence, resamples)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if engine not in (None, *ENGINES):
        raise ArgumentError(f"engine is {engine!r}: pass one of {', '.join(map(repr, ENGINES))}.", "engine")
    if launched > 1 and engine in ("local", "ray"):
        raise ArgumentError(
            f"engine is {engine!r}, but {launched} processes were launched: pass 'accelerate', or launch one.", "engine"
        )
    folder = Path(output)
    sources = {name: one if one.source is None else one.source for name, one in chosen.items()}
    codes = {
        "methods": {name: code_identity(sources[name], one.version) for name, one in chosen.items()},
        "metrics": {name: code_identity(one.values, one.version) for name, one in measures.items()},
    }
    job = Job(folder, models, chosen, measures, codes, [], batch_size)
    loaded = {name: source for name, source in models.items() if not callable(source)}
    for name, source in loaded.items():
        job.scorer(name, source)  # an error, before the folder is written
    job = job._replace(blocks=store.claim(folder, models, codes, examples, BLOCK))
    for name, (model, tokenizer) in loaded.items():
        store.check_weights(folder, job.read(), name, store.fingerprint(model, tokenizer))
    total, checked = job.size_left(), job.checked()
    with tqdm(total=total, unit="example", desc="study", disable=quiet or not total) as bar:
        if engine == "ray":
            _run_on_ray(job, lambda left: bar.update(total - left - bar.n))
        else:
            checked.compute(store.own_device(), bar.update)
    remove_temporary(folder)
    write_results(folder, measures, confidence, resamples)
    return Study(folder)


class Job(NamedTuple):
    """What a start of a study wants: rows of models, methods and metrics for some blocks of examples.

    `codes` are the identities of the code, of "methods" and "metrics".
    """

    folder: Path
    models: Mapping[str, store.Source]
    methods: Mapping[str, Method]
    metrics: Mapping[str, Metric]
    codes: Mapping[str, Mapping[str, str]]
    blocks: list[Block]
    batch_size: int

    def read(self) -> dict[str, Any]:
        """The settings of the folder, with the code of this job: another start may have other code for a name."""
        settings = store.read_settings(self.folder)
        return settings | {name: settings[name] | codes for name, codes in self.codes.items()}

    def missing(self, settings: Mapping[str, Any], model: str, block: Block) -> Lacking:
        """What the folder lacks of one model and one block. What ran out of memory is computed again."""
        part = part_of(self.folder, settings, model, block)

        def is_left(method: str, metric: str) -> bool:
            return part is None or not is_held(settings, part, method, metric) or [method, metric] in part["again"]

        lacking: dict[str, tuple[str, ...]] = {}
        for method in self.methods:
            every = is_left(method, SCORES)
            some = tuple(metric for metric in (SCORES, *self.metrics) if every or is_left(method, metric))
            lacking |= {method: some} if some else {}
        return lacking

    def left(self, model: str) -> list[Block]:
        """The blocks of a model that lack something."""
        settings = self.read()
        return [block for block in self.blocks if self.missing(settings, model, block)]

    def size_left(self) -> int:
        """The number of examples in blocks that lack something, over all models."""
        return sum(block.size for model in self.models for block in self.left(model))

    def runs(self, lacking: Lacking) -> bool:
        """Whether the model runs for what is missing."""
        return any(name == SCORES or self.metrics[name].needs_model for names in lacking.values() for name in names)

    def checked(self) -> Job:
        """The job, after all models that have to run were checked: none stops it later. The first one stays loaded."""
        settings, models = self.read(), dict(self.models)
        for name, source in reversed(list(self.models.items())):
            if callable(source) and any(self.runs(self.missing(settings, name, one)) for one in self.left(name)):
                loaded = source()
                self.scorer(name, loaded)
                models = {**self.models, name: loaded}
        return self._replace(models=models)

    def compute(self, device: torch.device, advance: Callable[[int], object]) -> None:
        """Compute what is missing. What other processes compute comes last: it is awaited, or taken from a dead one."""
        left = {model: self.left(model) for model in self.models}
        for timeout in (0, -1):
            for model, blocks in left.items():
                with ExitStack() as stack:
                    load = cache(partial(self._load, model, device, stack))
                    left[model] = [one for one in blocks if not self._do(model, one, load, advance, timeout)]

    def scorer(self, name: str, loaded: store.Loaded) -> Scorer:
        """A scorer of the methods. A model in train mode, or one that can have none of the metrics, is refused."""
        without = self.without(loaded)
        if len(without) == len(self.metrics):
            raise ValueError(
                f"model {name!r} can have none of the metrics {', '.join(without)}: {next(iter(without.values()))}. "
                "Pass other metrics, such as cue_dot and cue_ap."
            )
        return Scorer(*loaded, self.methods, "cue_dot", batch_size=self.batch_size)

    def without(self, loaded: store.Loaded) -> dict[str, str]:
        """The metrics that a model cannot have, with the reasons."""
        return {name: reason for name, metric in self.metrics.items() if (reason := lacks(metric, *loaded))}

    def _load(self, model: str, device: torch.device, stack: ExitStack) -> Ready:
        """A model on a device, and back on its own at the end of the stack."""
        source = self.models[model]
        loaded, tokenizer = source() if callable(source) else source
        stack.callback(loaded.to, loaded.device)
        loaded.to(device)
        scorer, maker = self.scorer(model, (loaded, tokenizer)), made_by(loaded)
        weights = store.fingerprint(loaded, tokenizer, maker["weights"])
        store.check_weights(self.folder, self.read(), model, weights)
        return scorer, {"weights": weights, "made_by": maker}

    def _do(
        self, model: str, block: Block, load: Callable[[], Ready], advance: Callable[[int], object], timeout: float
    ) -> bool:
        """Compute what one block lacks; False if another process holds it for longer than `timeout`."""
        try:
            with store.lock_of(self.folder, store.stem_of(self.read(), model, block)).acquire(timeout=timeout):
                settings = self.read()  # another process may have computed it
                lacking = self.missing(settings, model, block)
                methods = [method for method, names in lacking.items() if SCORES in names]
                if not methods:
                    advance(block.size)
                if not lacking:
                    return True
                part, examples = part_of(self.folder, settings, model, block), store.read_examples(self.folder, block)
                scorer, made = load() if self.runs(lacking) else (None, settings["holds"][(part or {})["holds"]])
                rows: list[Row] = scorer.of_methods(methods).scores(examples, advance) if methods and scorer else []
                scores = [row for row in rows if row["skipped"] is None]
                if part and len(lacking) > len(methods):
                    stored = read_table(self.folder, part["files"]["scores"]).to_pylist()
                    scores += [row for row in stored if row["method"] not in methods]
                for names in dict.fromkeys(lacking.values()):  # methods that lack the same metrics share their batches
                    some = [row for row in scores if lacking.get(row["method"]) == names]
                    rows += self._values([name for name in names if name != SCORES], some, examples, scorer)
                add_rows(self.folder, self.codes, model, block, lacking, rows, made)
        except Timeout:
            return False
        return True

    def _values(
        self, names: Sequence[str], rows: Sequence[Row], examples: Sequence[Example], scorer: Scorer | None
    ) -> list[Row]:
        """The values of some metrics of rows, and the reasons for those that are missing."""
        without = self.without((scorer.model, scorer.tokenizer)) if scorer else {}
        metrics = {name: self.metrics[name] for name in names if name not in without}
        found = measure(metrics, {one.id: one for one in examples}, rows, scorer, self.batch_size)
        found += [skipped_row(without[name], one, None, name) for name in names if name in without for one in examples]
        return found + [
            {name: row[name] for name in ("example", "method", "layer")}
            | {"metric": name, "value": row[name], "skipped": None}
            for row in rows
            for name in metrics
            if row[name] is not None
        ]


def _run_on_ray(job: Job, show: Callable[[int], object]) -> None:
    """Compute a job by a worker on each device of a Ray cluster. Without GPUs, each CPU is a device.

    A worker that dies starts again, and takes what is left. If Ray is not running in this process, it is started on
    this machine, and stopped at the end. Now and then, `show` is called with the number of examples that are left.
    """
    with needs_extra("engine='ray'", "ray"):
        ray: Any = import_module("ray")
    left = sum(len(job.left(model)) for model in job.models)
    if not left:
        return
    with ExitStack() as stack:
        if not ray.is_initialized():
            stack.callback(ray.shutdown)
            try:
                ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
            except Exception as error:  # Ray raises plain exceptions
                raise RuntimeError(f"Ray cannot be started on this machine: {error}") from error
        has = ray.cluster_resources()
        gpus = int(has.get("GPU", 0))
        worker = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=RETRIES)(_work)
        for module in [module for name, module in sys.modules.items() if name.startswith(PLUGIN)]:
            ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import a plugin
            stack.callback(ray.cloudpickle.unregister_pickle_by_value, module)
        packed = ray.cloudpickle.dumps((job, os.getcwd()))
        running = [worker.remote(packed) for _ in range(min(left, gpus or int(has.get("CPU", 1))))]
        try:
            while running:
                done, running = ray.wait(running, timeout=2)
                show(job.size_left())
                ray.get(done)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", error)  # what a worker raised, unless it cannot be copied
            if not isinstance(cause, ray.exceptions.RayError):
                raise cause from None
            told = f"Ray failed ({type(error).__name__}); a worker may have run out of memory"
            raise RuntimeError(f"{told}. Finished parts stay: start again with the same settings.") from error


def _work(packed: bytes) -> None:
    job, where = pickle.loads(packed)
    with suppress(OSError):  # names of files may be relative
        os.chdir(where)
    # A copy of a registered method is not that method. A worker has registered those of the package only.
    job = job._replace(
        methods={name: METHODS.get(name, one) for name, one in job.methods.items()},
        metrics={name: METRICS.get(name, one) for name, one in job.metrics.items()},
    )
    job.compute(store.own_device(), lambda count: None)
