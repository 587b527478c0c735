"""Models x methods x examples, shard after shard."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from captum_vz import __version__
from captum_vz._files import remove_temporary, write_whole
from captum_vz.metrics.extra import study_extra
from captum_vz.study.examples.example import Example
from captum_vz.study.results import ALL, Study, write_results
from captum_vz.study.scoring.given import given_methods
from captum_vz.study.scoring.metrics import check_removal, given_metrics
from captum_vz.study.scoring.rows import Row, is_out_of_memory
from captum_vz.study.scoring.scorer import Scorer
from captum_vz.study.storage import (
    Shard,
    Source,
    Stamp,
    check_made_of,
    check_weights,
    claim,
    fingerprint,
    on_device,
    read_stamp,
    shards_of,
    to_parquet,
)

with study_extra("captum_vz.study"):
    import pyarrow as pa
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list, parse_flag_from_env


def run_study(
    models: Mapping[str, Source],
    examples: Iterable[Example],
    output: str | Path,
    methods: Any = None,
    metrics: Any = None,
    *,
    batch_size: int = 32,
    shard_size: int = 64,
    content_only: bool = False,
    removal: str = "unk",
    confidence: float = 0.95,
    resamples: int = 1999,
    quiet: bool = False,
) -> Study:
    """Evaluates methods on examples with models. A killed study continues when it is started again.

    The examples are cut into shards. The rows of one model and one shard are a Parquet file, which appears when it is
    complete. After any interruption, a start with the same arguments computes the missing shards. The results equal
    the results of an uninterrupted study. An example that runs out of memory is skipped, and computed again at a new
    start. A shard that was changed, or that other settings or weights have made, is an error. Under `accelerate
    launch`, the processes share the shards, each on its own device. They may run on several machines that share the
    folder.

    The folder holds ``study.json`` (the settings), ``shards``, ``summary.csv``, ``skipped.csv`` and ``figures``.

    Args:
        models: For each name a model in eval mode and its tokenizer, or a function that loads them. The model is moved
            to the process's device, and back. The weights of a passed model are compared with the weights of the
            finished shards, even if no work is left. A function is called only if work is left.
        examples: The examples; their ids are all different.
        output: The folder. It may hold a part of this study, but no other study.
        methods: Names of :data:`~captum_vz.study.METHODS`, or methods of your own, see
            :func:`~captum_vz.study.as_method`. A method that fails costs its own rows, and the reason is recorded.
            None: :data:`~captum_vz.study.DEFAULT_METHODS`.
        metrics: Names of :data:`~captum_vz.study.METRICS`, or a mapping from names to metrics of your own. None: cue
            alignment and blank-out.
        batch_size: The number of sentences in a batch.
        shard_size: The number of examples in a shard: the most that are computed again if a process is killed.
        content_only: See :class:`~captum_vz.study.Scorer`, like `removal`.
        removal: "unk", "mask" or "delete".
        confidence: The confidence level of the intervals in the summary, see :func:`~captum_vz.metrics.summarize`.
        resamples: The number of bootstrap resamples of the examples.
        quiet: Whether there is no progress bar.

    Returns:
        The results: the `summary`, the `rows`, and the `skipped` examples with their reasons.

    Raises:
        ValueError: Unknown names; no examples or models; repeated ids; or a folder that holds a study with other
            settings or other weights, or a broken file.
        OSError: The folder cannot be written, or the disk is full. Finished shards stay.

    >>> import tempfile
    >>> from captum_vz.study import Example, run_study
    >>> from captum_vz.testbed import agreement_sentences, load_agreement_model
    >>> examples = [Example.from_record(record) for record in agreement_sentences(4)]
    >>> models, methods = {"agreement": load_agreement_model}, ["value-zeroing", "random"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run_study(models, examples, folder, methods, "cue_dot", quiet=True).summary
    >>> summary.query("layer == 3 and group == 'all'")[["method", "metric", "examples"]].values.tolist()
    [['value-zeroing', 'cue_dot', 4]]
    """
    chosen, measures, examples = given_methods(methods), given_metrics(metrics), list(examples)
    settings = {
        "captum_vz": __version__,
        "models": list(models),
        "methods": list(chosen),
        "metrics": list(measures),
        "content_only": content_only,
        "removal": removal,
        "batch_size": batch_size,
        "shard_size": shard_size,
        "examples": _check_examples(examples),
    }
    # The first settings written to a folder stay there, so they are checked before they are written.
    if not models or min(shard_size, batch_size) < 1:
        raise ValueError(
            f"models is {list(models)}, shard_size {shard_size} and batch_size {batch_size}: pass at least 1 of each."
        )
    check_removal(removal)
    scorer_of = partial(
        Scorer,
        methods=chosen,
        metrics=measures,
        batch_size=batch_size,
        content_only=content_only,
        removal=removal,
    )
    loaded = {name: source for name, source in models.items() if not callable(source)}
    for model, tokenizer in loaded.values():
        scorer_of(model, tokenizer)
    state = _processes()
    folder = Path(output)
    _claim(folder, settings, state.is_main_process)
    shards = shards_of(folder, settings)
    # All processes look before any of them writes, so that they agree on the shards that are left.
    stamps = {shard: read_stamp(shard.path) for shard in shards if shard.path.exists()}
    for shard, stamp in stamps.items():
        check_made_of(shard.path, stamp, shard.made_of)
    for name, (model, tokenizer) in loaded.items():
        _check_weights(name, fingerprint(model, tokenizer), stamps)
    left = [shard for shard in shards if shard not in stamps or stamps[shard].again]
    state.wait_for_everyone()
    share = left[state.process_index :: state.num_processes]
    count = sum(len(examples[shard.start : shard.start + shard_size]) for shard in share)
    hidden = quiet or not share or not state.is_main_process
    with tqdm(total=count, unit="example", desc="study", disable=hidden) as bar:
        for name, source in models.items():
            todo = [shard for shard in share if shard.model == name]
            if not todo:
                continue
            with on_device(source, state.device) as (model, tokenizer):
                scorer = scorer_of(model, tokenizer)
                weights = fingerprint(model, tokenizer)
                _check_weights(name, weights, stamps)
                for shard in todo:
                    rows = scorer.score(examples[shard.start : shard.start + shard_size], bar.update)
                    write_whole(shard.path, _parquet(shard, rows, scorer.schema, weights))
    state.wait_for_everyone()
    if state.is_main_process:
        remove_temporary(folder)
        write_results(folder, confidence, resamples)
    state.wait_for_everyone()
    return Study(folder)


def _processes() -> Any:
    """The processes that share the work, and their devices, as accelerate knows them."""
    # Rollouts are products in float64, which Apple's GPUs do not support. Accelerate must be asked to use CPUs.
    has_gpu = torch.cuda.is_available() or torch.xpu.is_available()
    cpu = not has_gpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=cpu, timeout=timedelta(days=30))  # some processes wait long for others at the end
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != state.num_processes:
        raise RuntimeError(
            f"{launched} processes were launched, but accelerate shares work among {state.num_processes}: call "
            "run_study before any other use of accelerate, or create PartialState(cpu=True) for processes on CPUs."
        )
    return state


def _claim(folder: Path, settings: dict[str, Any], is_main: bool) -> None:
    """Write the settings to the folder, or check them there. All processes raise the error of the main process."""
    wrong: list[Exception | None] = [None]
    if is_main:
        try:
            claim(folder, settings)
        except (ValueError, OSError) as error:
            wrong = [error]
    broadcast_object_list(wrong)
    if wrong[0] is not None:
        raise wrong[0]


def _check_examples(examples: Sequence[Example]) -> dict[str, Any]:
    """The entry of the manifest for the examples: their number, and a digest of their contents."""
    if not examples:
        raise ValueError("examples is empty: pass at least one.")
    repeated = [id for id, count in Counter(example.id for example in examples).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} ids are used by several examples, such as {repeated[0]!r}: pass different ids."
        )
    groups = {example.group for example in examples}
    if ALL in groups and len(groups) > 1:
        raise ValueError(
            f"a group is called {ALL!r}, which names all examples in a summary: give the group another name."
        )
    lines = "\n".join(json.dumps(example.to_dict(), sort_keys=True) for example in examples)
    return {"count": len(examples), "sha256": hashlib.sha256(lines.encode()).hexdigest()}


def _check_weights(name: str, weights: str, stamps: Mapping[Shard, Stamp]) -> None:
    for shard, stamp in stamps.items():
        if shard.model == name:
            check_weights(shard.path, name, stamp, weights)


def _parquet(shard: Shard, rows: Sequence[Row], columns: Any, weights: str) -> bytes:
    schema = pa.schema([("model", pa.string()), *columns])
    table = pa.Table.from_pylist([{"model": shard.model} | row for row in rows], schema=schema)
    return to_parquet(table, Stamp(weights, shard.made_of, again=any(map(is_out_of_memory, rows))))
