"""The student's copy of a lesson, and the command that writes it."""

from __future__ import annotations

import argparse
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

from captum_vz.errors import ArgumentError

SOLUTION, ANSWER, SUMMARY = "solution", "answer", "summary"
FOLDED = """<details{kind}>
<summary>{title}</summary>

{text}

</details>"""
NOTE = """

**This is the student's copy.** Write your answers in the place of `...`. The cells that follow use them. A closed block
of text tells an answer: open it after you have run the cells above. The solutions are in the lesson itself."""
HEADING = re.compile(r"#+ .*\n+")


def student_copy(notebook: Any) -> Any:
    """A notebook without the cells that are tagged "solution", without outputs, and with its answers folded.

    Cells tagged "answer" or "summary" tell what the cells before them show. Text becomes a block that a click opens,
    see :func:`folded`. The code of such a cell is collapsed (`jupyter.source_hidden`). The first cell, if it is text,
    says that this is a student's copy.

    Args:
        notebook: A notebook in nbformat's form, version 4: a dict with a list of cells.

    Returns:
        A new notebook. The stubs of the exercises and their checks stay.

    >>> cells = [{"cell_type": "code", "source": text, "outputs": [1], "metadata": {"tags": [tag]}}
    ...          for text, tag in [("answer = ...", "exercise"), ("answer = 42", "solution")]]
    >>> [cell["source"] for cell in student_copy({"cells": cells})["cells"]]
    ['answer = ...']
    """
    copy = deepcopy(notebook)
    copy["cells"] = [cell for cell in copy["cells"] if SOLUTION not in cell["metadata"].get("tags", [])]
    if copy["cells"] and copy["cells"][0]["cell_type"] == "markdown":
        copy["cells"][0]["source"] = "".join(copy["cells"][0]["source"]) + NOTE
    for cell in copy["cells"]:
        tells = {ANSWER, SUMMARY} & set(cell["metadata"].get("tags", []))
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            if tells:
                cell["metadata"].setdefault("jupyter", {})["source_hidden"] = True
        elif tells:
            cell["source"] = folded("".join(cell["source"]), "Read this after you have run the cells above.")
    return copy


def folded(markdown: str, title: str, kind: str = "") -> str:
    """A text as a block that a click opens. Its first heading, if it begins with one, stays outside.

    Args:
        markdown: The text.
        title: What is shown of it before the click.
        kind: A class for style sheets.

    >>> print(folded("It is *pictures*.", "The answer"))
    <details>
    <summary>The answer</summary>
    <BLANKLINE>
    It is *pictures*.
    <BLANKLINE>
    </details>
    """
    heading = HEADING.match(markdown)
    begin = heading.end() if heading else 0
    named = f' class="{kind}"' if kind else ""
    return markdown[:begin] + FOLDED.format(title=title, text=markdown[begin:].strip(), kind=named)


def add_lab(commands: Any) -> None:
    """Add the command `lab` to those of the command line."""
    lab = commands.add_parser(
        "lab",
        help="write the student's copy of a lesson",
        description="Writes copies of the lessons under tutorials/ for a class.",
    )
    kinds = lab.add_subparsers(dest="lab", required=True, metavar="COMMAND")
    student = kinds.add_parser(
        "student",
        help="a notebook without solutions and outputs",
        description="Writes a copy of a notebook without the cells that are tagged 'solution', and without outputs. "
        "Text that tells what a cell shows (tagged 'answer' or 'summary') is folded. The stubs of the exercises stay, "
        "and the package grades what the student writes there.",
        epilog="example: captum-vz lab student tutorials/09_redundant_words.ipynb",
    )
    student.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="a lesson, such as tutorials/*.ipynb")
    student.add_argument(
        "--output", type=Path, metavar="FILE", help="the copy (default: NAME_student.ipynb in the current folder)"
    )
    student.set_defaults(run=_write_copy)


def _write_copy(options: argparse.Namespace) -> None:
    try:
        import nbformat
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "captum-vz lab needs nbformat: install the extra, pip install 'captum-vz[tutorials]'."
        ) from error
    source: Path = options.notebook
    output: Path = options.output or Path(f"{source.stem}_student.ipynb")
    if not source.is_file():
        raise ArgumentError(
            f"there is no notebook {source}: pass a lesson, such as tutorials/*.ipynb of the repository."
        )
    try:
        text = source.read_text("utf-8")
        notebook: Any = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]  # nbformat is untyped
    except Exception as error:  # nbformat raises errors of several kinds
        raise ArgumentError(f"{source} is no notebook: pass a file in the format of Jupyter (.ipynb).") from error
    copy = student_copy(notebook)
    left_out = len(notebook.cells) - len(copy.cells)
    if not left_out:
        raise ArgumentError(f"{source} has no cell tagged '{SOLUTION}': pass a lesson with exercises and solutions.")
    try:
        with output.open("x", encoding="utf-8") as file:  # a student may have worked in the file
            nbformat.write(copy, file)  # type: ignore[no-untyped-call]  # as above
    except FileExistsError as error:
        raise ArgumentError(
            f"{output} exists, and may hold a student's work: pass another name with --output."
        ) from error
    print(f"{output}: {len(copy.cells)} cells, {left_out} cells with solutions left out")
