"""`captum-vz paper`: its options, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from captum_vz.cli.errors import CommandError, study_errors
from captum_vz.cli.models import AGREEMENT, MINILM, load, sources
from captum_vz.study.blimp import blimp_examples
from captum_vz.study.example import Example
from captum_vz.study.methods import METHODS
from captum_vz.testbed import agreement_sentences


def add_paper(commands: Any) -> None:
    """Add the command's parser to those of the others."""
    sub = commands.add_parser(
        "paper",
        help="the three evaluations of Mohebbi et al. 2023, of one model or several",
        description="Runs cue alignment, probing and faithfulness by blank-out, of all methods, and writes tables, "
        "figures and a report to a folder. It goes on there if it is started again; under `accelerate launch`, all "
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
    data.add_argument("--generated", type=int, metavar="N", help="so many sentences of the package's own grammar")
    sub.add_argument(
        "--model",
        nargs="+",
        default=[AGREEMENT],
        help=f"{AGREEMENT}: the embedded model (default); {MINILM}; or folders, or Hugging Face ids, such as "
        "bert-base-uncased, roberta-base and google/electra-base-generator",
    )
    sub.add_argument(
        "--methods", nargs="+", metavar="METHOD", help=f"of {', '.join(METHODS)} (default: but gradients and flow)"
    )
    sub.add_argument("--output", type=Path, metavar="FOLDER", required=True, help="where the results are, or are to be")
    sub.add_argument("--batch-size", type=int, default=32, help="sentences that go through a model at once")
    sub.add_argument("--quiet", action="store_true", help="no progress bar, and nothing on stdout")
    sub.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the evaluations and print the report."""
    try:
        from captum_vz.study import reproduce
        from captum_vz.study._extra import PartialState
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error
    with study_errors():
        found = reproduce(
            sources(options.model),
            _examples(options),
            options.output,
            options.methods,
            batch_size=options.batch_size,
            quiet=options.quiet,
        )
    if not options.quiet and PartialState().is_main_process:
        print(found)
        print(f"\ntables, figures and this report: {options.output}")


def _examples(options: argparse.Namespace) -> list[Example]:
    if options.blimp is None:
        return [Example.from_record(record) for record in agreement_sentences(options.generated)]
    return blimp_examples(options.blimp, [load(name).tokenizer for name in options.model])
