"""`captum-vz verify`: compare the maps of a model with the definition of Value Zeroing."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from captum_vz import verify
from captum_vz.cli.options import add_command, add_model, add_outputs, check_files, check_text, read_text
from captum_vz.cli.output import is_terminal, print_table, save_page, working
from captum_vz.subjects import text_subject_of
from captum_vz.subjects.loading import AGREEMENT
from captum_vz.tables import html_table as table
from captum_vz.tables import page, paragraph
from captum_vz.verification import VerificationReport

TEXT = "The keys to the old cabinet are on the table, but nobody has found them yet."
AGREEMENT_TEXT = "the pictures of some hat [MASK] scaring marcus."
EXAMPLES: Final = (
    "verify",
    'verify "the pictures of some hat" --model causal',
    "verify --model minilm --verbose --html report.html",
    'verify "some hat [MASK] small." --json',
)


def add_verify(commands: Any) -> None:
    """Add the parser of this command."""
    sub = add_command(
        commands,
        "verify",
        run,
        help="compare the maps of a model with the definition of Value Zeroing",
        description="Compares the map of each layer with the definition, checks padding, batches and rounding, and "
        "prints a verdict. The exit status is 0 if all checks pass, and 1 if one fails. Long texts are "
        "computed in other ways than short ones, so pass a text as long as those that you explain.",
        examples=EXAMPLES,
    )
    sub.add_argument("text", metavar="TEXT", nargs="?", help="a sentence (default: one of the package)")
    add_model(sub)
    sub.add_argument("--verbose", action="store_true", help="print a table of all checks, also if they pass")
    add_outputs(sub, "where to write all checks of all layers as JSON", "all checks of all layers")


def run(options: argparse.Namespace) -> None:
    """Verify the model and print the report.

    Raises:
        SystemExit: With status 1, if a check fails.
    """
    if options.text is not None:
        check_text(options.text)
    check_files(None, options.output, options.html)
    with working(f"loading {options.model}") as say:
        loaded = text_subject_of(options.model)
        text = options.text or (AGREEMENT_TEXT if options.model == AGREEMENT else TEXT)
        prepared = read_text(text, loaded)

        def advance(what: str) -> None:
            say(f"checks of {len(loaded.layers)} layers: {what}")

        report = verify(loaded.model, prepared.inputs, loaded.layers, advance=advance)
    if options.output is not None:
        save_page(report.to_json(), options.output)
    if options.html is not None:
        save_page(_page(report, text, options.model), options.html)
    if options.json:
        print(report.to_json(), flush=True)
    else:
        _print(report, options.verbose or not report.passed)
        for what, path in (("report", options.output), ("page", options.html)):
            if path is not None:
                print(f"{what}: {path}")
    if not report.passed:
        raise SystemExit(1)


def _print(report: VerificationReport, with_table: bool) -> None:
    if not with_table:
        print(report.verdict)
        print("a table of all checks: --verbose", flush=True)
        return
    if not is_terminal(sys.stdout):
        print(report, flush=True)
        return
    print(report.verdict)
    heads, *rows = report.lines()
    print_table(heads, rows, right=(2, 3, 4))
    for name, note in report.notes():
        print(f"{name}: {note}", flush=True)


def _page(report: VerificationReport, text: str, model: str) -> str:
    heads, *rows = report.lines()
    detail = [
        [check.name, "model" if check.layer is None else check.layer, check.outcome]
        + ["" if value is None else f"{value:.1e}" for value in (check.difference, check.allowed)]
        + [check.note]
        for check in report.checks
    ]
    return page(
        f"Verification of {model}",
        paragraph(report.verdict),
        paragraph(f"Text: {text}"),
        table("Each kind of check, in the layer that is worst", heads, rows),
        *(paragraph(f"{name}: {note}") for name, note in report.notes()),
        table("All checks", ["check", "layer", "outcome", "difference", "allowed", "note"], detail),
    )
