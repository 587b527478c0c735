"""The two long tables of a study: scores, and values of metrics. Each model and block has a part of both.

A row of scores is keyed by example, method and layer, and a value by these and the metric. A value that is missing has
a row with the reason. What is added to a part is merged into new files, and then listed in the manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from captum_vz._files import write_whole
from captum_vz.errors import needs_extra
from captum_vz.metrics import compare_pairs
from captum_vz.metrics.intervals import summarize_many
from captum_vz.study.examples import Example
from captum_vz.study.folder import (
    ALL,
    Block,
    blocks_of,
    changing,
    check_weights,
    digest,
    read_examples,
    stem_of,
)
from captum_vz.study.scoring import COLUMNS, OUT_OF_MEMORY, Row

with needs_extra("captum_vz.study", "study"):
    import pandas as pd
    import pyarrow as pa
    from pyarrow import compute, parquet

if TYPE_CHECKING:
    from pandas import DataFrame

STORED: Final = ("example", "method", "layer", "deciding", "tokens", "target", "cue", "content", "scores")
KEY: Final = ["example", "method", "layer", "metric"]
_VALUES: Final = [*((name, COLUMNS[name]) for name in KEY), ("value", pa.float64()), ("skipped", pa.string())]
#: The folder of each table, and its columns.
TABLES: Final = {"scores": pa.schema([(name, COLUMNS[name]) for name in STORED]), "values": pa.schema(_VALUES)}
_NAME: Final = re.compile(r"\d{2,}-.*-\d{6,}-[0-9a-f]{8}\.parquet")

#: What stands for the scores themselves among the metrics of a method.
SCORES: Final = ""
#: For each method the metrics that a part lacks, after :data:`SCORES` if these are missing too.
Lacking = Mapping[str, tuple[str, ...]]


def write_table(folder: Path, stem: str, table: Any) -> list[Any]:
    """Write a table of pyarrow, and return the name, the size and the digest of its file for the manifest."""
    buffer = pa.BufferOutputStream()
    parquet.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    data: bytes = buffer.getvalue().to_pybytes()
    checksum = hashlib.sha256(data).hexdigest()
    name = f"{stem}-{checksum[:8]}.parquet"
    write_whole(folder / name, data)
    return [name, len(data), checksum]


def read_table(folder: Path, entry: Sequence[Any], columns: Sequence[str] | None = None) -> Any:
    """A table of pyarrow that the manifest lists: all columns, or some, with names as codes.

    Raises:
        ValueError: The file is missing, or its bytes have changed.
    """
    path = folder / entry[0]
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != entry[2]:
        raise _broken(path)
    names = [name for name in ("example", "method", "metric") if name in (columns or ())]
    return parquet.ParquetFile(pa.BufferReader(data), read_dictionary=names).read(columns and list(columns))


def part_of(folder: Path, settings: Mapping[str, Any], model: str, block: Block) -> dict[str, Any] | None:
    """The part of a model and a block. None: it is not there, or a file of it was deleted.

    Raises:
        ValueError: A file has another size than when it was written.
    """
    part: dict[str, Any] | None = settings["parts"].get(model, {}).get(str(block.number))
    for name, size, _ in part["files"].values() if part else ():
        if not (folder / name).is_file():
            return None
        if (folder / name).stat().st_size != size:
            raise _broken(folder / name)
    return part


def is_held(settings: Mapping[str, Any], part: Mapping[str, Any], method: str, metric: str = SCORES) -> bool:
    """Whether a part holds the scores of a method, or a metric of them, computed by the code of the settings."""
    held = settings["holds"][part["holds"]]
    if held["methods"].get(method) != settings["methods"].get(method):
        return False
    return metric == SCORES or held["metrics"].get(method, {}).get(metric) == settings["metrics"].get(metric)


def add_rows(
    folder: Path,
    codes: Mapping[str, Mapping[str, str]],
    model: str,
    block: Block,
    lacking: Lacking,
    rows: Sequence[Row],
    made: Mapping[str, Any],
) -> None:
    """Merge new rows into the part of a model and a block, in the place of older ones.

    They are the scores and values of all that was lacking, and reasons in ``skipped``. `made` has the fingerprint of
    the model, which must be that of its other parts, and what a reader is told of it.
    """
    methods = [method for method, names in lacking.items() if SCORES in names]
    pairs = [(method, metric) for method, names in lacking.items() for metric in names if metric != SCORES]
    with changing(folder) as settings:
        check_weights(folder, settings, model, made["weights"])
        before = part_of(folder, settings, model, block)
        held: dict[str, Any] = {"methods": {}, "metrics": {}}
        tables = {name: schema.empty_table() for name, schema in TABLES.items()}
        if before is not None:
            held = settings["holds"][before["holds"]]
            tables = {name: read_table(folder, before["files"][name]) for name in TABLES}
        metrics = {name: dict(one) for name, one in held["metrics"].items()} | {name: {} for name in methods}
        fresh = {metric: codes["metrics"][metric] for _, metric in pairs}
        older = {pair for one in held["metrics"].values() for pair in one.items()}
        stale = {metric for metric, code in older if code != fresh.get(metric, code)}
        for method, metric in pairs:
            metrics[method][metric] = fresh[metric]
        own = held["methods"] | {name: codes["methods"][name] for name in methods}
        holds = {"weights": made["weights"], "methods": own, "metrics": metrics, "made_by": made["made_by"]}

        kept = compute.invert(compute.is_in(tables["scores"]["method"], pa.array(methods, pa.string())))
        new = [row for row in rows if row["metric"] is None and row["skipped"] is None]
        scores = pa.concat_tables([tables["scores"].filter(kept), pa.Table.from_pylist(new, TABLES["scores"])])
        others = [row for row in rows if row["metric"] is not None or row["skipped"] is not None]
        added, values = pa.Table.from_pylist(others, TABLES["values"]).to_pandas(), tables["values"].to_pandas()
        gone = values["method"].isin(methods) | pd.MultiIndex.from_frame(values[["method", "metric"]]).isin(pairs)
        gone |= values["method"].isna() & values["metric"].isin(stale)
        values = pd.concat([values[~gone], added], ignore_index=True).drop_duplicates(KEY, keep="last")
        tables = {"scores": scores, "values": pa.Table.from_pandas(values, TABLES["values"], preserve_index=False)}

        key, stem = digest(holds)[:16], stem_of(settings, model, block)
        files = {name: write_table(folder, f"{name}/{stem}", table) for name, table in tables.items()}
        no_memory = values[values["skipped"].str.startswith(OUT_OF_MEMORY, na=False)]
        again = sorted(no_memory[["method", "metric"]].fillna("").drop_duplicates().to_numpy().tolist())
        settings["holds"][key] = holds
        settings["parts"].setdefault(model, {})[str(block.number)] = {"holds": key, "again": again, "files": files}
        used = {part["holds"] for parts in settings["parts"].values() for part in parts.values()}
        settings["holds"] = {name: settings["holds"][name] for name in sorted(used)}
    for name in {one[0] for one in before["files"].values()} - {one[0] for one in files.values()} if before else ():
        (folder / name).unlink(missing_ok=True)


def remove_unlisted(folder: Path, settings: Mapping[str, Any]) -> None:
    """Remove files of rows that a killed process wrote and did not list. Other files, such as copies, stay."""
    parts = [part for parts in settings["parts"].values() for part in parts.values()]
    listed = {folder / name for part in parts for name, *_ in part["files"].values()}
    for path in (path for name in TABLES for path in (folder / name).glob("*.parquet")):
        if path not in listed and _NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _broken(path: Path) -> ValueError:
    what = "its bytes have changed since it was written" if path.is_file() else "it is missing"
    return ValueError(
        f"{path} cannot be read: {what}. If it is broken, delete it, and start the study again with the same settings. "
        "Its rows are then computed again."
    )


class Values(NamedTuple):
    """The values of the metrics of one model, without those that other code than that of the settings made.

    Attributes:
        examples: The examples.
        numbers: The values `(methods, 1 + layers, metrics, examples)`, "no layer" first. NaN is undefined, infinity was
            skipped or not computed.
        computed: Which were computed or skipped, `(methods, metrics, examples)`.
        reasons: The rows of skipped examples.
    """

    examples: list[Example]
    numbers: np.ndarray
    computed: np.ndarray
    reasons: DataFrame

    def layers(self, method: int) -> list[int]:
        """The places of a method's layers. A method that has no value has one line, as one without layers."""
        return list(np.flatnonzero(~np.isinf(self.numbers[method]).all((1, 2)))) or [0]


#: A part, with its block and the examples of this block.
Part = tuple[list[Example], Mapping[str, Any]]


def parts_of(folder: Path, settings: Mapping[str, Any], model: str) -> Iterator[Part]:
    """The finished parts of a model, with their examples."""
    for block in blocks_of(settings):
        part = part_of(folder, settings, model, block)
        if part is not None:
            yield read_examples(folder, block), part


def values_of(folder: Path, settings: Mapping[str, Any], parts: Sequence[Part]) -> Values:
    """The values in some parts."""
    methods, metrics, start = list(settings["methods"]), list(settings["metrics"]), 0
    count, names = sum(len(examples) for examples, _ in parts), ["example", "group", "method", "metric", "skipped"]
    numbers = np.full((len(methods), 1, len(metrics), count), np.inf)
    computed = np.zeros((len(methods), len(metrics), count), dtype=bool)
    reasons = [pd.DataFrame(columns=names)]
    for examples, part in parts:
        table = read_table(folder, part["files"]["values"], [*KEY, "value", "skipped"]).to_pandas()
        place, method, metric, layer = _keys(table, [one.id for one in examples], methods, metrics)
        # The row after the methods is for all of them, and the last one for unknown ones. Columns are alike.
        held = np.zeros((len(methods) + 2, len(metrics) + 2), dtype=bool)
        held[:-2, :-2] = [[is_held(settings, part, one, other) for other in metrics] for one in methods]
        held[:-2, -2] = [is_held(settings, part, one) for one in methods]
        held[-2] = held[:-2].any(0) | (np.arange(len(metrics) + 2) == len(metrics))
        computed[..., start : start + len(examples)] = held[:-2, :-2, None]
        out, used = table["skipped"].notna().to_numpy(), held[method, metric]
        some = used & ~out
        if (more := int(layer[some].max(initial=0)) + 1 - numbers.shape[1]) > 0:
            numbers = np.pad(numbers, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=np.inf)
        numbers[method[some], layer[some], metric[some], start + place[some]] = table["value"].to_numpy()[some]
        rows = np.flatnonzero(used & out)
        rows = rows[np.argsort(place[rows], kind="stable")]
        groups = [examples[one].group for one in place[rows]]
        reasons.append(table.iloc[rows].astype(object).assign(group=groups)[names])
        start += len(examples)
    every = [example for examples, _ in parts for example in examples]
    return Values(every, numbers, computed, pd.concat(reasons, ignore_index=True))


def _keys(table: DataFrame, *names: Sequence[str]) -> tuple[np.ndarray, ...]:
    """The places of the examples, the methods and the metrics among some names, and of the layers, "no layer" first.

    No name is after all names, and an unknown name last.
    """
    found = []
    for column, some in zip(("example", "method", "metric"), names, strict=False):
        places = {name: place for place, name in enumerate(some)}
        known = [places.get(name, -1) for name in table[column].cat.categories]
        found.append(np.array([*known, len(some)])[table[column].cat.codes])
    return *found, table["layer"].fillna(-1).to_numpy(int) + 1


def read_rows(folder: Path, settings: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """Some columns of the rows with scores, in the order of models, examples, methods and layers."""
    schema = pa.schema([(name, (COLUMNS | {"model": pa.string()}).get(name, pa.float64())) for name in columns])
    methods, metrics, tables = list(settings["methods"]), list(settings["metrics"]), [schema.empty_table()]
    for model in settings["models"]:
        for examples, part in parts_of(folder, settings, model):
            stored = [name for name in STORED if name in {"example", "method", "layer", *columns}]
            table = read_table(folder, part["files"]["scores"], stored)
            keys = table.select(["example", "method", "layer"]).to_pandas()
            place, method, layer = _keys(keys, [one.id for one in examples], methods)
            order = np.lexsort((layer, method, place))
            order = order[np.array([*(is_held(settings, part, name) for name in methods), False])[method[order]]]
            place, method, layer = place[order], method[order], layer[order]
            numbers: Any = None
            found = {}
            if set(columns) & set(metrics):
                numbers = values_of(folder, settings, [(examples, part)]).numbers
                numbers = numbers[method, np.minimum(layer, numbers.shape[1] - 1), :, place]
            for name, kind in zip(schema.names, schema.types, strict=True):
                if name in metrics:
                    values = numbers[:, metrics.index(name)]
                    found[name] = pa.array(values, mask=np.isinf(values))
                elif name in ("group", "label"):
                    found[name] = pa.array([getattr(examples[one], name) for one in place], kind)
                elif name in stored:
                    found[name] = table[name].take(pa.array(order)).cast(kind)
                else:
                    found[name] = pa.repeat(pa.scalar(model if name == "model" else None, kind), len(order))
            tables.append(pa.table(found, schema))
    return pa.concat_tables(tables)


#: The values of each model.
Found = Mapping[str, Values]


def collect(folder: Path, settings: Mapping[str, Any]) -> dict[str, Values]:
    """The values of all models of a study."""
    return {model: values_of(folder, settings, [*parts_of(folder, settings, model)]) for model in settings["models"]}


def skipped_rows(found: Found) -> DataFrame:
    """The rows without numbers, see :attr:`Study.skipped`."""
    tables = [one.reasons.assign(model=name) for name, one in found.items()]
    return pd.concat(tables, ignore_index=True)[["model", "example", "group", "method", "metric", "skipped"]]


def summarise(found: Found, settings: Mapping[str, Any], confidence: float, resamples: int) -> DataFrame:
    """The tidy summary of a study, see :attr:`Study.summary`."""
    tables, groups = [], sorted({example.group for one in found.values() for example in one.examples})
    for name, one in found.items():  # one model after the other, which takes less memory
        lines, vectors = [], []
        group_of = np.array([example.group for example in one.examples], dtype=object)
        for place, method in enumerate(settings["methods"]):
            for layer in one.layers(place):
                for group in [ALL, *(groups if len(groups) > 1 else [])]:
                    inside = (group_of == group) | (group == ALL)
                    for k, metric in enumerate(settings["metrics"]):
                        numbers = one.numbers[place, layer, k][inside]
                        known = ~np.isinf(numbers)
                        skipped = int((~known & one.computed[place, k][inside]).sum())
                        vectors.append(torch.from_numpy(numbers[known]))
                        lines.append((name, method, layer - 1 if layer else pd.NA, group, metric, skipped))
        keys = pd.DataFrame(lines, columns=["model", "method", "layer", "group", "metric", "skipped"])
        names = ["mean", "std", "low", "high", "examples", "undefined"]
        numbers = pd.DataFrame(summarize_many(vectors, confidence, resamples), columns=names)
        tables.append(pd.concat([keys.drop(columns="skipped"), numbers, keys["skipped"]], axis=1))
    return pd.concat(tables, ignore_index=True).astype({"layer": "Int64"})


def paired_differences(found: Found, settings: Mapping[str, Any], confidence: float, resamples: int) -> DataFrame:
    """The tidy table of paired differences, see :attr:`Study.differences`."""
    lines = []
    for model, one in found.items():
        for k, metric in enumerate(settings["metrics"]):
            last = {}
            for place, method in enumerate(settings["methods"]):
                values = np.full(len(one.examples), np.nan)
                for layer in one.layers(place):
                    numbers = one.numbers[place, layer, k]
                    values = np.where(np.isinf(numbers), values, numbers)
                if not np.isnan(values).all():
                    last[method] = torch.from_numpy(values)
            for difference in compare_pairs(last, confidence, resamples):
                lines.append({"model": model, "metric": metric} | difference._asdict())
    names = ["model", "metric", "one", "other", "mean", "low", "high", "p", "examples", "tied"]
    return pd.DataFrame(lines, columns=names)
