"""What the tables of a study hold: rows with their values, the values by themselves, and their summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from captum_vz.errors import needs_extra
from captum_vz.metrics import compare_pairs
from captum_vz.metrics.intervals import summarize_many
from captum_vz.study.examples import Example
from captum_vz.study.folder import ALL, Block, blocks_of, read_examples
from captum_vz.study.folder.tables import KEY, STORED, is_held, part_of, read_table
from captum_vz.study.scoring.rows import COLUMNS

with needs_extra("captum_vz.study", "study"):
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

if TYPE_CHECKING:
    from pandas import DataFrame

#: A part, with its block and the examples of this block.
Part = tuple[Block, list[Example], Mapping[str, Any]]


def parts_of(folder: Path, settings: Mapping[str, Any], model: str) -> Iterator[Part]:
    """The finished parts of a model."""
    for block in blocks_of(settings):
        part = part_of(folder, settings, model, block)
        if part is not None:
            yield block, read_examples(folder, block), part


class Values:
    """The values of the metrics of one model. Those that other code than that of the settings made are left out.

    Args:
        folder: The folder of the study.
        settings: Its settings.
        parts: The parts whose values are read.

    Attributes:
        examples: The examples.
        numbers: The values `(methods, 1 + layers, metrics, examples)`, "no layer" first. NaN: undefined.
        known: Which of them there are. The others were skipped, or not computed.
        computed: Which were computed or skipped, `(methods, metrics, examples)`.
        reasons: The rows of skipped examples.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], parts: Sequence[Part]) -> None:
        methods, metrics = _places(settings["methods"]), _places(settings["metrics"])
        self.examples = [example for _, examples, _ in parts for example in examples]
        shape = len(methods), 1, len(metrics), len(self.examples)
        self.numbers, self.known = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
        self.computed = np.zeros((shape[0], *shape[2:]), dtype=bool)
        names = ["example", "group", "method", "metric", "skipped"]
        found, start = [pd.DataFrame(columns=names)], 0
        for _, examples, part in parts:
            table = read_table(folder, part["files"]["values"], [*KEY, "value", "skipped"])
            place = codes(table["example"], _places(example.id for example in examples))
            method, metric = codes(table["method"], methods), codes(table["metric"], metrics)
            held: Any = np.array([[is_held(settings, part, one, other) for other in metrics] for one in methods])
            scored: Any = np.array([is_held(settings, part, one) for one in methods])
            self.computed[..., start : start + len(examples)] = held[..., None]
            out: Any = np.asarray(table["skipped"].is_valid())
            used: Any = ~out & (method >= 0) & (metric >= 0) & held[method, metric]
            layer = np.asarray(pc.fill_null(table["layer"], -1))[used] + 1
            if (more := int(layer.max(initial=0)) + 1 - self.numbers.shape[1]) > 0:
                pad = ((0, 0), (0, more), (0, 0), (0, 0))
                self.numbers, self.known = np.pad(self.numbers, pad), np.pad(self.known, pad)
            at = method[used], layer, metric[used], start + place[used]
            self.numbers[at] = np.asarray(table["value"].to_numpy())[used]
            self.known[at] = True
            all_methods: Any = np.asarray(table["method"].is_null())
            all_metrics: Any = np.asarray(table["metric"].is_null())
            measured = np.where(all_methods, held.any(0)[metric], held[method, metric])
            out = out & (all_methods | (method >= 0) & scored[method]) & (all_metrics | (metric >= 0) & measured)
            rows = table.filter(pa.array(out)).select(["example", "method", "metric", "skipped"])
            frame = rows.to_pandas(strings_to_categorical=False).astype(object)
            groups = [examples[one].group for one in place[out]]
            order = np.argsort(place[out], kind="stable")
            found.append(frame.assign(group=groups)[names].iloc[order])
            start += len(examples)
        self.reasons = pd.concat(found, ignore_index=True)


def read_rows(folder: Path, settings: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """The rows with scores, a table of pyarrow, in the order of models, examples, methods and layers.

    Args:
        folder: The folder of the study.
        settings: Its settings.
        columns: The wanted columns.
    """
    schema = pa.schema([(name, (COLUMNS | {"model": pa.string()}).get(name, pa.float64())) for name in columns])
    methods, metrics, tables = _places(settings["methods"]), list(settings["metrics"]), [schema.empty_table()]
    for model in settings["models"]:
        for block, examples, part in parts_of(folder, settings, model):
            stored = [name for name in STORED if name in {"example", "method", "layer", *columns}]
            table = read_table(folder, part["files"]["scores"], stored)
            place = codes(table["example"], _places(example.id for example in examples))
            method = codes(table["method"], methods)
            layer = np.asarray(pc.fill_null(table["layer"], -1)) + 1
            held = np.array([is_held(settings, part, name) for name in methods])
            order = np.lexsort((layer, method, place))
            order = order[(method[order] >= 0) & held[method[order]]]
            values = Values(folder, settings, [(block, examples, part)]) if set(columns) & set(metrics) else None
            taken, found = table.take(pa.array(order)), {}
            for name, kind in zip(schema.names, schema.types, strict=True):
                if name in metrics and values is not None:
                    layers = np.minimum(layer[order], values.numbers.shape[1] - 1)
                    at = method[order], layers, metrics.index(name), place[order]
                    found[name] = pa.array(values.numbers[at], mask=~values.known[at])
                elif name in ("group", "label"):
                    found[name] = pa.array([getattr(examples[one], name) for one in place[order]], kind)
                elif name in taken.column_names:
                    found[name] = taken[name].cast(kind)
                else:
                    found[name] = pa.repeat(pa.scalar(model if name == "model" else None, kind), len(order))
            tables.append(pa.table(found, schema))
    return pa.concat_tables(tables)


def codes(column: Any, places: Mapping[str, int]) -> np.ndarray:
    """A column of names as their places. -1: null, or an unknown name."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    known = np.array([*(places.get(name, -1) for name in coded.dictionary.to_pylist()), -1])
    found: np.ndarray = known[np.asarray(pc.fill_null(coded.indices, -1))]
    return found


def _places(names: Any) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


#: The values of each model.
Found = Mapping[str, Values]


def collect(folder: Path, settings: Mapping[str, Any]) -> dict[str, Values]:
    """The values of all models of a study."""
    return {model: Values(folder, settings, list(parts_of(folder, settings, model))) for model in settings["models"]}


def skipped_rows(found: Found) -> DataFrame:
    """The rows without numbers, see :attr:`Study.skipped`."""
    tables = [one.reasons.assign(model=name) for name, one in found.items()]
    return pd.concat(tables, ignore_index=True)[["model", "example", "group", "method", "metric", "skipped"]]


def summarise(found: Found, settings: Mapping[str, Any], confidence: float, resamples: int) -> DataFrame:
    """The tidy summary of a study, see :attr:`Study.summary`."""
    metrics, tables = list(settings["metrics"]), []
    groups = sorted({example.group for one in found.values() for example in one.examples})
    for name, one in found.items():  # one model after the other, which takes less memory
        lines, vectors = [], []
        group_of = np.array([example.group for example in one.examples], dtype=object)
        for place, method in enumerate(settings["methods"]):
            for layer in _layers(one, place):
                for group in [ALL, *(groups if len(groups) > 1 else [])]:
                    inside = np.ones(len(one.examples), dtype=bool) if group == ALL else group_of == group
                    for k, metric in enumerate(metrics):
                        known = one.known[place, layer, k] & inside
                        skipped = int((inside & ~known & one.computed[place, k]).sum())
                        vectors.append(torch.from_numpy(one.numbers[place, layer, k][known]))
                        lines.append((name, method, layer - 1 if layer else pd.NA, group, metric, skipped))
        table = pd.DataFrame([line[:-1] for line in lines], columns=["model", "method", "layer", "group", "metric"])
        names = ["mean", "std", "low", "high", "examples", "undefined"]
        numbers = pd.DataFrame(summarize_many(vectors, confidence, resamples), columns=names)
        tables.append(table.join(numbers).assign(skipped=[line[-1] for line in lines]))
    return pd.concat(tables, ignore_index=True).astype({"layer": "Int64"})


def paired_differences(found: Found, settings: Mapping[str, Any], confidence: float, resamples: int) -> DataFrame:
    """The tidy table of paired differences, see :attr:`Study.differences`."""
    lines = []
    for model, one in found.items():
        for k, metric in enumerate(settings["metrics"]):
            last = {}
            for place, method in enumerate(settings["methods"]):
                values = np.full(len(one.examples), np.nan)
                for layer in _layers(one, place):
                    values = np.where(one.known[place, layer, k], one.numbers[place, layer, k], values)
                if not np.isnan(values).all():
                    last[method] = torch.from_numpy(values)
            for difference in compare_pairs(last, confidence, resamples):
                lines.append({"model": model, "metric": metric} | difference._asdict())
    names = ["model", "metric", "one", "other", "mean", "low", "high", "p", "examples", "tied"]
    return pd.DataFrame(lines, columns=names)


def _layers(values: Values, method: int) -> list[int]:
    """The places of a method's layers. A method that has no value has one line, as one without layers."""
    return list(np.flatnonzero(values.known[method].any((1, 2)))) or [0]
