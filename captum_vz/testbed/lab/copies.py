"""The student's copy of a lesson."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

from captum_vz.errors import ArgumentError

SOLUTION, ANSWER, SUMMARY = "solution", "answer", "summary"
NOTE = """

**This is the student's copy.** Write your answers in the place of `...`. The cells that follow use them. The
lesson itself has the solutions and the answers."""
PLACEHOLDER = "**Your answer.** Write down what you have found. The lesson itself tells its answer."
HEADING = re.compile(r"#+ .*\n+")


def student_copy(notebook: Any) -> Any:
    """A notebook without outputs, solutions, and text that tells what the cells show.

    Cells tagged "solution" are left out, and so is code tagged "answer". Of text tagged "answer" or "summary" the
    heading stays, with a place for the student's own words. The first cell, if it is text, says what the copy is.

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
    copy["cells"] = [cell for cell in copy["cells"] if not _is_left_out(cell)]
    if copy["cells"] and copy["cells"][0]["cell_type"] == "markdown":
        copy["cells"][0]["source"] = "".join(copy["cells"][0]["source"]) + NOTE
    for cell in copy["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        elif tags_of(cell) & {ANSWER, SUMMARY}:
            heading = HEADING.match("".join(cell["source"]))
            cell["source"] = (heading[0] if heading else "") + PLACEHOLDER
    return copy


def tags_of(cell: Any) -> set[str]:
    """The tags of a cell."""
    return set(cell["metadata"].get("tags", []))


def _is_left_out(cell: Any) -> bool:
    return SOLUTION in tags_of(cell) or (cell["cell_type"] == "code" and ANSWER in tags_of(cell))


def read_notebook(source: Path) -> Any:
    """Read a notebook.

    Raises:
        ArgumentError: There is no such notebook, or nbformat is not installed.
    """
    try:
        import nbformat
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "captum-vz lab needs nbformat: install the extra, pip install 'captum-vz[tutorials]'."
        ) from error
    if not source.is_file():
        raise ArgumentError(
            f"there is no notebook {source}: pass a lesson, such as tutorials/*.ipynb of the repository."
        )
    try:
        text = source.read_text("utf-8")
        notebook: Any = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]  # nbformat is untyped
    except Exception as error:  # nbformat raises errors of several kinds
        raise ArgumentError(f"{source} is no notebook: pass a file in the format of Jupyter (.ipynb).") from error
    return notebook


def write_student_copy(source: Path, output: Path) -> tuple[int, int]:
    """Write the student's copy of a lesson, see :func:`student_copy`.

    Args:
        source: A lesson.
        output: The copy. An existing file is not replaced: a student may have worked in it.

    Returns:
        How many cells the copy has, and how many are left out.

    Raises:
        ArgumentError: There is no such notebook, it has no solutions, the copy exists, or nbformat is not installed.
    """
    notebook = read_notebook(source)
    if not any(SOLUTION in tags_of(cell) for cell in notebook.cells):
        raise ArgumentError(f"{source} has no cell tagged '{SOLUTION}': pass a lesson with exercises and solutions.")
    import nbformat

    copy = student_copy(notebook)
    written: str = nbformat.writes(copy)  # type: ignore[no-untyped-call]  # as above
    try:
        file = output.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise ArgumentError(
            f"{output} exists, and may hold a student's work: pass another name with --output."
        ) from error
    try:
        with file:
            file.write(f"{written.rstrip()}\n")
    except OSError:  # a full disk: a part of the copy would stand in the way of the next try
        output.unlink(missing_ok=True)
        raise
    return len(copy.cells), len(notebook.cells) - len(copy.cells)
