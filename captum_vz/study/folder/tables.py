"""The two long tables of a study: scores, and values of metrics. Each model and block has a part of both.

A row of scores is keyed by example, method and layer, and a value by these and the metric. A value that is missing has
a row with the reason. What is added to a part is merged into new files, and then listed in the manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from captum_vz._files import write_whole
from captum_vz.errors import needs_extra
from captum_vz.study.folder import Block, changing, check_weights, digest, stem_of
from captum_vz.study.scoring.rows import COLUMNS, Row, is_out_of_memory

with needs_extra("captum_vz.study", "study"):
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import parquet

if TYPE_CHECKING:
    from pandas import DataFrame

STORED: Final = ("example", "method", "layer", "tokens", "target", "cue", "content", "scores")
_SCORES: Final = pa.schema([(name, COLUMNS[name]) for name in STORED])
KEY: Final = ["example", "method", "layer", "metric"]
_VALUES: Final = pa.schema(
    [*((name, COLUMNS[name]) for name in KEY), ("value", pa.float64()), ("skipped", pa.string())]
)
#: The folder of each table.
TABLES: Final = {"scores": _SCORES, "values": _VALUES}
_NAME: Final = re.compile(r"\d{2,}-.*-\d{6,}-[0-9a-f]{8}\.parquet")


class Piece(NamedTuple):
    """What a part lacks, or what was computed for it.

    Attributes:
        methods: Its methods.
        metrics: Their metrics.
        has_scores: Whether scores belong to it, or only the metrics.
        rows: The rows that were computed, see :meth:`Scorer.score`.
    """

    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    has_scores: bool
    rows: Sequence[Row] = ()


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
    """A table of pyarrow that the manifest lists.

    Args:
        folder: The folder of the study.
        entry: What the manifest holds of it.
        columns: The wanted columns, with names as codes. None: all, as they are.

    Raises:
        ValueError: The file is missing, or its bytes have changed.
    """
    path, data = folder / entry[0], b""
    if path.is_file():
        data = path.read_bytes()
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


def is_held(settings: Mapping[str, Any], part: Mapping[str, Any], method: str, metric: str | None = None) -> bool:
    """Whether a part holds the scores of a method, or a metric of them, computed by the code of the settings."""
    held = settings["holds"][part["holds"]]
    if held["methods"].get(method) != settings["methods"].get(method):
        return False
    return metric is None or held["metrics"].get(method, {}).get(metric) == settings["metrics"].get(metric)


def add_rows(
    folder: Path,
    codes: Mapping[str, Any],
    model: str,
    block: Block,
    added: Sequence[Piece],
    weights: str,
    made_by: Mapping[str, str],
) -> None:
    """Merge new rows into the part of a model and a block.

    Args:
        folder: The folder.
        codes: The settings with the identities of the methods and metrics that made the rows.
        model: The name of the model.
        block: The block.
        added: The rows. Those of the same methods and metrics are replaced.
        weights: The fingerprint of the model.
        made_by: The model, the device and the versions, for a reader.

    Raises:
        ValueError: The model has other weights than those that made its other parts.
    """
    before = None
    with changing(folder) as settings:
        for other in settings["parts"].get(model, {}).values():
            check_weights(folder, model, settings["holds"][other["holds"]]["weights"], weights)
        before = part_of(folder, settings, model, block)
        held: dict[str, Any] = {"methods": {}, "metrics": {}}
        tables = {name: schema.empty_table() for name, schema in TABLES.items()}
        again: set[tuple[str, str]] = set()
        if before is not None:
            held, again = settings["holds"][before["holds"]], set(map(tuple, before["again"]))
            tables = {name: read_table(folder, before["files"][name]) for name in TABLES}
        methods, metrics = dict(held["methods"]), {name: dict(one) for name, one in held["metrics"].items()}
        scores, values = tables["scores"], tables["values"].to_pandas()
        for one in added:
            stale = {name for name in one.metrics if _has_other_code(metrics, name, codes["metrics"][name])}
            if one.has_scores:
                scores = scores.filter(pc.invert(pc.is_in(scores["method"], pa.array(one.methods, pa.string()))))
            of_methods, of_metrics = values["method"].isin(one.methods), values["metric"].isin(one.metrics)
            gone = of_methods & (of_metrics | one.has_scores) | values["method"].isna() & values["metric"].isin(stale)
            done = {pair for pair in again if pair[0] in one.methods and (one.has_scores or pair[1] in one.metrics)}
            again = again - done | {(row["method"], row["metric"] or "") for row in one.rows if is_out_of_memory(row)}
            values = pd.concat([values[~gone], _values_of(one)], ignore_index=True)
            if one.has_scores:
                used = [row for row in one.rows if row["skipped"] is None]
                scores = pa.concat_tables([scores, pa.Table.from_pylist(used, schema=_SCORES)])
                metrics |= {name: {} for name in one.methods}
            methods |= {name: codes["methods"][name] for name in one.methods}
            for name in one.methods:
                metrics[name] = metrics[name] | {metric: codes["metrics"][metric] for metric in one.metrics}
        values = values.drop_duplicates(KEY, keep="last")
        tables = {"scores": scores, "values": pa.Table.from_pandas(values, schema=_VALUES, preserve_index=False)}
        holds = {"weights": weights, "methods": methods, "metrics": metrics, "made_by": dict(made_by)}
        key, stem = digest(holds)[:16], stem_of(settings, model, block)
        settings["holds"][key] = holds
        settings["parts"].setdefault(model, {})[str(block.number)] = {
            "holds": key,
            "again": [list(pair) for pair in sorted(again)],
            "files": {name: write_table(folder, f"{name}/{stem}", table) for name, table in tables.items()},
        }
        used_keys = {part["holds"] for parts in settings["parts"].values() for part in parts.values()}
        settings["holds"] = {name: settings["holds"][name] for name in sorted(used_keys)}
        kept = {name for name, *_ in settings["parts"][model][str(block.number)]["files"].values()}
    for name, *_ in before["files"].values() if before else ():
        if name not in kept:
            (folder / name).unlink(missing_ok=True)


def _has_other_code(metrics: Mapping[str, Mapping[str, str]], name: str, code: str) -> bool:
    """Whether a part holds values of other code of a metric."""
    return any(one.get(name, code) != code for one in metrics.values())


def _values_of(added: Piece) -> DataFrame:
    """The values in rows that were computed, and the reasons for missing ones."""
    found = []
    for row in added.rows:
        key = {name: row[name] for name in KEY}
        if row["skipped"] is not None:
            found.append(key | {"skipped": row["skipped"]})
        else:
            found += [key | {"metric": name, "value": row[name]} for name in added.metrics if row[name] is not None]
    return pa.Table.from_pylist(found, schema=_VALUES).to_pandas()


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
