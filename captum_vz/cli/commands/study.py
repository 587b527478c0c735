"""`captum-vz study`: methods on many sentences. A file may hold its options."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from captum_vz.app.models import find_models, sources
from captum_vz.cli.errors import CommandError, study_errors
from captum_vz.cli.options import (
    add_command,
    add_model,
    add_run,
    blimp_files,
    check_names,
    methods_of,
    positive,
    start_run,
)
from captum_vz.study.examples import Example, read_jsonl
from captum_vz.testbed import agreement_sentences

#: The names of :data:`captum_vz.study.METRICS`, whose import needs the extra `study`, and the default ones.
METRICS: Final = (
    *("cue_dot", "cue_ap", "cue_mrr", "cue_p1", "cue_p3", "blank_out"),
    *(
        f"blank_out_{removal}_{over}{size}"
        for removal in ("unk", "mask", "delete")
        for over in ("forms", "vocabulary")
        for size in ("", "_size")
    ),
    *("comprehensiveness", "sufficiency", "comprehensiveness_normalized", "sufficiency_normalized"),
    *("deletion_normalized", "monotonicity", "soft_comprehensiveness", "soft_sufficiency", "infidelity"),
    *("value_patching", "value_patching_top", "activation_patching", "activation_patching_top"),
    *("sensitivity", "sanity", "sanity_last"),
)
DEFAULT_METRICS: Final = ("cue_dot", "cue_ap", "blank_out")
_PATHS = ("blimp", "jsonl", "output", "html", "plugin")
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
        "--generated", type=positive, default=0, metavar="N", help="how many of the package's own grammar"
    )
    add_model(sub, several=True)
    add_run(sub)
    sub.add_argument(
        "--metrics",
        nargs="+",
        metavar="METRIC",
        help=f"of {', '.join(METRICS)}, or of a plugin (default: {', '.join(DEFAULT_METRICS)})",
    )
    sub.add_argument(
        "--shard-size",
        type=positive,
        default=64,
        metavar="N",
        help="sentences in a file: the most that a kill loses (default: %(default)s)",
    )
    sub.add_argument(
        "--batch-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="the most tokens in a batch (default: %(default)s)",
    )
    sub.add_argument("--content-only", action="store_true", help="cue alignment without special tokens and the target")
    sub.add_argument(
        "--removal",
        choices=("unk", "mask", "delete"),
        default="unk",
        help="the replacement of a blanked token (default: %(default)s)",
    )


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
        from captum_vz.study import METRICS as KNOWN_METRICS
        from captum_vz.study import run_study
        from captum_vz.study.results import SUMMARY
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error
    start_run(options)
    check_names("metric", options.metrics, KNOWN_METRICS)
    with study_errors():
        examples = _examples(options)
        if not (options.output / SUMMARY).exists():  # a finished study needs no model
            find_models(options.model)
        study = run_study(
            sources(options.model),
            examples,
            options.output,
            methods_of(options),
            options.metrics,
            batch_size=options.batch_size,
            batch_tokens=options.batch_tokens,
            shard_size=options.shard_size,
            content_only=options.content_only,
            removal=options.removal,
            engine=options.engine,
            command=shlex.join(options.command_line),
            data=_files(options),
            quiet=options.quiet or options.json,
        )
    parts = partial(print_study, study), partial(study_json, study), partial(study_page, study)
    show(options, *parts, f"rows, summary.csv, skipped.csv and figures: {study.folder}")
    with study_errors():
        study.check_used()


def _files(options: argparse.Namespace) -> list[Path]:
    """The files that the examples are read from."""
    return [*options.jsonl, *blimp_files(options.blimp)]


def _examples(options: argparse.Namespace) -> list[Example]:
    if options.blimp is None and not options.jsonl and not options.generated:
        raise CommandError("study needs sentences: pass --blimp FOLDER, --jsonl FILE or --generated N.")
    examples = [Example.from_record(record) for record in agreement_sentences(options.generated)]
    for path in options.jsonl:
        examples += read_jsonl(path)
    if options.blimp is not None:
        from captum_vz.study.examples.blimp import blimp_examples

        examples += blimp_examples(options.blimp)
    return examples
