"""What a study's folder lacks, and how it is computed. Processes claim a missing part by a lock of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from captum_vz.errors import needs_extra
from captum_vz.methods import Method
from captum_vz.study.examples import Example
from captum_vz.study.folder import (
    Block,
    Loaded,
    Source,
    check_weights,
    fingerprint,
    lock_of,
    on_device,
    read_examples,
    read_settings,
    stem_of,
)
from captum_vz.study.folder.provenance import made_by
from captum_vz.study.folder.tables import Piece, add_rows, is_held, part_of, read_table
from captum_vz.study.scoring.measuring import Measurer, Metric
from captum_vz.study.scoring.metrics import lacks
from captum_vz.study.scoring.rows import Row, skipped_row
from captum_vz.study.scoring.scorer import Scorer

with needs_extra("captum_vz.study", "study"):
    from filelock import Timeout


class Job(NamedTuple):
    """What a start of a study wants.

    Attributes:
        folder: The folder.
        models: For each name a model and its tokenizer, or what loads them.
        methods: The methods.
        metrics: The metrics.
        codes: The identities of their code, "methods" and "metrics" by their names.
        blocks: The blocks of examples.
        options: Further arguments of :class:`~captum_vz.study.Scorer`.
    """

    folder: Path
    models: Mapping[str, Source]
    methods: Mapping[str, Method]
    metrics: Mapping[str, Metric]
    codes: Mapping[str, Mapping[str, str]]
    blocks: list[Block]
    options: Mapping[str, Any]

    def read(self) -> dict[str, Any]:
        """The settings of the folder, with the code of this job: another start may have other code for a name."""
        settings = read_settings(self.folder)
        return settings | {name: settings[name] | codes for name, codes in self.codes.items()}

    def missing(self, settings: Mapping[str, Any], model: str, block: Block) -> list[Piece]:
        """What the folder lacks of one model and one block.

        Raises:
            ValueError: A file of the part is broken.
        """
        part = part_of(self.folder, settings, model, block)

        def lacks(method: str, metric: str | None = None) -> bool:
            """Whether it is not there, or ran out of memory and is computed again."""
            if part is None or not is_held(settings, part, method, metric):
                return True
            return [method, metric or ""] in part["again"]

        without = tuple(name for name in self.methods if lacks(name))
        alike: dict[tuple[str, ...], tuple[str, ...]] = {}
        for name in self.methods:
            lacking = tuple(metric for metric in self.metrics if lacks(name, metric))
            if name not in without and lacking:
                alike[lacking] = (*alike.get(lacking, ()), name)
        found = [Piece(without, tuple(self.metrics), True)] if without else []
        return [*found, *(Piece(names, metrics, False) for metrics, names in alike.items())]

    def left(self, model: str, settings: Mapping[str, Any] | None = None) -> Iterator[tuple[Block, list[Piece]]]:
        """The blocks of a model that lack something."""
        settings = settings or self.read()
        for block in self.blocks:
            if found := self.missing(settings, model, block):
                yield block, found

    def needs_model(self, missing: Piece) -> bool:
        """Whether the model runs."""
        return missing.has_scores or any(self.metrics[name].needs_model for name in missing.metrics)

    def size_left(self) -> int:
        """The number of examples in blocks that lack something, over all models."""
        settings = self.read()
        return sum(block.size for model in self.models for block, _ in self.left(model, settings))

    def compute(self, device: torch.device, advance: Callable[[int], object]) -> None:
        """Compute what is missing. What other processes compute comes last: it is awaited, or taken from a dead one."""
        busy: list[tuple[str, Block]] = []
        for model in self.models:
            with ExitStack() as stack:
                worker = _Worker(self, model, stack, device)
                for block, _ in list(self.left(model)):
                    if not worker.do(block, advance, timeout=0):
                        busy.append((model, block))
        for model, block in busy:
            with ExitStack() as stack:
                _Worker(self, model, stack, device).do(block, advance, timeout=-1)


def cannot_have(loaded: Loaded, metrics: Mapping[str, Metric]) -> dict[str, str]:
    """The metrics that a model cannot have, with the reasons."""
    return {name: reason for name, metric in metrics.items() if (reason := lacks(metric, *loaded))}


def check_model(
    name: str, loaded: Loaded, methods: Mapping[str, Method], metrics: Mapping[str, Metric], options: Mapping[str, Any]
) -> None:
    """Refuse a model that a study cannot run.

    Raises:
        ValueError: It is in train mode, or it can have none of the metrics.
    """
    without = cannot_have(loaded, metrics)
    if len(without) == len(metrics):
        raise ValueError(
            f"model {name!r} can have none of the metrics {', '.join(metrics)}: {next(iter(without.values()))}. Pass "
            "other metrics, such as cue_dot and cue_ap."
        )
    Scorer(*loaded, methods, {one: metric for one, metric in metrics.items() if one not in without}, **options)


class _Worker:
    """Computes the missing parts of one model, which it loads at the first use.

    Args:
        job: The job.
        model: The name of the model.
        stack: Holds the model on the device.
        device: The device of this process.
    """

    def __init__(self, job: Job, model: str, stack: ExitStack, device: torch.device) -> None:
        self.job = job
        self.model = model
        self.load = partial(stack.enter_context, on_device(job.models[model], device))
        self._loaded: tuple[Any, Any, dict[str, Any]] | None = None

    def do(self, block: Block, advance: Callable[[int], object], timeout: float) -> bool:
        """Compute what one block lacks; False if another process holds it for longer than `timeout`."""
        job, count = self.job, advance
        try:
            with lock_of(job.folder, stem_of(job.read(), self.model, block)).acquire(timeout=timeout):
                settings = job.read()  # another process may have computed it
                part, added = part_of(job.folder, settings, self.model, block), []
                made = settings["holds"][part["holds"]] if part is not None else {}
                examples = read_examples(job.folder, block)
                for missing in job.missing(settings, self.model, block):
                    stored = [] if missing.has_scores else self._stored(missing, part)
                    if job.needs_model(missing):
                        model, tokenizer, made = self.loaded()
                        rows = self._run((model, tokenizer), examples, missing, stored, count)
                    else:
                        rows = self._measure(examples, missing, stored)
                    if not missing.has_scores:
                        count(block.size)
                    count = _ignore
                    added.append(missing._replace(rows=rows))
                if added:
                    add_rows(job.folder, job.codes, self.model, block, added, made["weights"], made["made_by"])
                else:
                    advance(block.size)
        except Timeout:
            return False
        return True

    def loaded(self) -> tuple[Any, Any, dict[str, Any]]:
        """The model, its tokenizer, and its fingerprint with where it comes from."""
        if self._loaded is None:
            model, tokenizer = self.load()
            maker = made_by(model)
            weights = fingerprint(model, tokenizer, maker["weights"])
            check_model_weights(self.job.folder, self.model, weights)
            self._loaded = model, tokenizer, {"weights": weights, "made_by": maker}
        return self._loaded

    def _run(
        self,
        loaded: Loaded,
        examples: list[Example],
        missing: Piece,
        stored: list[Row],
        advance: Callable[[int], object],
    ) -> list[Row]:
        """The rows of a part that need the model."""
        metrics = {name: self.job.metrics[name] for name in missing.metrics}
        methods = {name: self.job.methods[name] for name in missing.methods}
        without = cannot_have(loaded, metrics)
        kept = {name: metric for name, metric in metrics.items() if name not in without}
        left_out = [skipped_row(why, one, None, name, metrics) for name, why in without.items() for one in examples]
        scorer = Scorer(*loaded, methods, kept or "cue_dot", **self.job.options)
        rows = scorer.scores(examples, advance) if missing.has_scores else stored
        if kept:
            rows += scorer.measure(examples, rows)
        return [dict.fromkeys(metrics) | row for row in rows] + left_out

    def _measure(self, examples: list[Example], missing: Piece, stored: list[Row]) -> list[Row]:
        """The rows of metrics that only read scores."""
        metrics, options = {name: self.job.metrics[name] for name in missing.metrics}, self.job.options
        sizes = options["batch_size"], options["batch_tokens"]
        measurer = Measurer(metrics, _no_model, _no_model, sizes, options["content_only"], _no_model)
        return stored + measurer.measure({example.id: example for example in examples}, stored)

    def _stored(self, missing: Piece, part: Mapping[str, Any] | None) -> list[Row]:
        """The scores that a part holds of some methods."""
        assert part is not None  # only a part that is there lacks nothing but metrics
        rows: list[Row] = read_table(self.job.folder, part["files"]["scores"]).to_pylist()
        return [row | {"metric": None, "skipped": None} for row in rows if row["method"] in missing.methods]


def check_model_weights(folder: Path, name: str, weights: str) -> None:
    """Refuse a model with other weights than those that made its finished parts."""
    settings = read_settings(folder)
    for part in settings["parts"].get(name, {}).values():
        check_weights(folder, name, settings["holds"][part["holds"]]["weights"], weights)


def _ignore(count: int) -> None:
    """Each example of a block counts once."""


def _no_model(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the metric runs the model: register it with runs_model=True")
