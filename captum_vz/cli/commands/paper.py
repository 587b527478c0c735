"""`captum-vz paper`: the three evaluations of Mohebbi et al. 2023."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any, Final

from captum_vz.app.models import find_models, load, sources
from captum_vz.cli.errors import CommandError, study_errors
from captum_vz.cli.options import add_command, add_model, add_run, blimp_files, methods_of, positive, start_run
from captum_vz.cli.output import working
from captum_vz.study.examples import Example
from captum_vz.study.examples.blimp import select_blimp
from captum_vz.testbed import agreement_sentences

EXAMPLES: Final = (
    "paper --generated 200 --output results",
    "paper --generated 200 --model agreement causal --methods value-zeroing alti --output both --html both.html",
    "paper --blimp blimp/data --output held-out",
)


def add_paper(commands: Any) -> None:
    """Add the parser of this command."""
    sub = add_command(
        commands,
        "paper",
        run,
        help="the three evaluations of Mohebbi et al. 2023, of one model or several",
        description="Runs cue alignment, probing, faithfulness by blank-out, sanity checks and a truth by patching, of "
        "all methods, and writes tables, figures and a report to a folder. If it is started again, it continues there. "
        "Under `accelerate launch`, the processes share the work. For a causal model, the text ends before the target: "
        "the row of the last token is evaluated, where the model predicts the target, and sentences whose cue comes "
        "later are skipped.",
        examples=EXAMPLES,
    )
    data = sub.add_mutually_exclusive_group(required=True)
    data.add_argument(
        "--blimp",
        type=Path,
        metavar="FOLDER",
        help="BLiMP's data folder: the held-out halves of the paper's five paradigms, pairs whose forms are a single "
        "token for all the models",
    )
    data.add_argument("--generated", type=positive, metavar="N", help="how many of the package's own grammar")
    sub.add_argument(
        "--controls",
        type=int,
        metavar="N",
        help="how many sentences of the package's own grammar the sanity checks and the truths by patching take "
        "(default: as many as there are sentences, 40 at most; 0: none)",
    )
    add_model(sub, several=True)
    add_run(sub)


def run(options: argparse.Namespace) -> None:
    """Run the evaluations and print the report."""
    try:
        from captum_vz.cli.reports import print_reproduction, reproduction_json, reproduction_page, show
        from captum_vz.paper import reproduce
        from captum_vz.paper.report import REPORT
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error
    start_run(options)
    with study_errors():
        if not (options.output / REPORT).exists():
            find_models(options.model)
        examples, about = _examples(options)
        found = reproduce(
            sources(options.model),
            examples,
            options.output,
            methods_of(options),
            batch_size=options.batch_size,
            quiet=options.quiet or options.json,
            about=about,
            controls=options.controls,
            engine=options.engine,
            command=shlex.join(options.command_line),
            data=blimp_files(options.blimp),
            title="the grammar" if options.blimp is None else "BLiMP, held out",
        )
    parts = partial(print_reproduction, found), partial(reproduction_json, found), partial(reproduction_page, found)
    show(options, *parts, f"\ntables, figures and this report: {options.output}")


def _examples(options: argparse.Namespace) -> tuple[list[Example], str]:
    """The examples, and a sentence on how they were selected."""
    if options.blimp is None:
        examples = [Example.from_record(record) for record in agreement_sentences(options.generated)]
        return examples, f"{len(examples):,} sentences of the package's own grammar. None was dropped before the study."
    with working("reading BLiMP"):
        selection = select_blimp(options.blimp, [load(name).tokenizer for name in options.model])
    return selection.examples, str(selection)
