"""`captum-vz paper`: its options and its output."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from captum_vz.cli.errors import CommandError, study_errors
from captum_vz.cli.models import AGREEMENT, MINILM, find_models, load, sources
from captum_vz.cli.options import add_methods, check_folder, is_main_process
from captum_vz.study.examples.blimp import select_blimp
from captum_vz.study.examples.example import Example
from captum_vz.study.methods import check_methods
from captum_vz.testbed import agreement_sentences


def add_paper(commands: Any) -> None:
    """Add the command's parser to those of the others."""
    sub = commands.add_parser(
        "paper",
        help="the three evaluations of Mohebbi et al. 2023, of one model or several",
        description="Runs cue alignment, probing and faithfulness by blank-out, of all methods, and writes tables, "
        "figures and a report to a folder. If it is started again, it continues there. Under `accelerate launch`, the "
        "processes share the work.",
    )
    data = sub.add_mutually_exclusive_group(required=True)
    data.add_argument(
        "--blimp",
        type=Path,
        metavar="FOLDER",
        help="BLiMP's data folder: the held-out halves of the paper's five paradigms, pairs whose forms are a single "
        "token for all the models",
    )
    data.add_argument("--generated", type=int, metavar="N", help="the number of sentences of the package's own grammar")
    sub.add_argument(
        "--model",
        nargs="+",
        default=[AGREEMENT],
        help=f"{AGREEMENT}: the embedded model (default); {MINILM}; or folders, or Hugging Face ids, such as "
        "bert-base-uncased, roberta-base and google/electra-base-generator",
    )
    add_methods(sub)
    sub.add_argument("--output", type=Path, metavar="FOLDER", required=True, help="the folder of the results")
    sub.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the evaluations and print the report."""
    try:
        from captum_vz.study import reproduce
        from captum_vz.study.paper.report import REPORT
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error
    with study_errors():
        check_methods(options.methods)
        check_folder(options.output)
        if not (options.output / REPORT).exists():
            find_models(options.model)
        examples, about = _examples(options)
        found = reproduce(
            sources(options.model),
            examples,
            options.output,
            options.methods,
            batch_size=options.batch_size,
            quiet=options.quiet,
            about=about,
        )
    if not options.quiet and is_main_process():
        print(found)
        print(f"\ntables, figures and this report: {options.output}")


def _examples(options: argparse.Namespace) -> tuple[list[Example], str]:
    """The examples, and a sentence on how they were selected."""
    if options.blimp is None:
        examples = [Example.from_record(record) for record in agreement_sentences(options.generated)]
        return examples, f"{len(examples):,} sentences of the package's own grammar. None was dropped before the study."
    selection = select_blimp(options.blimp, [load(name).tokenizer for name in options.model])
    return selection.examples, str(selection)
