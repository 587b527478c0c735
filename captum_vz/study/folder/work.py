"""What a study's folder lacks, and how it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from captum_vz._files import write_whole
from captum_vz.errors import needs_extra
from captum_vz.methods import Method
from captum_vz.study.folder import (
    Block,
    Loaded,
    Part,
    Stamp,
    check_weights,
    digest,
    fingerprint,
    made_of,
    part_path,
    parts_of,
    read_examples,
    read_part,
    to_parquet,
)
from captum_vz.study.folder.provenance import made_by
from captum_vz.study.folder.reading import has_cell
from captum_vz.study.scoring.measuring import Measurer
from captum_vz.study.scoring.metrics import Metric
from captum_vz.study.scoring.rows import COLUMNS, Row, is_out_of_memory
from captum_vz.study.scoring.scorer import Scorer

with needs_extra("captum_vz.study", "study"):
    import pyarrow as pa


class Missing(NamedTuple):
    """One part that is missing: methods with their metrics, or metrics of scores that are there."""

    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    has_scores: bool


class Work(NamedTuple):
    """What is missing of one model and one block.

    Attributes:
        model: The name of the model.
        block: The block.
        parts: Its finished parts.
        missing: What is missing.
        replaced: Its parts that ran out of memory, of which all is missing.
    """

    model: str
    block: Block
    parts: list[Part]
    missing: list[Missing]
    replaced: list[Part]


class Plan:
    """The study that a folder should hold.

    Args:
        folder: The folder.
        settings: Its settings.
        methods: The wanted methods.
        metrics: The wanted metrics.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], methods: Mapping[str, Method], metrics: Mapping[str, Metric]
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.methods = methods
        self.metrics = metrics
        self._parts: dict[str, list[Part]] = {}

    def work(self, model: str, block: Block) -> Work | None:
        """What is missing of one model and one block; None if nothing is.

        Raises:
            ValueError: A part is broken, or does not belong here.
        """
        parts = parts_of(self.folder, self.settings, model, block)
        self._parts.setdefault(model, []).extend(parts)
        kept = [part for part in parts if not self._again(part)]
        without = [name for name in self.methods if not any(has_cell(part, self.settings, name) for part in kept)]
        missing = [Missing(tuple(without), tuple(self.metrics), True)] if without else []
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in self.methods:
            lacking = tuple(
                metric
                for metric in self.metrics
                if not any(has_cell(part, self.settings, name, metric) for part in kept)
            )
            if name not in without and lacking:
                alike.setdefault(lacking, []).append(name)
        missing += [Missing(tuple(names), metrics, False) for metrics, names in alike.items()]
        replaced = [part for part in parts if part not in kept]
        return Work(model, block, kept, missing, replaced) if missing else None

    def check_weights(self, model: str, weights: str) -> None:
        """Refuse a model with other weights than those that made its parts."""
        for path, stamp in self._parts.get(model, ()):
            check_weights(path, model, stamp, weights)

    def path(self, work: Work, missing: Missing) -> Path:
        """Where a missing part goes. Starts that add different things at the same time write different files."""
        suffix = digest(self._identities(missing), missing.has_scores)[:8]
        return part_path(self.folder, self.settings, work.model, work.block, f"-{suffix}")

    def stamp(
        self, work: Work, missing: Missing, weights: str, rows: Sequence[Row], made_by: Mapping[str, str]
    ) -> Stamp:
        """The stamp of a new part."""
        of = made_of(self.settings, work.model, work.block)
        methods, metrics = self._identities(missing)
        return Stamp(weights, of, any(map(is_out_of_memory, rows)), methods, metrics, missing.has_scores, made_by)

    def _identities(self, missing: Missing) -> tuple[dict[str, str], dict[str, str]]:
        methods, metrics = self.settings["methods"], self.settings["metrics"]
        return {name: methods[name] for name in missing.methods}, {name: metrics[name] for name in missing.metrics}

    def _again(self, part: Part) -> bool:
        """Whether a part ran out of memory, and this call can compute all of it again."""
        stamp = part.stamp
        known = set(stamp.methods) <= set(self.methods) and set(stamp.metrics) <= set(self.metrics)
        return stamp.again and known


class Worker:
    """Computes the missing parts of one model.

    Args:
        plan: The plan.
        model: The name of the model.
        load: Loads the model onto the device of this process.
        options: Further arguments of :class:`~captum_vz.study.Scorer`.
    """

    def __init__(self, plan: Plan, model: str, load: Callable[[], Loaded], options: Mapping[str, Any]) -> None:
        self.plan = plan
        self.model = model
        self.load = load
        self.options = options

    @cached_property
    def loaded(self) -> tuple[Any, Any, str, dict[str, str]]:
        """The model, its tokenizer, its fingerprint and where it comes from, loaded at the first use."""
        model, tokenizer = self.load()
        maker = made_by(model)
        weights = fingerprint(model, tokenizer, maker["weights"])
        self.plan.check_weights(self.model, weights)
        return model, tokenizer, weights, maker

    def do(self, work: Work, advance: Callable[[int], object]) -> None:
        """Compute and write the missing parts of one block."""
        examples, written = read_examples(self.plan.folder, work.block), []
        for place, missing in enumerate(work.missing):
            count = advance if place == 0 else None
            metrics = {name: self.plan.metrics[name] for name in missing.metrics}
            methods = {name: self.plan.methods[name] for name in missing.methods}
            if missing.has_scores:
                rows = self._scorer(methods, metrics).score(examples, count)
                _, _, weights, maker = self.loaded
            else:
                rows = [row for part in work.parts for row in self._stored(part, missing.methods)]
                if any(metric.needs_model for metric in metrics.values()):
                    _, _, weights, maker = self.loaded
                    skipped = self._scorer(methods, metrics).measure(examples, rows)
                else:
                    sizes = self.options["batch_size"], self.options["batch_tokens"]
                    how = self.options["content_only"], self._no_model
                    measurer = Measurer(metrics, self._no_model, self._no_model, sizes, *how)
                    by_id = {example.id: example for example in examples}
                    weights, skipped = work.parts[0].stamp.weights, measurer.measure(by_id, rows)
                    maker = dict(work.parts[0].stamp.made_by)
                rows = [row | {"tokens": [], "cue": [], "content": [], "scores": []} for row in rows] + skipped
                if count is not None:
                    count(len(examples))
            schema = pa.schema([*COLUMNS.items(), *((name, pa.float64()) for name in metrics)])
            stamp = self.plan.stamp(work, missing, weights, rows, maker)
            written.append(self.plan.path(work, missing))
            write_whole(written[-1], to_parquet(pa.Table.from_pylist(rows, schema=schema), stamp))
        for part in work.replaced:
            if part.path not in written:
                part.path.unlink(missing_ok=True)

    def _scorer(self, methods: Mapping[str, Method], metrics: Mapping[str, Metric]) -> Scorer:
        model, tokenizer, *_ = self.loaded
        return Scorer(model, tokenizer, methods, metrics, **self.options)

    def _stored(self, part: Part, methods: Sequence[str]) -> list[Row]:
        """The rows of scores of methods that a part holds."""
        held = [name for name in methods if has_cell(part, self.plan.settings, name)]
        if not held:
            return []
        rows: list[Row] = read_part(part, list(COLUMNS)).to_pylist()
        return [row for row in rows if row["method"] in held and row["skipped"] is None]

    def _no_model(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the metric runs the model: register it with runs_model=True")
