"""`captum-vz lab`: copies of the lessons for a class."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from captum_vz.cli.errors import CommandError
from captum_vz.cli.options import add_command, check_files
from captum_vz.testbed.lab import write_student_copy

EXAMPLES: Final = (
    "lab student tutorials/09_redundant_words.ipynb",
    "lab student tutorials/09_redundant_words.ipynb --output class/09.ipynb",
)


def add_lab(commands: Any) -> None:
    """Add the parser of this command."""
    help, description = "write the student's copy of a lesson", "Writes copies of the lessons under tutorials/."
    lab = add_command(commands, "lab", run, help=help, description=description, examples=EXAMPLES)
    kinds = lab.add_subparsers(dest="lab", required=True, metavar="COMMAND")
    student = add_command(
        kinds,
        "student",
        run,
        help="a notebook without solutions and outputs",
        description="Writes a copy of a notebook without the cells that are tagged 'solution', and without outputs. "
        "Text that tells what a cell shows (tagged 'answer' or 'summary') is left out too, except its heading. The "
        "stubs of the exercises stay, and the package grades what the student writes there.",
        examples=EXAMPLES,
    )
    student.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="a lesson, such as tutorials/*.ipynb")
    student.add_argument(
        "--output", type=Path, metavar="FILE", help="the copy (default: NAME_student.ipynb in the current folder)"
    )


def run(options: argparse.Namespace) -> None:
    """Write the copy."""
    output: Path = options.output or Path(f"{options.notebook.stem}_student.ipynb")
    check_files(None, output)
    try:
        cells, left_out = write_student_copy(options.notebook, output)
    except OSError as error:
        raise CommandError(f"cannot write {output}: {error.strerror or error}.") from error
    print(f"{output}: {cells} cells, {left_out} cells with solutions or answers left out")
