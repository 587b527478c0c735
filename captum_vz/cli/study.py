"""`captum-vz study`: methods on many sentences."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from captum_vz.cli.output import check_files, check_folder, name_files, save_page
from captum_vz.errors import ArgumentError
from captum_vz.methods import load_plugin
from captum_vz.study import Study, run_study
from captum_vz.study.examples import Example, evenly, read_csv, read_jsonl
from captum_vz.study.examples.blimp import select_blimp
from captum_vz.study.scoring.metrics import given_metrics
from captum_vz.testbed import agreement_sentences
from captum_vz.testbed.models import EMBEDDED
from captum_vz.visualization.forms import heading, html_table, page, paragraph, picture


def study(options: argparse.Namespace) -> None:
    """Run the study and print the means of the last layers."""
    for path in options.plugin:
        load_plugin(path)
    check_folder(options.folder)
    check_files(None, options.html)
    with _study_errors():
        metrics = list(given_metrics(options.metrics))
        examples, notes = _examples(options)
        how = {"engine": options.engine, "quiet": options.quiet or options.json}
        found = run_study(options.model, examples, options.folder, options.methods, metrics, **how)
    if os.environ.get("RANK", "0") == "0":  # the main process of several
        _show(options, found, notes, metrics)
    with _study_errors():
        found.check_used()


@contextmanager
def _study_errors() -> Iterator[None]:
    """Name the file of an error of the disk, and tell after Ctrl-C how to continue."""
    try:
        yield
    except OSError as error:
        where = f"cannot use {error.filename}: " if error.filename else ""
        raise ArgumentError(f"{where}{error.strerror or error}") from error
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("stopped. The same command continues from here.") from error


def _examples(options: argparse.Namespace) -> tuple[list[Example], list[str]]:
    if options.blimp is None and not (options.jsonl or options.csv or options.grammar):
        raise ArgumentError("study needs sentences: pass --blimp FOLDER, --jsonl FILE, --csv FILE or --grammar N.")
    examples, notes = [Example.from_record(record) for record in agreement_sentences(options.grammar or 0)], []
    for path in options.jsonl:
        examples += read_jsonl(path)
    for path in options.csv:
        examples += read_csv(path)
    if options.blimp is not None:
        selection = select_blimp(options.blimp, whole=not set(options.model) & set(EMBEDDED), prefix=options.prefix)
        examples += selection.examples
        notes.append(str(selection))
    if options.limit is not None and options.limit < len(examples):
        notes.append(f"{options.limit:,} of {len(examples):,} sentences, evenly spaced (--limit).")
        examples = evenly(examples, options.limit)
    return examples, notes


def _show(options: argparse.Namespace, study: Study, notes: Sequence[str], metrics: Sequence[str]) -> None:
    """Show a study and notes on its sentences as the options say."""
    if options.html is not None:
        save_page(_page(study, notes, metrics), options.html)
    if options.json:
        tables = {name: getattr(study, name) for name in ("summary", "differences", "skipped")}
        texts = {name: one.to_json(orient="records", double_precision=15) for name, one in tables.items()}
        print(json.dumps({"settings": study.settings, **{name: json.loads(one) for name, one in texts.items()}}))
    elif not options.quiet:
        print(*notes, study.told(metrics), f"rows, summary.csv, skipped.csv and figures: {study.folder}", sep="\n")
        name_files(None, options.html)


def _page(study: Study, notes: Sequence[str], metrics: Sequence[str]) -> str:
    parts = [paragraph(f"The study in {study.folder}. Intervals are over sentences."), *map(paragraph, notes)]
    for model, means in study.means(metrics, digits=2).items():
        heads, rows = ["method", *means.columns], [[str(method), *row] for method, *row in means.itertuples()]
        parts += [heading(model), html_table("Means in the last layer, and their intervals", heads, rows)]
    parts += map(paragraph, study.lines(metrics))
    for metric in metrics:
        parts.append(picture(study.plot(metric), f"{metric} by layer and in the last layer, as in the table"))
    counts = study.skipped.groupby(["model", "skipped"], sort=False).size()
    if len(counts):
        rows = [[model, reason, str(count)] for (model, reason), count in counts.items()]
        parts += [heading("Skipped"), html_table("Why examples were skipped", ["model", "reason", "rows"], rows)]
    parts += [heading("To repeat this"), *map(paragraph, study.repeat)] if study.repeat else []
    return page("Study", *parts)
