"""The results of studies: in a terminal, as JSON and as a page."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from captum_vz.cli.output import name_files, save_page
from captum_vz.study.results import with_interval
from captum_vz.tables import heading, html_table, page, paragraph, picture

if TYPE_CHECKING:
    from pandas import DataFrame

    from captum_vz.study import Study

ALL = "all"  # the group of all examples


def show(options: argparse.Namespace, study: Study, notes: Sequence[str], metrics: Sequence[str]) -> None:
    """Show a study as the options say, in the main process only.

    Args:
        options: The options of the command.
        study: The study.
        notes: Lines on its sentences.
        metrics: The metrics that the page draws.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if options.html is not None:
        save_page(_page(study, notes, metrics), options.html)
    if options.json:
        tables = {name: _records(getattr(study, name)) for name in ("summary", "differences", "skipped")}
        print(json.dumps({"settings": study.settings, **tables}))
    elif not options.quiet:
        print(*notes, study, f"rows, summary.csv, skipped.csv and figures: {study.folder}", sep="\n")
        name_files(None, options.html)


def _page(study: Study, notes: Sequence[str], metrics: Sequence[str]) -> str:
    """The tables and figures of a study as a page."""
    parts = [paragraph(f"The study in {study.folder}. Intervals are over sentences."), *map(paragraph, notes)]
    for model, heads, rows in _tables(study.summary):
        parts += [heading(model), html_table("Means in the last layer, and their intervals", heads, rows)]
    parts += map(paragraph, study.lines())
    for metric in metrics:
        parts.append(picture(study.plot(metric), f"{metric} by layer and in the last layer, as in the table"))
    repeat = [heading("To repeat this"), *map(paragraph, study.repeat)] if study.repeat else []
    return page("Study", *parts, *_skipped(study.skipped), *repeat)


def _tables(summary: DataFrame) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """For each model the heads and rows of a table: methods by metrics, in the last layer, over all examples."""
    whole = summary[summary["group"] == ALL]
    for model, of_model in whole.groupby("model", sort=False):
        metrics = list(of_model["metric"].unique())
        last = of_model.groupby(["method", "metric"], sort=False).tail(1)
        rows = []
        for method, of_method in last.groupby("method", sort=False):
            by = {one.metric: one for one in of_method.itertuples()}
            cells = [
                with_interval(by[metric].mean, by[metric].low, by[metric].high) if by[metric].examples else "-"
                for metric in metrics
            ]
            rows.append([str(method), *cells])
        yield str(model), ["method", *metrics], rows


def _skipped(skipped: DataFrame) -> list[str]:
    """A table of the reasons for which examples were skipped, with their numbers."""
    if skipped.empty:
        return []
    counts = skipped.groupby(["model", "skipped"], sort=False).size()
    rows = [[model, reason, str(count)] for (model, reason), count in counts.items()]
    return [heading("Skipped"), html_table("Why examples were skipped", ["model", "reason", "rows"], rows)]


def _records(frame: DataFrame) -> Any:
    return json.loads(frame.to_json(orient="records", double_precision=15))
