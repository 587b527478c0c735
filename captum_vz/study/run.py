"""Models x methods x examples, part after part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from captum_vz import __version__
from captum_vz._files import remove_temporary
from captum_vz.methods import given_methods
from captum_vz.metrics.intervals import check_bootstrap
from captum_vz.study.examples import Example
from captum_vz.study.examples.files import as_examples
from captum_vz.study.folder import check_groups, claim, fingerprint
from captum_vz.study.folder.engines import check_engine, own_device, run_on_ray
from captum_vz.study.folder.work import Job, check_model, check_model_weights
from captum_vz.study.results import Study, write_results
from captum_vz.study.scoring.identity import code_identity
from captum_vz.study.scoring.metrics import given_metrics
from captum_vz.subjects import model_sources

#: The most examples of a part: what is computed again if a process is killed.
BLOCK: Final = 64
#: The most tokens in a batch.
BATCH_TOKENS: Final = 4096


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
