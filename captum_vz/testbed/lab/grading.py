"""The grades of a class: each student's notebook runs in a process of its own, and its verdicts make a table."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from captum_vz.errors import ArgumentError
from captum_vz.testbed.check.verdict import MIME_TYPE
from captum_vz.testbed.lab.copies import read_notebook, tags_of

if TYPE_CHECKING:
    from pandas import DataFrame

CHECK: Final = "check"
# No download: the hub is off. Libraries keep their caches and settings in the scratch folder.
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "MPLBACKEND": "Agg"}
_HOMES: Final = ("HOME", "IPYTHONDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR")
_LIMIT: Final = "from captum_vz.testbed.lab.limits import limit_process\nlimit_process({folder!r}, {memory!r})"


@dataclass(frozen=True)
class Grade:
    """What the checks of one notebook said.

    Attributes:
        file: The name of the notebook.
        exercises: Whether each exercise is right, by its number and name, such as "1 rollout".
        problem: Why some checks did not run, or "".
    """

    file: str
    exercises: dict[str, bool] = field(default_factory=dict)
    problem: str = ""


def grade_notebook(notebook: Path, *, lesson: Path | None = None, seconds: float = 600, memory: float = 8) -> Grade:
    """Run a student's notebook and read its verdicts.

    It runs in a process of its own, in a scratch folder that is deleted afterwards, without network, and with limits of
    time and memory. A cell that fails is passed over, so that later exercises count. The limits hold back mistakes, and
    no code that means harm.

    Args:
        notebook: The notebook. A file that cannot be read is graded too: its grade tells the problem.
        lesson: The lesson. Its checks take the place of those in the notebook, which the student may have changed.
        seconds: The time that the notebook may take.
        memory: The memory that its process may take, in GiB, on Linux.
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
    exercises = {f"{number} {_name(cell)}": _is_right(cell) for number, cell in enumerate(checks, 1)}
    return Grade(notebook.name, exercises, problem)


def _run(content: Any, scratch: str, seconds: float, memory: float) -> str:
    """Execute a notebook in place. Returns why it did not reach its end, or ""."""
    try:
        from nbclient import NotebookClient
    except ModuleNotFoundError as error:
        raise ArgumentError("grading needs nbclient: install the extra, pip install 'captum-vz[tutorials]'.") from error
    import nbformat

    end = time.monotonic() + seconds
    limit = nbformat.v4.new_code_cell(_LIMIT.format(folder=scratch, memory=memory))  # type: ignore[no-untyped-call]
    cells = content.cells
    content.cells = [limit, *cells]
    client = NotebookClient(
        content,
        kernel_name="python3",
        allow_errors=True,
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


def _name(cell: Any) -> str:
    """The name of a check's exercise, read from its source, because a check that failed has no verdict."""
    source = str(cell["source"])
    given = re.search(r"""\bname=["']([^"']+)["']""", source) or re.search(r"\bcheck\.(\w+)", source)
    return given[1] if given else "unknown"


def _is_right(cell: Any) -> bool:
    """Whether a check's verdict is right. A check without a verdict counts as open."""
    found = [output.get("data", {}).get(MIME_TYPE) for output in cell.get("outputs", [])]
    return any(isinstance(one, dict) and one.get("passed") is True for one in found)


def grade_table(grades: Sequence[Grade]) -> DataFrame:
    """One row for each notebook: its exercises (True, False, or missing in another lesson), `right`, and `problem`."""
    import pandas as pd

    names = dict.fromkeys(name for grade in grades for name in grade.exercises)
    rows = [{name: grade.exercises.get(name) for name in names} for grade in grades]
    table = pd.DataFrame(rows, index=pd.Index([grade.file for grade in grades], name="notebook"), columns=list(names))
    table["right"] = [sum(grade.exercises.values()) for grade in grades]
    table["problem"] = [grade.problem for grade in grades]
    return table
