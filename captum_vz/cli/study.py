"""`captum-vz study`: methods on many sentences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from captum_vz.cli import parsed
from captum_vz.cli.output import check_files, check_folder
from captum_vz.cli.reports import show
from captum_vz.errors import ArgumentError
from captum_vz.methods import load_plugin
from captum_vz.study import run_study
from captum_vz.study.examples import Example, evenly, read_csv, read_jsonl
from captum_vz.study.examples.blimp import select_blimp
from captum_vz.study.results import SUMMARY
from captum_vz.study.scoring.metrics import given_metrics
from captum_vz.subjects import model_sources
from captum_vz.subjects.loading import find_models
from captum_vz.testbed import agreement_sentences
from captum_vz.testbed.model import EMBEDDED

_PATHS = ("blimp", "jsonl", "csv", "folder", "html", "plugin")


def study(options: argparse.Namespace) -> None:
    """Run the study and print the means of the last layers."""
    if options.config is not None:
        typed = _with_config(options.config, options.command_line[1:], options.names)
        options = argparse.Namespace(**{**vars(options), **vars(parsed(typed))})
    for path in options.plugin:
        load_plugin(path)
    if options.folder is None:
        raise ArgumentError("study needs a folder to write to: pass --folder FOLDER.")
    check_folder(options.folder)
    check_files(None, options.html)
    with _study_errors():
        metrics = list(given_metrics(options.metrics))
        examples, notes = _examples(options)
        if not (options.folder / SUMMARY).exists():  # a finished study needs no model
            find_models(options.model)
        found = run_study(
            model_sources(options.model),
            examples,
            options.folder,
            options.methods,
            metrics,
            batch_size=options.batch_size,
            content_only=options.content_only,
            engine=options.engine,
            quiet=options.quiet or options.json,
        )
    show(options, found, notes, metrics)
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


def _with_config(path: Path, typed: Sequence[str], known: Collection[str]) -> list[str]:
    """The arguments: the options of the config file, then the typed options.

    Args:
        path: The config file.
        typed: What was typed.
        known: The names of options that a file may hold.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # of the extra study
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not a TOML file: {error}.") from error
    for name in settings:
        if name.replace("-", "_") not in known:
            raise ArgumentError(f"{path}: there is no option {name!r}; see captum-vz study --help")
    # The file comes first. After an option with many values it would be one of these values.
    study, *rest = typed
    rest.remove(next(word for word in rest if Path(word) == path))
    return [study, str(path), *(word for name, value in settings.items() for word in _words(path, name, value)), *rest]


def _words(path: Path, name: str, value: Any) -> list[str]:
    """A setting as words of the command line."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, (str, int)) for one in values):
        raise ArgumentError(f"{path}: {name} is {value!r}: expected a string, a number, true or false, or a list.")
    if isinstance(value, bool):
        return [f"--{name.replace(chr(95), chr(45))}"] if value else []
    if name in _PATHS:
        if not all(isinstance(one, str) for one in values):
            raise ArgumentError(f"{path}: {name} is {value!r}: expected the name of a file or folder, in quotes.")
        values = [path.parent / one for one in values]
    return [f"--{name.replace('_', '-')}", *map(str, values)]


def _examples(options: argparse.Namespace) -> tuple[list[Example], list[str]]:
    """The examples, and lines on what is left out."""
    if options.blimp is None and not (options.jsonl or options.csv or options.grammar):
        raise ArgumentError("study needs sentences: pass --blimp FOLDER, --jsonl FILE, --csv FILE or --grammar N.")
    examples, notes = [Example.from_record(record) for record in agreement_sentences(options.grammar or 0)], []
    for path in options.jsonl:
        examples += read_jsonl(path)
    for path in options.csv:
        examples += read_csv(path)
    if options.blimp is not None:
        selection = select_blimp(options.blimp, whole=not set(options.model) & set(EMBEDDED))
        examples += selection.examples
        notes.append(str(selection))
    if options.limit is not None and options.limit < len(examples):
        notes.append(f"{options.limit:,} of {len(examples):,} sentences, evenly spaced (--limit).")
        examples = evenly(examples, options.limit)
    return examples, notes
