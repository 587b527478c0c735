"""Models x methods x examples, shard after shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from captum_vz import __version__
from captum_vz._files import remove_temporary
from captum_vz.methods import given_methods
from captum_vz.metrics.intervals import check_bootstrap
from captum_vz.study.examples import Example
from captum_vz.study.examples.files import as_examples
from captum_vz.study.folder import check_groups, claim, fingerprint, on_device
from captum_vz.study.folder.engines import Processes, run_on_ray
from captum_vz.study.folder.provenance import files_of
from captum_vz.study.folder.work import Plan, Work, Worker
from captum_vz.study.results import Study, write_results
from captum_vz.study.scoring.identity import code_identity
from captum_vz.study.scoring.metrics import given_metrics
from captum_vz.study.scoring.scorer import Scorer
from captum_vz.subjects import model_sources


def run_study(
    models: Any,
    examples: Any,
    output: str | Path,
    methods: Any = None,
    metrics: Any = None,
    *,
    batch_size: int = 32,
    batch_tokens: int = 4096,
    shard_size: int = 64,
    content_only: bool = False,
    confidence: float = 0.95,
    resamples: int = 1999,
    engine: str | None = None,
    command: str | None = None,
    data: Iterable[str | Path] = (),
    quiet: bool = False,
) -> Study:
    """Evaluates methods on examples with models. A killed study continues when it is started again.

    The examples are cut into shards. The rows of one model and one shard are a Parquet file, which appears when it is
    complete. After any interruption, a start with the same arguments computes the missing shards. The results equal
    the results of an uninterrupted study. An example that runs out of memory is skipped, and computed again at a new
    start. A shard that was changed, or that other settings or weights have made, is an error. Under `accelerate
    launch`, the processes share the shards, each on its own device. They may run on several machines that share the
    folder.

    A study grows: a call with other models, methods, metrics or examples adds them to the folder, and computes only
    what is missing. The results are those of everything in the folder. Metrics that only read scores run no model. A
    method or a metric whose source has changed is computed again.

    The folder holds ``study.json`` (the settings, and the provenance: what a reader needs to repeat the study),
    ``examples``, ``shards``, ``summary.csv``, ``differences.csv`` (of each pair of methods), ``skipped.csv`` and
    ``figures``.

    Args:
        models: What :func:`captum_vz.explain` takes: a name, a folder, a pair of a model and its tokenizer, a pipeline.
            Or several names, or a mapping from names to these, or to functions that return a model and its tokenizer.
            A model is moved to the device of the process, and back. Its weights are compared with those of the
            finished shards, even if no work is left. A function is called only if work is left.
        examples: The examples, :class:`~captum_vz.study.Example` objects or dictionaries of their attributes, a table
            of pyarrow, or a `datasets.Dataset`. Their ids are all different.
        output: The folder. It may hold a study with the same `content_only`, which then grows.
        methods: Names of :data:`~captum_vz.study.METHODS`, or methods of your own, see
            :func:`~captum_vz.study.as_method`. A method that fails costs its own rows, and the reason is recorded.
            None: :data:`~captum_vz.study.DEFAULT_METHODS`.
        metrics: Names, see :func:`~captum_vz.study.metric_named`, or a mapping from names to metrics of your own.
            None: cue alignment and blank-out.
        batch_size: The most sentences in a batch.
        batch_tokens: The most tokens in a batch, see :class:`~captum_vz.study.Scorer`.
        shard_size: The number of examples in a shard: the most that are computed again if a process is killed.
        content_only: See :class:`~captum_vz.study.Scorer`.
        confidence: The confidence level of the intervals in the summary, see :func:`~captum_vz.metrics.summarize`.
        resamples: The number of bootstrap resamples of the examples.
        engine: "local": this process. "accelerate": the processes of `accelerate launch` or `torchrun`, which call
            this function with the same arguments. "ray": Ray Data, with an actor for each GPU, or each CPU if there is
            no GPU; on the cluster that `ray.init` has connected to, or on this machine. None: "accelerate" if several
            processes were launched, otherwise "local". All give the same rows.
        command: The command that runs the study, for the provenance in ``study.json``. Numbers do not depend on it.
        data: The files that the examples were read from. Their SHA-256 go into the provenance.
        quiet: Whether there is no progress bar.

    Returns:
        The results: the `summary`, the `rows`, and the `skipped` examples with their reasons.

    Raises:
        ValueError: Unknown names; no examples or models; repeated ids; or a folder that holds a study with other
            settings or other weights, or a broken file.
        OSError: The folder cannot be written, or the disk is full. Finished shards stay.
        StudyStoppedError: Another of the launched processes has failed or ended. Finished shards stay.

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
    if not models or min(shard_size, batch_size, batch_tokens) < 1:
        raise ValueError(
            f"models is {list(models)}, shard_size {shard_size}, batch_size {batch_size} and batch_tokens "
            f"{batch_tokens}: pass at least 1 of each."
        )
    check_bootstrap(confidence, resamples)
    options: dict[str, Any] = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    options |= {"content_only": content_only}
    loaded = {name: source for name, source in models.items() if not callable(source)}
    for model, tokenizer in loaded.values():
        Scorer(model, tokenizer, chosen, measures, **options)
    processes = Processes(engine)
    folder, digests = Path(output), files_of(data)
    code = {name: code_identity(one if one.source is None else one.source, one.version) for name, one in chosen.items()}
    measured = {name: code_identity(one.values, one.version) for name, one in measures.items()}
    added = (list(models), code, measured, examples, shard_size)
    settings, blocks = processes.once(lambda: claim(folder, fixed, *added))
    plan = Plan(folder, settings, chosen, measures)

    def look(_: Any) -> list[Work]:
        left = [work for name in models for block in blocks if (work := plan.work(name, block))]
        for name, (model, tokenizer) in loaded.items():
            plan.check_weights(name, fingerprint(model, tokenizer))
        return left

    # All processes look before any of them writes, so that they agree on the work that is left.
    left = processes.each(folder, look)
    share = left[processes.index :: processes.count]
    hidden = quiet or not share or not processes.is_main

    def work(may_go_on: Callable[[], None]) -> None:
        with tqdm(total=sum(one.block.size for one in share), unit="example", desc="study", disable=hidden) as bar:
            if engine == "ray":
                run_on_ray(plan, share, models, options, bar.update)
                return
            for name, source in models.items():
                with ExitStack() as stack:
                    load = partial(stack.enter_context, on_device(source, processes.device))
                    worker = Worker(plan, name, load, options)
                    for one in share:
                        if one.model == name:
                            may_go_on()
                            worker.do(one, bar.update)

    processes.each(folder, work)

    def finish() -> None:
        remove_temporary(folder)
        write_results(folder, confidence, resamples, command, digests)

    processes.once(finish)
    return Study(folder)


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
