"""Lessons in a class: the notebooks, the students' copies, and their grades.

A copy has the exercises without the solutions. For a grade, the notebook that a student hands in runs in a process of
its own, with limits, and the verdicts of its checks make a table.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import nbformat

from captum_vz.errors import ArgumentError
from captum_vz_lessons import MIME_TYPE

if TYPE_CHECKING:
    from pandas import DataFrame

# The tags of cells.
SOLUTION, ANSWER, SUMMARY, CHECK = "solution", "answer", "summary", "check"
NOTE: Final = """

**This is the student's copy.** Write your answers in the place of `...`. The cells that follow use them. The
lesson itself has the solutions and the answers."""
PLACEHOLDER: Final = "**Your answer.** Write down what you have found. The lesson itself tells its answer."
HEADING: Final = re.compile(r"#+ .*\n+")

# No download: the hub is off. Libraries keep their caches and settings in the scratch folder.
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "MPLBACKEND": "Agg"}
_HOMES: Final = ("HOME", "IPYTHONDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR")
_LIMIT: Final = "from captum_vz_lessons.limits import limit_process\nlimit_process({folder!r}, {memory!r})"
#: Kernels keep their warnings to themselves: one warns of every connection over TCP, also on one machine.
QUIET_KERNEL: Final = ["--IPKernelApp.log_level=ERROR"]


def lessons(*wanted: str) -> list[Path]:
    """The notebooks of the lessons, or those whose names begin as one of `wanted`, such as "09"."""
    installed = Path(__file__).parent / "notebooks"
    folder = installed if installed.is_dir() else Path(__file__).parents[1]  # in a checkout
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    for one in wanted:
        if not any(path.name.startswith(one) for path in found):
            known = ", ".join(path.stem for path in found)
            raise ArgumentError(f"there is no lesson {one!r}: pass the beginning of one of {known}.")
    return [path for path in found if path.name.startswith(wanted or "")]


def student_copy(notebook: Any) -> Any:
    """A notebook (nbformat, version 4) without outputs, solutions, and text that tells what the cells show.

    Cells tagged "solution" are left out, and so is code tagged "answer". Of text tagged "answer" or "summary" the
    heading stays, with a place for the student's own words. The first cell, if it is text, says what the copy is. The
    stubs of the exercises and their checks stay.

    >>> cells = [{"cell_type": "code", "source": text, "outputs": [1], "metadata": {"tags": [tag]}}
    ...          for text, tag in [("answer = ...", "exercise"), ("answer = 42", "solution")]]
    >>> [cell["source"] for cell in student_copy({"cells": cells})["cells"]]
    ['answer = ...']
    """
    copy = deepcopy(notebook)
    left_out = {"markdown": {SOLUTION}, "code": {SOLUTION, ANSWER}}
    copy["cells"] = [cell for cell in copy["cells"] if not tags_of(cell) & left_out.get(cell["cell_type"], set())]
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


def read_notebook(source: Path) -> Any:
    """Read a notebook. An `ArgumentError` says that there is none."""
    if not source.is_file():
        raise ArgumentError(f"there is no notebook {source}: pass a file in the format of Jupyter (.ipynb).")
    try:
        return nbformat.reads(source.read_text("utf-8"), as_version=4)
    except Exception as error:  # nbformat raises errors of several kinds
        raise ArgumentError(f"{source} is no notebook: pass a file in the format of Jupyter (.ipynb).") from error


def write_student_copy(source: Path, output: Path) -> None:
    """Write the student's copy of a lesson, see :func:`student_copy`. An `ArgumentError` says that there are none."""
    notebook = read_notebook(source)
    if not any(SOLUTION in tags_of(cell) for cell in notebook.cells):
        raise ArgumentError(f"{source} has no cell tagged '{SOLUTION}': pass a lesson with exercises and solutions.")
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(f"{nbformat.writes(student_copy(notebook)).rstrip()}\n")
    except FileExistsError as error:
        raise ArgumentError(f"{output} exists, and may hold a student's work: pass another folder.") from error


@dataclass(frozen=True)
class Grade:
    """What the checks of one notebook said."""

    file: str  # the name of the notebook
    exercises: dict[str, bool] = field(default_factory=dict)  # which are right, by number and name, such as "1 rollout"
    problem: str = ""  # why some checks did not run


def grade_notebook(notebook: Path, *, lesson: Path | None = None, seconds: float = 600, memory: float = 8) -> Grade:
    """Run a student's notebook and read its verdicts.

    It runs in a process of its own, in a scratch folder that is deleted afterwards, without network, and with limits of
    time and memory (in GiB, on Linux). A cell that fails is passed over, so that later exercises count. The limits stop
    accidents, not malicious code. The checks of the lesson, if it is given, take the place of those in the notebook,
    which the student may have changed. A file that cannot be read is graded too: its grade tells the problem.
    """
    try:
        content = read_notebook(notebook)
    except ArgumentError as error:
        return Grade(notebook.name, problem=str(error))
    checks = [cell for cell in content.cells if CHECK in tags_of(cell)]
    if lesson is not None:
        own = {cell.get("id"): cell for cell in content.cells}
        asked = [cell for cell in read_notebook(lesson).cells if CHECK in tags_of(cell)]
        checks = [own.get(cell["id"], cell) for cell in asked]  # one that the student has deleted counts as open
        for cell, right in zip(checks, asked, strict=True):
            cell["source"], cell["outputs"] = right["source"], []
    with TemporaryDirectory(prefix="captum-vz-grade-") as scratch:
        problem = _run(content, scratch, seconds, memory)
    exercises = {}
    for number, cell in enumerate(checks, 1):
        given = re.search(r"\bcheck\.(\w+)", str(cell["source"]))  # a check that failed has no verdict with a name
        verdicts = [output.get("data", {}).get(MIME_TYPE) for output in cell.get("outputs", [])]
        right = any(isinstance(one, dict) and one.get("passed") is True for one in verdicts)
        exercises[f"{number} {given[1] if given else 'unknown'}"] = right
    return Grade(notebook.name, exercises, problem)


def _run(content: Any, scratch: str, seconds: float, memory: float) -> str:
    """Execute a notebook in place. Returns why it did not reach its end, or ""."""
    from nbclient import NotebookClient

    end = time.monotonic() + seconds
    cells = content.cells
    content.cells = [nbformat.v4.new_code_cell(_LIMIT.format(folder=scratch, memory=memory)), *cells]
    client = NotebookClient(
        content,
        kernel_name="python3",
        allow_errors=True,
        extra_arguments=QUIET_KERNEL,
        timeout_func=lambda cell: max(1, int(end - time.monotonic())),
        resources={"metadata": {"path": scratch}},
    )
    try:
        with client.setup_kernel(env={**os.environ, **_OFFLINE, **dict.fromkeys(_HOMES, scratch)}):
            for index, cell in enumerate(content.cells):
                if cell.cell_type == "code":
                    cell.outputs = []
                    client.execute_cell(cell, index)
    except Exception as error:  # whatever a notebook does, the others are graded
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'no message'}"
    finally:
        content.cells = cells
    return ""


def grade_table(grades: Sequence[Grade]) -> DataFrame:
    """One row for each notebook: its exercises (True, False, or missing in another lesson), `right`, and `problem`."""
    import pandas as pd

    names = dict.fromkeys(name for grade in grades for name in grade.exercises)
    rows = [{name: grade.exercises.get(name) for name in names} for grade in grades]
    table = pd.DataFrame(rows, index=pd.Index([grade.file for grade in grades], name="notebook"), columns=list(names))
    table["right"] = [sum(grade.exercises.values()) for grade in grades]
    table["problem"] = [grade.problem for grade in grades]
    return table
