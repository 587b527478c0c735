"""The rows of a study, joined from the parts that it and its extensions have written; and their summary.

The parts are read one block of one model after the other, and a summary keeps only the metrics in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from captum_vz.errors import needs_extra
from captum_vz.metrics import compare_pairs
from captum_vz.metrics.intervals import summarize_many
from captum_vz.study.folder import ALL, Part, blocks_of, check_weights, parts_of, read_part
from captum_vz.study.scoring.rows import COLUMNS

with needs_extra("captum_vz.study", "study"):
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

if TYPE_CHECKING:
    from pandas import DataFrame

#: What tells the rows of one model apart.
KEYS: Final = ["example", "method", "layer"]

#: A method and a layer, None for a method without layers.
Cell = tuple[str, int | None]


def has_cell(part: Part, settings: Mapping[str, Any], method: str, metric: str | None = None) -> bool:
    """Whether a part holds the scores of a method, or a metric of them, computed by the code of the settings."""
    stamp = part.stamp
    if stamp.methods.get(method) != settings["methods"].get(method):
        return False
    if metric is None:
        return stamp.has_scores
    return stamp.metrics.get(metric) == settings["metrics"].get(metric)


def read_blocks(
    folder: Path, settings: Mapping[str, Any], columns: Sequence[str] | None, coded: bool = False
) -> Iterator[tuple[str, list[Part], Any]]:
    """For each model and block of a study the name of the model, the parts, and the rows, a table of pyarrow.

    The rows with scores are in the order of examples, methods and layers. Those of skipped examples may come after
    them. Rows that other code has made than that of the settings are left out.

    Args:
        folder: The folder of the study.
        settings: Its settings.
        columns: The wanted columns. None: all.
        coded: Whether strings may come as codes, which takes less time and memory.

    Raises:
        ValueError: A part is broken, or does not belong here, or other weights made it.
    """
    for model in settings["models"]:
        weights = None
        for block in blocks_of(settings):
            parts = parts_of(folder, settings, model, block)
            for path, stamp in parts:
                weights = weights or stamp.weights
                check_weights(path, model, stamp, weights)
            if parts:
                yield model, parts, _read_block(parts, settings, columns, coded)


def _read_block(parts: Sequence[Part], settings: Mapping[str, Any], columns: Sequence[str] | None, coded: bool) -> Any:
    """The rows of one model and one block."""
    methods, metrics = list(settings["methods"]), list(settings["metrics"])
    wanted = [*COLUMNS, *metrics] if columns is None else [name for name in columns if name != "model"]
    if len(parts) == 1 and all(has_cell(parts[0], settings, one, metric) for one in methods for metric in metrics):
        return read_part(parts[0], wanted, coded)
    needed = list(dict.fromkeys([*KEYS, "metric", "skipped", *wanted]))
    parts = sorted(parts, key=lambda part: not part.stamp.has_scores)  # parts with scores hold all examples
    tables = [
        read_part(part, [name for name in needed if name in COLUMNS or name in part.stamp.metrics]).to_pandas()
        for part in parts
    ]
    found = []
    for method in methods:
        source = next((k for k, part in enumerate(parts) if has_cell(part, settings, method)), None)
        if source is None:
            continue
        rows = tables[source]
        rows = rows[(rows["method"] == method) & rows["metric"].isna()].reset_index(drop=True)
        for metric in [name for name in metrics if name in wanted]:
            if not has_cell(parts[source], settings, method, metric):
                rows = _with_metric(rows, parts, tables, settings, method, metric)
        found.append(rows)
    found.append(_reasons(parts, tables, settings))
    joined = pd.concat(found, ignore_index=True)
    order = {id: place for place, id in enumerate(dict.fromkeys(id for table in tables for id in table["example"]))}
    rank = joined["example"].map(order)
    joined = joined.iloc[rank.argsort(kind="stable")].reindex(columns=wanted)
    schema = pa.schema([(name, COLUMNS.get(name, pa.float64())) for name in wanted])
    return pa.Table.from_pandas(joined, schema=schema, preserve_index=False)


def _with_metric(
    rows: DataFrame,
    parts: Sequence[Part],
    tables: Sequence[DataFrame],
    settings: Mapping[str, Any],
    method: str,
    metric: str,
) -> DataFrame:
    """Rows of a method with the values of a metric, from the part that holds them."""
    source = next((k for k, part in enumerate(parts) if has_cell(part, settings, method, metric)), None)
    if source is None:
        return rows.assign(**{metric: float("nan")})
    values = tables[source]
    values = values[(values["method"] == method) & values["metric"].isna() & values["skipped"].isna()]
    keyed = values.set_index([values["example"], values["layer"].fillna(-1)])[metric]
    at = pd.MultiIndex.from_arrays([rows["example"], rows["layer"].fillna(-1)])
    return rows.assign(**{metric: keyed.reindex(at).to_numpy(dtype="float64")})


def _reasons(parts: Sequence[Part], tables: Sequence[DataFrame], settings: Mapping[str, Any]) -> DataFrame:
    """The rows that say why an example has no scores, or a metric has no number."""
    found = []
    for part, table in zip(parts, tables, strict=True):
        stamp = part.stamp
        out = table[table["skipped"].notna() & (table["method"].isna() | table["metric"].notna())]
        current = {name for name in stamp.metrics if stamp.metrics[name] == settings["metrics"].get(name)}
        known = {name for name in stamp.methods if stamp.methods[name] == settings["methods"].get(name)}
        keep = (out["metric"].isna() | out["metric"].isin(current)) & (out["method"].isna() | out["method"].isin(known))
        found.append(out[keep])
    joined = pd.concat(found, ignore_index=True)
    return joined.drop_duplicates(["example", "method", "metric"]).reset_index(drop=True)


class ModelValues:
    """The metrics of one model, without scores.

    Args:
        name: The name of the model.
        metrics: The names of the metrics.
    """

    def __init__(self, name: str, metrics: Sequence[str]) -> None:
        self.name = name
        self.metrics = list(metrics)
        self.examples: list[str] = []
        self.groups: list[str] = []  # of each example
        self.made_by: list[Mapping[str, str]] = []
        self._parts: dict[Cell, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._skipped: list[DataFrame] = []

    def add(self, table: Any) -> None:
        """Add the rows of one block, a table of pyarrow."""
        (example, names), (group, groups), (method, methods) = (
            _encoded(table[name]) for name in ("example", "group", "method")
        )
        base = len(self.examples)
        self.examples += names
        of_example = np.zeros(len(names), dtype=np.int64)
        of_example[example] = group
        self.groups += [groups[code] for code in of_example]
        skipped = np.asarray(table["skipped"].is_valid())
        if skipped.any():
            reasons = table.filter(pa.array(skipped)).select(["example", "group", "method", "metric", "skipped"])
            self._skipped.append(reasons.to_pandas(strings_to_categorical=False).assign(at=base + example[skipped]))
        layer = np.asarray(pc.fill_null(table["layer"], -1), dtype=np.int64)
        values = np.stack([np.asarray(table[name].to_numpy(), dtype=np.float64) for name in self.metrics])
        key = np.where(skipped, -1, method * (layer.max(initial=-1) + 2) + layer + 1)
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[order], prepend=-2))
        for rows in np.split(order, starts[1:]):
            if len(rows) and not skipped[rows[0]]:
                its = int(layer[rows[0]])
                cell = methods[method[rows[0]]], None if its < 0 else its
                self._parts.setdefault(cell, []).append((base + example[rows], values[:, rows]))

    @property
    def skipped(self) -> DataFrame:
        """The skipped rows; `at` is the place of the example."""
        names = ["example", "group", "method", "metric", "skipped", "at"]
        return pd.concat(self._skipped, ignore_index=True) if self._skipped else pd.DataFrame(columns=names)

    @property
    def used_groups(self) -> set[str]:
        """The groups of examples with scores."""
        at = {place for parts in self._parts.values() for places, _ in parts for place in places.tolist()}
        return {self.groups[place] for place in at}

    def cells(self, methods: Iterable[str]) -> Iterator[tuple[str, int | None, np.ndarray, np.ndarray]]:
        """For each method and layer the places of its examples, and its values `(metrics, examples)`.

        They are empty for a method that could explain no example.
        """
        for method in methods:
            layers = [layer for name, layer in self._parts if name == method]
            for layer in sorted(layers, key=lambda layer: (layer is None, layer)) or [None]:
                parts = self._parts.get((method, layer), [])
                if not parts:
                    yield method, layer, np.zeros(0, dtype=np.int64), np.zeros((len(self.metrics), 0))
                    continue
                places, values = zip(*parts, strict=True)
                yield method, layer, np.concatenate(places), np.concatenate(values, axis=1)

    def last_layers(self, methods: Iterable[str]) -> dict[str, np.ndarray]:
        """For each method the values of its last layer, `(metrics, all examples)`; NaN for examples without a row."""
        found: dict[str, np.ndarray] = {}
        for method, _, places, values in self.cells(methods):
            whole = found.setdefault(method, np.full((len(self.metrics), len(self.examples)), np.nan))
            whole[:, places] = values  # later layers replace earlier ones
        return found


def collect(folder: Path, settings: Mapping[str, Any]) -> list[ModelValues]:
    """The metrics of all models of a study."""
    metrics = list(settings["metrics"])
    names = ["example", "group", "method", "layer", "metric", "skipped", *metrics]
    found = {name: ModelValues(name, metrics) for name in settings["models"]}
    for model, parts, table in read_blocks(folder, settings, names, coded=True):
        found[model].add(table)
        for part in parts:
            if part.stamp.made_by and part.stamp.made_by not in found[model].made_by:
                found[model].made_by.append(part.stamp.made_by)
    return list(found.values())


def skipped_rows(found: Sequence[ModelValues]) -> DataFrame:
    """The rows without numbers, see :attr:`Study.skipped`."""
    names = ["model", "example", "group", "method", "metric", "skipped"]
    tables = [one.skipped.assign(model=one.name)[names] for one in found if len(one.skipped)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=names)


def summarise(found: Sequence[ModelValues], methods: Sequence[str], confidence: float, resamples: int) -> DataFrame:
    """The tidy summary of a study, see :attr:`Study.summary`."""
    used = sorted(set().union(*(one.used_groups for one in found)))
    groups = [ALL, *(used if len(used) > 1 else [])]
    tables = [_summary(one, methods, groups, confidence, resamples) for one in found]
    return pd.concat(tables, ignore_index=True).astype({"layer": "Int64"})


def _summary(
    one: ModelValues, methods: Sequence[str], groups: Sequence[str], confidence: float, resamples: int
) -> DataFrame:
    skipped, count = one.skipped, len(one.examples)
    group_of = np.array(one.groups, dtype=object)
    within = {group: np.ones(count, dtype=bool) if group == ALL else group_of == group for group in groups}
    lines, vectors = [], []
    unmeasured: dict[str | None, np.ndarray] = {}
    before = None
    for method, layer, places, values in one.cells(methods):
        if method != before:
            out = skipped[skipped["method"].isna() | (skipped["method"] == method)]
            unmeasured = {metric: _marked(out[out["metric"] == metric], count) for metric in one.metrics}
            unmeasured[None] = _marked(out[out["metric"].isna()], count)
            before = method
        for group, inside in within.items():
            for row, metric in zip(values, one.metrics, strict=True):
                omitted = int(((unmeasured[metric] | unmeasured[None]) & inside).sum())
                vectors.append(torch.from_numpy(row[(inside & ~unmeasured[metric])[places]]))
                lines.append((one.name, method, pd.NA if layer is None else layer, group, metric, omitted))
    summaries = summarize_many(vectors, confidence, resamples)
    names = ["model", "method", "layer", "group", "metric"]
    table = pd.DataFrame([line[:-1] for line in lines], columns=names)
    numbers = pd.DataFrame(summaries, columns=["mean", "std", "low", "high", "examples", "undefined"])
    return table.join(numbers).assign(skipped=[line[-1] for line in lines])


def paired_differences(
    found: Sequence[ModelValues], methods: Sequence[str], confidence: float, resamples: int
) -> DataFrame:
    """The tidy table of paired differences, see :attr:`Study.differences`."""
    lines = []
    for one in found:
        last = one.last_layers(methods)
        for place, metric in enumerate(one.metrics):
            known = {name: torch.from_numpy(values[place]) for name, values in last.items()}
            known = {name: values for name, values in known.items() if not values.isnan().all()}
            for difference in compare_pairs(known, confidence, resamples):
                lines.append({"model": one.name, "metric": metric} | difference._asdict())
    names = ["model", "metric", "one", "other", "mean", "low", "high", "p", "examples", "tied"]
    return pd.DataFrame(lines, columns=names)


def _marked(rows: DataFrame, count: int) -> np.ndarray:
    """Which examples have one of the rows."""
    found = np.zeros(count, dtype=bool)
    found[rows["at"].to_numpy(dtype=np.int64)] = True
    return found


def _encoded(column: Any) -> tuple[np.ndarray, list[Any]]:
    """A column of strings as codes, -1 for null, and the strings in the order of their codes."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    codes = np.asarray(pc.fill_null(coded.indices, -1), dtype=np.int64)
    return codes, coded.dictionary.to_pylist()
