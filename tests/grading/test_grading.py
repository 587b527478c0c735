"""`captum-vz-lessons`: copies for students, and their grades, computed with limits."""

import json
import re
from functools import partial
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from captum_vz.errors import ArgumentError
from captum_vz_lessons.__main__ import main
from captum_vz_lessons.lab import grade_notebook, lessons
from tests import command
from tests.command import Output
from tests.engine.parameters import sampled

IMPORT = "from captum_vz_lessons import check"
refused = partial(command.refused, run=main, name="captum-vz-lessons")


def check_cell(answer: str, id: str = "check") -> NotebookNode:
    """A check of an answer that has to be 1."""
    source = f"check.patch_token({answer}, 0, 0, patch=1, side=1)"
    return new_code_cell(source, id=id, metadata={"tags": ["check"]})


def written(path: Path, *cells: str | NotebookNode) -> Path:
    found = [new_code_cell(cell) if isinstance(cell, str) else cell for cell in (IMPORT, *cells)]
    nbformat.write(new_notebook(cells=found), path)
    return path


def attempt(name: str, source: str) -> list[str | NotebookNode]:
    """A cell that tries something, and a check that is right if it was refused."""
    lines = "\n".join(f"    {line}" for line in source.splitlines())
    tried = f"try:\n{lines}\n    refused = 0\nexcept (PermissionError, MemoryError, RuntimeError):\n    refused = 1"
    return [tried, check_cell("refused", id=name.replace(" ", "-"))]


@pytest.mark.slow
def test_table_of_a_class(tmp_path: Path, capfd: Output) -> None:
    folder = tmp_path / "handed_in"
    folder.mkdir()
    checks = [check_cell(name, id=name) for name in ("first", "second")]
    lesson = written(tmp_path / "lesson.ipynb", "first = second = 1", *checks)
    written(folder / "all_right.ipynb", "first = second = 1", *checks)
    written(folder / "half.ipynb", "first = ...\nsecond = 1", checks[0], "1 / 0", "undefined + 1", checks[1])
    written(folder / "changed.ipynb", "first, second = 2, 1", check_cell("1", id="first"))  # and a check deleted
    (folder / "broken.ipynb").write_text("{", "utf-8")
    table = tmp_path / "grades.csv"
    assert main(["grade", str(folder), "--lesson", str(lesson), "--csv", str(table)]) == 0
    out, err = capfd.readouterr()
    assert "broken.ipynb is no notebook" in out
    assert [line.partition(" right, ")[0] for line in err.splitlines()] == [
        "1 of 4: all_right.ipynb, 2 of 2",
        "2 of 4: broken.ipynb, 0 of 0",
        "3 of 4: changed.ipynb, 0 of 2",
        "4 of 4: half.ipynb, 1 of 2",
    ]  # no other line: a kernel keeps its warnings to itself
    assert re.search(r"half\.ipynb +open +right +1\n", out)
    found = pd.read_csv(table, index_col=0)
    exercises = found[["1 patch_token", "2 patch_token"]].astype(object)
    assert exercises.loc["all_right.ipynb"].tolist() == [True, True]
    assert exercises.loc["half.ipynb"].tolist() == [False, True]
    assert exercises.loc["changed.ipynb"].tolist() == [False, False]
    assert exercises.loc["broken.ipynb"].isna().all()
    assert found["right"].tolist() == [2, 0, 0, 1]


@pytest.mark.slow
def test_limits(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("kept", "utf-8")
    attempts = {
        "write": f"open({str(outside)!r}, 'w')",
        "low-level write": f"import os\nos.open({str(outside)!r}, os.O_WRONLY)",
        "pathlib": f"from pathlib import Path\nPath({str(outside)!r}).write_text('gone')",
        "delete": f"import os\nos.remove({str(outside)!r})",
        "rename": f"import os\nos.rename({str(outside)!r}, 'here.txt')",
        "link": f"import os\nos.symlink({str(tmp_path)!r}, 'link')\nopen('link/outside.txt', 'w')",
        "network": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        "names": "import socket\nsocket.getaddrinfo('example.org', 80)",
        "program": "import subprocess\nsubprocess.run(['true'])",
        "shell": "import os\nos.system('true')",
        "memory": "import torch\ntorch.ones(3 * 2**30 // 4)",
    }
    cells = [cell for name, source in attempts.items() for cell in attempt(name, source)]
    allowed = "open('mine.txt', 'w').write('1')\nimport matplotlib.pyplot as plt\nplt.plot([1]); plt.savefig('a.png')"
    last = check_cell("int(__import__('os').path.getsize('a.png') > 0)", id="own")
    grade = grade_notebook(written(tmp_path / "tries.ipynb", *cells, allowed, last), memory=2)
    assert not grade.problem
    assert list(grade.exercises.values()) == [True] * (len(attempts) + 1), grade.exercises
    assert outside.read_text("utf-8") == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside.txt", "tries.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("source", sampled(["while True: pass", "import os\nos._exit(1)"], "import os\nos._exit(1)"))
def test_notebook_that_does_not_end(tmp_path: Path, source: str) -> None:
    checks = [check_cell("1", id=f"c{number}") for number in (1, 2)]
    grade = grade_notebook(written(tmp_path / "one.ipynb", checks[0], source, checks[1]), seconds=60)
    assert grade.problem
    assert list(grade.exercises.values()) == [True, False]


def test_command_writes_copies(tmp_path: Path, capsys: Output) -> None:
    folder = tmp_path / "class"
    assert main(["student", "09", "10", "--folder", str(folder)]) == 0
    copies = sorted(folder.iterdir())
    assert capsys.readouterr().out == "".join(f"{path}\n" for path in copies)
    assert [path.name for path in copies] == [f"{path.stem}_student.ipynb" for path in lessons("09", "10")]
    assert not any("solution" in cell.metadata.get("tags", []) for cell in nbformat.read(copies[0], 4).cells)
    # A second time, it would overwrite what the student has written.
    assert "may hold a student's work" in refused(capsys, "student", "09", "--folder", str(folder))


def test_start_opens_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output) -> None:
    """JupyterLab's own lines are shown, the kernel's warning of its connection is not. Notebooks stay as they are."""
    lab = tmp_path / "jupyterlab.py"
    lab.write_text(
        "import sys\nprint('opens', sys.argv[1], file=sys.stderr)\nprint('to eavesdropping.', file=sys.stderr)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = tmp_path / "lessons"
    folder.mkdir()
    kept = folder / lessons()[0].name
    kept.write_text("mine", "utf-8")
    assert main(["start", "--folder", str(folder)]) == 0
    assert capfd.readouterr().err == f"opens {folder}\n"
    assert kept.read_text("utf-8") == "mine"
    assert [path.name for path in sorted(folder.iterdir())] == [path.name for path in lessons()]
    assert (folder / lessons()[1].name).read_text("utf-8") == lessons()[1].read_text("utf-8")


def test_command_refuses(tmp_path: Path, capsys: Output) -> None:
    assert "there is no notebook in" in refused(capsys, "grade", str(tmp_path))
    assert "there is no lesson '12'" in refused(capsys, "student", "12")
    written(tmp_path / "one.ipynb")
    assert "there is no folder" in refused(capsys, "grade", str(tmp_path), "--csv", str(tmp_path / "none" / "a.csv"))
    with pytest.raises(SystemExit):
        main(["grade", str(tmp_path), "--seconds", "0"])
    assert "0 is not above 0" in capsys.readouterr().err


def test_files_that_are_no_lessons(tmp_path: Path) -> None:
    from captum_vz_lessons.lab import write_student_copy

    for name, text, words in (
        ("text", "no notebook", "is no notebook"),
        ("list", json.dumps({"cells": 3}), "is no notebook"),
        ("plain", nbformat.writes(new_notebook(cells=[new_code_cell("1 + 1")])), "tagged 'solution'"),
    ):
        (tmp_path / name).write_text(text, "utf-8")
        with pytest.raises(ArgumentError, match=words):
            write_student_copy(tmp_path / name, tmp_path / "copy")
    with pytest.raises(ArgumentError, match="no notebook"):
        write_student_copy(tmp_path / "none", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
