"""The two long tables of a study: scores, and values of metrics. Each model and block has a part of both.

A row of scores is keyed by example, method and layer, and a value by these and the metric. A value that is missing has
a row with the reason. What is added to a part is merged into new files, and then listed in the manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from captum_vz._files import write_whole
from captum_vz.errors import needs_extra
from captum_vz.metrics import Difference, compare_pairs
from captum_vz.metrics.intervals import summarize_many
from captum_vz.study import folder as store
from captum_vz.study.examples import Example
from captum_vz.study.folder import ALL, Block
from captum_vz.study.scoring import COLUMNS, OUT_OF_MEMORY, Row

with needs_extra("captum_vz.study", "study"):
    import pandas as pd
    import pyarrow as pa
    from pandas import DataFrame
    from pyarrow import compute, parquet

STORED: Final = ("example", "method", "layer", "deciding", "tokens", "target", "cue", "content", "scores")
KEY: Final = ["example", "method", "layer", "metric"]
_VALUES: Final = [*((name, COLUMNS[name]) for name in KEY), ("value", pa.float64()), ("skipped", pa.string())]
#: The folder of each table, and its columns.
TABLES: Final = {"scores": pa.schema([(name, COLUMNS[name]) for name in STORED]), "values": pa.schema(_VALUES)}
_ROWS: Final = ["place", "method", "layer", "metric", "value"]
_REASONS: Final = ["example", "group", "method", "metric", "skipped"]
_NAME: Final = re.compile(r"\d{2,}-.*-\d{6,}-[0-9a-f]{8}\.parquet")

SCORES: Final = ""  #: what stands for the scores themselves among the metrics of a method
#: For each method the metrics that a part lacks, after :data:`SCORES` if these are missing too.
Lacking = Mapping[str, tuple[str, ...]]
Pairs = list[tuple[str, str]]
# How many parts that hold the same are read together. One alone takes more time a row, and all of them more memory.
TOGETHER = 16


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

    A file that is missing, or whose bytes have changed, is a ValueError.
    """
    path = folder / entry[0]
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != entry[2]:
        raise _broken(path)
    names = [name for name in ("example", "method", "metric") if name in (columns or ())]
    return parquet.ParquetFile(pa.BufferReader(data), read_dictionary=names).read(columns and list(columns))


def part_of(folder: Path, settings: Mapping[str, Any], model: str, block: Block) -> dict[str, Any] | None:
    """The part of a model and a block. None: it is not there, or a file of it was deleted.

    A file of another size than when it was written is a ValueError.
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
    """Merge new rows into the part of a model and a block. They replace older rows.

    They are the scores and values of all that was lacking, and reasons in ``skipped``. `made` has two
    entries: ``weights``, the fingerprint of the model, which all its parts share, and ``made_by``, for readers.
    """
    methods = [method for method, names in lacking.items() if SCORES in names]
    pairs = [(method, metric) for method, names in lacking.items() for metric in names if metric != SCORES]
    with store.changing(folder) as settings:
        store.check_weights(folder, settings, model, made["weights"])
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
        gone = values["method"].isin(methods) | _pairs(values).isin(pairs)
        gone |= values["method"].isna() & values["metric"].isin(stale)
        values = pd.concat([values[~gone], added], ignore_index=True).drop_duplicates(KEY, keep="last")
        tables = {"scores": scores, "values": pa.Table.from_pandas(values, TABLES["values"], preserve_index=False)}

        key, stem = store.digest(holds)[:16], store.stem_of(settings, model, block)
        files = {name: write_table(folder, f"{name}/{stem}", table) for name, table in tables.items()}
        no_memory = values[values["skipped"].str.startswith(OUT_OF_MEMORY, na=False)]
        again = sorted(map(list, set(_pairs(no_memory))))
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
    """The values of the metrics of one model, without values that were made by other code than the settings name."""

    groups: np.ndarray  # of each example
    rows: DataFrame  # of values, with the place of the example, in this order; the layer -1 is none, and NaN undefined
    computed: Counter[tuple[str, str, str]]  # how many examples were computed or skipped, by group, method and metric
    reasons: DataFrame  # the rows of skipped examples


def parts_of(folder: Path, settings: Mapping[str, Any], model: str) -> Iterator[tuple[list[Example], dict[str, Any]]]:
    """The finished parts of a model, with their examples."""
    for block in store.blocks_of(settings):
        part = part_of(folder, settings, model, block)
        if part is not None:
            yield store.read_examples(folder, block), part


def _keyed(table: DataFrame, examples: Sequence[Example], settings: Mapping[str, Any]) -> DataFrame:
    """A table in the order of its examples, with their places, methods as codes, and layers as numbers.

    The layer of methods without layers is -1.
    """
    places = pd.Categorical(table["example"], [one.id for one in examples]).codes
    keys = {"place": places.astype("int32"), "layer": table["layer"].fillna(-1).astype("int16")}
    keys["method"] = pd.Categorical(table["method"], list(settings["methods"]))
    return table.assign(**keys).sort_values("place", kind="stable")


def _held_pairs(settings: Mapping[str, Any], part: Mapping[str, Any]) -> Pairs:
    """The methods and metrics that a part holds."""
    return [one for one in product(settings["methods"], settings["metrics"]) if is_held(settings, part, *one)]


def _held(table: Any, settings: Mapping[str, Any], part: Mapping[str, Any]) -> DataFrame:
    """The values and reasons of a part, or of several that hold the same, without what other code made."""
    pairs, rows = _held_pairs(settings, part), table.to_pandas()
    methods = [(name, "") for name in settings["methods"] if is_held(settings, part, name)]
    return rows[_pairs(rows).isin([*pairs, *methods, *(("", metric) for _, metric in pairs), ("", "")])]


def _pairs(table: DataFrame) -> pd.MultiIndex:
    """The method and the metric of each row. Empty: it is about all methods, or about scores."""
    return pd.MultiIndex.from_frame(table[["method", "metric"]].fillna(""))


def values_of(folder: Path, settings: Mapping[str, Any], model: str) -> Values:
    """The values of a model."""
    every, computed = list[Example](), Counter[tuple[str, str, str]]()
    rows = [pd.DataFrame(columns=_ROWS).astype({"place": int})]
    reasons = [pd.DataFrame(columns=_REASONS)]
    numbered = enumerate(parts_of(folder, settings, model))
    for _, alike in groupby(numbered, lambda one: (one[0] // TOGETHER, one[1][1]["holds"])):
        tables = []
        for _, (examples, part) in alike:
            every += examples
            counts = Counter(example.group for example in examples) | Counter({ALL: len(examples)})
            for pair in _held_pairs(settings, part):
                computed.update({(group, *pair): count for group, count in counts.items()})
            tables.append(read_table(folder, part["files"]["values"]))
        table = _held(pa.concat_tables(tables).unify_dictionaries(), settings, part)
        keyed = _keyed(table, every, settings)
        out = keyed["skipped"].notna()
        metric = pd.Categorical(keyed["metric"], list(settings["metrics"]))
        rows.append(keyed.assign(metric=metric)[~out][_ROWS])
        groups = [every[place].group for place in keyed["place"][out]]
        reasons.append(table.loc[keyed.index[out]].assign(group=groups)[_REASONS])
    found = [pd.concat(some[1:] or some, ignore_index=True) for some in (rows, reasons)]
    return Values(np.array([one.group for one in every], dtype=object), found[0], computed, found[1])


def read_rows(folder: Path, settings: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """Some columns of the rows with scores, in the order of models, examples, methods and layers."""
    schema = pa.schema([(name, (COLUMNS | {"model": pa.string()}).get(name, pa.float64())) for name in columns])
    keys, tables = ["place", "method", "layer"], [schema.empty_table()]
    stored = [name for name in STORED if name in {"example", "method", "layer", *columns}]
    for model in settings["models"]:
        for examples, part in parts_of(folder, settings, model):
            table = read_table(folder, part["files"]["scores"], stored)
            rows = _keyed(table.select(["example", "method", "layer"]).to_pandas(), examples, settings)
            held = [name for name in settings["methods"] if is_held(settings, part, name)]
            rows = rows[rows["method"].isin(held)].sort_values(keys)
            found: dict[str, Any] = {name: table[name].take(pa.array(rows.index)) for name in stored}
            if set(columns) & set(settings["metrics"]):
                values = _keyed(_held(read_table(folder, part["files"]["values"]), settings, part), examples, settings)
                values = values[values["skipped"].isna()].set_index(keys)
                for name, of_metric in values.groupby("metric")["value"]:
                    numbers = of_metric.reindex(pd.MultiIndex.from_frame(rows[keys]), fill_value=np.inf).to_numpy()
                    found[str(name)] = pa.array(numbers, mask=np.isinf(numbers))  # NaN says that it is undefined
            for name in ("group", "label"):
                found[name] = [getattr(examples[place], name) for place in rows["place"]]
            found["model"], nothing = [model] * len(rows), [None] * len(rows)
            tables.append(pa.table({name: found.get(name, nothing) for name in columns}, schema))
    return pa.concat_tables(tables)


Found = Mapping[str, Values]  #: the values of each model


def collect(folder: Path, settings: Mapping[str, Any]) -> dict[str, Values]:
    """The values of all models of a study."""
    return {model: values_of(folder, settings, model) for model in settings["models"]}


def skipped_rows(found: Found) -> DataFrame:
    """The rows without numbers, see :attr:`Study.skipped`."""
    tables = [one.reasons.assign(model=name) for name, one in found.items()]
    return pd.concat(tables, ignore_index=True)[["model", *_REASONS]]


def summarise(found: Found, settings: Mapping[str, Any], confidence: float, resamples: int) -> DataFrame:
    """The tidy summary of a study, see :attr:`Study.summary`."""
    lines, groups = [], sorted({group for one in found.values() for group in one.groups})
    groups = [ALL, *(groups if len(groups) > 1 else [])]
    for model, one in found.items():  # one model after the other, which takes less memory
        vectors = {}
        for group in groups:
            inside = one.rows if group == ALL else one.rows[one.groups[one.rows["place"]] == group]
            for key, values in inside.groupby(["method", "layer", "metric"], observed=True)["value"]:
                vectors[(group, *key)] = torch.tensor(values.to_numpy())
        layers = one.rows.groupby("method", observed=True)["layer"].unique().to_dict()
        keys = [
            (group, method, layer, metric)
            for method in settings["methods"]
            for layer in sorted(layers.get(method, [-1]))  # a method that has no value has one line
            for group in groups
            for metric in settings["metrics"]
        ]
        summaries = summarize_many([vectors.get(key, torch.empty(0)) for key in keys], confidence, resamples)
        for (group, method, layer, metric), numbers in zip(keys, summaries, strict=True):
            line = {"model": model, "method": method, "layer": None if layer < 0 else layer, "group": group}
            skipped = one.computed[group, method, metric] - numbers.examples - numbers.undefined
            lines.append(line | {"metric": metric} | numbers._asdict() | {"skipped": skipped})
    return pd.DataFrame(lines).astype({"layer": "Int64"})


def paired_differences(found: Found, settings: Mapping[str, Any], confidence: float, resamples: int) -> DataFrame:
    """The tidy table of paired differences, see :attr:`Study.differences`."""
    lines = []
    for model, one in found.items():
        for metric in settings["metrics"]:
            rows = one.rows[one.rows["metric"] == metric].sort_values("layer", kind="stable")
            last = rows.drop_duplicates(["place", "method"], keep="last")
            table = last.pivot(index="place", columns="method", values="value").dropna(axis=1, how="all")
            values = {name: torch.tensor(table[name].to_numpy()) for name in settings["methods"] if name in table}
            for difference in compare_pairs(values, confidence, resamples):
                lines.append({"model": model, "metric": metric} | difference._asdict())
    return pd.DataFrame(lines, columns=["model", "metric", *Difference._fields])
