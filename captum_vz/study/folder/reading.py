"""The rows of one model and one block, joined from the parts that a study and its extensions have written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from captum_vz.errors import needs_extra
from captum_vz.study.folder.storage import Part, blocks_of, check_weights, parts_of, read_part
from captum_vz.study.scoring.rows import COLUMNS

with needs_extra("captum_vz.study", "study"):
    import pandas as pd
    import pyarrow as pa

if TYPE_CHECKING:
    from pandas import DataFrame

#: What tells the rows of one model apart.
KEYS: Final = ["example", "method", "layer"]


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
