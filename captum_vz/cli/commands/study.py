"""`captum-vz study`: methods on many sentences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from captum_vz._start import INTERRUPTED
from captum_vz.cli.options import (
    PAGE,
    CommandError,
    add_command,
    add_model,
    check_files,
    check_folder,
    one_of,
    positive,
    slow,
)
from captum_vz.errors import ArgumentError
from captum_vz.methods import METHODS, load_plugin
from captum_vz.study.examples import Example
from captum_vz.study.examples.blimp import select_blimp
from captum_vz.study.examples.files import evenly, read_csv, read_jsonl
from captum_vz.subjects import model_sources
from captum_vz.subjects.loading import find_models
from captum_vz.testbed import agreement_sentences
from captum_vz.testbed.model import EMBEDDED

#: Those of :mod:`captum_vz.study.folder.engines`, whose import needs the extra `study`.
ENGINES: Final = ("local", "accelerate", "ray")


def add_run(sub: argparse.ArgumentParser) -> None:
    """Add the options of the commands that run many sentences. Names of methods are checked after plugins are read."""
    names = f"of {', '.join(METHODS)}, or of a plugin (default: all except {slow()})"
    sub.add_argument("--methods", nargs="+", metavar="METHOD", help=names)
    sub.add_argument(
        "--plugin",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="Python files that call register_method or register_metric of captum_vz.study; they are run",
    )
    sub.add_argument(
        "--batch-size",
        type=positive,
        default=32,
        metavar="N",
        help="the most sentences in a batch (default: %(default)s)",
    )
    sub.add_argument(
        "--engine",
        choices=ENGINES,
        help="local: this process; accelerate: the processes of `accelerate launch` or `torchrun`; ray: a worker on "
        "each device of a Ray cluster (default: accelerate if several processes were launched, otherwise local)",
    )
    sub.add_argument("--quiet", action="store_true", help="no progress bar, and no tables on stdout except by --json")
    sub.add_argument("--output", type=Path, metavar="FOLDER", help="the folder of the results")
    sub.add_argument("--html", type=Path, metavar="FILE", help=PAGE)
    sub.add_argument("--json", action="store_true", help="print the tables as JSON")


def start_run(options: argparse.Namespace) -> None:
    """Check the outputs of a command that runs many sentences."""
    try:
        for path in options.plugin:
            load_plugin(path)
    except ArgumentError as error:
        raise CommandError(str(error)) from error
    check_names("method", options.methods, METHODS)
    if options.output is None:
        raise CommandError(f"{options.command} needs a folder to write to: pass --output FOLDER.")
    check_folder(options.output)
    check_files(None, options.html)


class StoppedError(CommandError):
    """Ctrl-C has ended a study, which can continue."""

    status = INTERRUPTED


@contextmanager
def study_errors() -> Iterator[None]:
    """Turn the errors of a study, a full disk and Ctrl-C into a `CommandError`."""
    try:
        yield
    except OSError as error:
        where = f"cannot use {error.filename}: " if error.filename else ""
        raise CommandError(f"{where}{error.strerror or error}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt as error:
        raise StoppedError("stopped. The same command continues from here.") from error


def check_names(kind: str, names: Sequence[str] | None, known: Collection[str]) -> None:
    """Refuse unknown names of methods or metrics, which plugins may have added."""
    try:
        for name in names or ():
            one_of(kind, known)(name)
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"--{kind}s: {error}") from error


_PATHS = ("blimp", "jsonl", "csv", "output", "html", "plugin")
EXAMPLES: Final = (
    "study --generated 50 --methods value-zeroing attention random --output results",
    "study --generated 50 --model agreement causal --metrics cue_dot cue_ap --output both --html both.html",
    "study --jsonl sentences.jsonl --output own --json",
    "study --generated 50 --plugin mine.py --methods mine attention --output own",
    "study config.toml --batch-size 8",
)


def add_study(commands: Any) -> None:
    """Add the parser of this command."""
    sub = add_command(
        commands,
        "study",
        run,
        help="evaluate methods on many sentences, with one model or several",
        description="Runs models x methods x sentences, and writes the results to a folder. If it is started again, it "
        "continues there. Under `accelerate launch` or `torchrun`, the processes share the work. For a causal model, "
        "the text ends before the target: the row of the last token is evaluated, where the model predicts the target.",
        examples=EXAMPLES,
    )
    sub.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG.toml",
        help="a file with these options by their names, such as batch-size = 64; paths in it are relative to it, and "
        "options that are typed override it",
    )
    data = sub.add_argument_group("sentences, of one or several of these")
    data.add_argument("--blimp", type=Path, metavar="FOLDER", help="the paper's five paradigms of BLiMP's data folder")
    data.add_argument(
        "--jsonl", type=Path, nargs="+", default=[], metavar="FILE", help="lines with tokens, target and cue"
    )
    data.add_argument(
        "--csv",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="tables with the columns text, target, cue, good and bad, in words",
    )
    data.add_argument(
        "--generated", type=positive, default=0, metavar="N", help="how many of the package's own grammar"
    )
    sub.add_argument("--limit", type=positive, metavar="N", help="the most sentences; of more, N evenly spaced ones")
    add_model(sub, several=True)
    add_run(sub)
    sub.add_argument(
        "--metrics",
        nargs="+",
        metavar="METRIC",
        help="such as cue_mrr, blank_out:mask:size and sanity, or of a plugin; a wrong name lists all (default: "
        "cue_dot, cue_ap, blank_out)",
    )
    sub.add_argument("--content-only", action="store_true", help="cue alignment without special tokens and the target")


def with_config(path: Path, arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """The arguments: the options of the config file, then the typed options.

    Args:
        path: The config file.
        arguments: What was typed.
        known: The names of options that a file may hold.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError as error:
            raise CommandError('a TOML file needs tomli on Python 3.10: pip install "captum-vz[study]"') from error
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is not a TOML file: {error}.") from error
    for name in settings:
        if name.replace("-", "_") not in known:
            raise CommandError(f"{path}: there is no option {name!r}; see captum-vz study --help")
    study, *typed = arguments
    # The file comes first. After an option with many values it would be one of these values.
    typed.remove(next(word for word in typed if Path(word) == path))
    return [study, str(path), *(word for name, value in settings.items() for word in _words(path, name, value)), *typed]


def _words(path: Path, name: str, value: Any) -> list[str]:
    """A setting as words of the command line."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, (str, int)) for one in values):
        raise CommandError(f"{path}: {name} is {value!r}: expected a string, a number, true or false, or a list.")
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    if name in _PATHS:
        if not all(isinstance(one, str) for one in values):
            raise CommandError(f"{path}: {name} is {value!r}: expected the name of a file or folder, in quotes.")
        values = [path.parent / one for one in values]
    return [f"--{name.replace('_', '-')}", *map(str, values)]


def run(options: argparse.Namespace) -> None:
    """Run the study and print the means of the last layers."""
    try:
        from captum_vz.cli.reports import print_study, show, study_json, study_page
        from captum_vz.study import run_study
        from captum_vz.study.results import SUMMARY
        from captum_vz.study.scoring.metrics import given_metrics
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error
    start_run(options)
    with study_errors():
        metrics = list(given_metrics(options.metrics))
        examples, notes = _examples(options)
        if not (options.output / SUMMARY).exists():  # a finished study needs no model
            find_models(options.model)
        study = run_study(
            model_sources(options.model),
            examples,
            options.output,
            options.methods,
            metrics,
            batch_size=options.batch_size,
            content_only=options.content_only,
            engine=options.engine,
            quiet=options.quiet or options.json,
        )
    parts = partial(print_study, study, notes), partial(study_json, study), partial(study_page, study, notes, metrics)
    show(options, *parts, f"rows, summary.csv, skipped.csv and figures: {study.folder}")
    with study_errors():
        study.check_used()


def _examples(options: argparse.Namespace) -> tuple[list[Example], list[str]]:
    """The examples, and lines on what is left out."""
    if options.blimp is None and not (options.jsonl or options.csv or options.generated):
        raise CommandError("study needs sentences: pass --blimp FOLDER, --jsonl FILE, --csv FILE or --generated N.")
    examples, notes = [Example.from_record(record) for record in agreement_sentences(options.generated)], []
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
