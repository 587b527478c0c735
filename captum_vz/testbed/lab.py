"""The student's copy of a lesson."""

from __future__ import annotations

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


def write_student_copy(source: Path, output: Path) -> tuple[int, int]:
    """Write a notebook without the cells that are tagged "solution", and without outputs.

    Args:
        source: A lesson.
        output: The copy. An existing file is not replaced: a student may have worked in it.

    Returns:
        How many cells the copy has, and how many are left out.

    Raises:
        ArgumentError: There is no such notebook, it has no solutions, the copy exists, or nbformat is not installed.
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
    return len(copy.cells), left_out
