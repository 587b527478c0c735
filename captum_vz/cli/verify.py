"""`captum-vz verify` compares the maps of a model with the definition. `captum-vz demo` serves a page."""

from __future__ import annotations

import argparse
import warnings
from typing import Final

import captum_vz
from captum_vz.cli.output import check_files, check_text, name_files, save_page, working
from captum_vz.subjects import text_subject_of
from captum_vz.subjects.loading import AGREEMENT
from captum_vz.subjects.texts import prepare_text, remarks
from captum_vz.tables import html_table, page, paragraph
from captum_vz.verification import VerificationReport

TEXT: Final = "The keys to the old cabinet are on the table, but nobody has found them yet."
AGREEMENT_TEXT: Final = "the pictures of some hat [MASK] scaring marcus."


def verify(options: argparse.Namespace) -> None:
    """Verify the model and print the report.

    Raises:
        SystemExit: With status 1, if a check fails.
    """
    text = options.text or (AGREEMENT_TEXT if options.model == AGREEMENT else TEXT)
    check_text(text)
    check_files(None, options.html)
    with working(f"loading {options.model}") as say:
        subject = text_subject_of(options.model)
        prepared = prepare_text(subject.model, subject.tokenizer, text)
        for remark in remarks(text, subject, prepared, str(prepared.token)):
            warnings.warn(remark, stacklevel=1)

        def advance(what: str) -> None:
            say(f"checks of {len(subject.layers)} layers: {what}")

        report = captum_vz.verify(subject.model, prepared.inputs, subject.layers, advance=advance)
    if options.html is not None:
        save_page(_page(report, text, options.model), options.html)
    if options.json:
        print(report.to_json())
    else:
        in_full = options.verbose or not report.passed
        print(report if in_full else f"{report.verdict}\na table of all checks: --verbose")
        name_files(None, options.html)
    if not report.passed:
        raise SystemExit(1)


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
        html_table("Each kind of check, in the layer that is worst", heads, rows),
        *(paragraph(f"{name}: {note}") for name, note in report.notes()),
        html_table("All checks", ["check", "layer", "outcome", "difference", "allowed", "note"], detail),
    )


def demo(options: argparse.Namespace) -> None:
    """Serve the page."""
    from captum_vz.demo import serve

    serve(options.model, host=options.host, port=options.port, max_tokens=options.max_tokens, open_browser=options.open)
