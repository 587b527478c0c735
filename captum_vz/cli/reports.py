"""The results of studies: in a terminal, as JSON and as a page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from captum_vz._start import is_terminal
from captum_vz.cli.output import name_files, print_table, save_page
from captum_vz.study.results import with_interval
from captum_vz.tables import heading, page, paragraph, picture
from captum_vz.tables import html_table as table

if TYPE_CHECKING:
    from pandas import DataFrame

    from captum_vz.study import Study

ALL = "all"  # the group of all examples


def show(
    options: argparse.Namespace,
    tables: Callable[[], None],
    json_text: Callable[[], str],
    page_text: Callable[[], str],
    files: str,
) -> None:
    """Show the results as the options say, in the main process only.

    Args:
        options: The options of the command.
        tables: Prints the tables.
        json_text: Gives them as JSON.
        page_text: Gives the page.
        files: A line that names the files in the folder of the results.
    """
    if not _is_main_process():
        return
    if options.html is not None:
        save_page(page_text(), options.html)
    if options.json:
        print(json_text())
    elif not options.quiet:
        tables()
        print(files)
        name_files(None, options.html)


def _is_main_process() -> bool:
    """Whether this process is the only one, or the main one under `accelerate launch`."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def print_study(study: Study, notes: Sequence[str] = ()) -> None:
    """The means of the last layers, one table for each model; before it, notes on the sentences."""
    print(*notes, sep="\n", end="\n" * bool(notes))
    if not is_terminal(sys.stdout):
        print(study)
        return
    for model, heads, rows in _tables(study.summary):
        print(model)
        print_table(heads, rows)
    print(*study.lines(), sep="\n")


def study_json(study: Study) -> str:
    """The settings, the summary and the skipped examples as JSON."""
    names = ("summary", "differences", "skipped")
    tables = {name: _records(getattr(study, name)) for name in names}
    return json.dumps({"settings": study.settings, **tables})


def study_page(study: Study, notes: Sequence[str] = (), metrics: Sequence[str] = ()) -> str:
    """The tables and figures of a study as a page.

    Args:
        study: The study.
        notes: Lines on its sentences.
        metrics: The metrics that are drawn. Empty: all that the folder has.
    """
    parts = [paragraph(f"The study in {study.folder}. Intervals are over sentences."), *map(paragraph, notes)]
    for model, heads, rows in _tables(study.summary):
        parts += [heading(model), table("Means in the last layer, and their intervals", heads, rows)]
    parts += map(paragraph, study.lines())
    for metric in metrics or study.settings["metrics"]:
        parts.append(picture(study.plot(metric), f"{metric} by layer and in the last layer, as in the table"))
    return page("Study", *parts, *_skipped(study.skipped), *_repeat(study.repeat))


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
    return [heading("Skipped"), table("Why examples were skipped", ["model", "reason", "rows"], rows)]


def _repeat(lines: Sequence[str]) -> list[str]:
    """The foot of a page: what a reader needs to repeat the study."""
    return [heading("To repeat this"), *map(paragraph, lines)] if lines else []


def _records(frame: DataFrame) -> Any:
    return json.loads(frame.to_json(orient="records", double_precision=15))
