"""`captum-vz lab grade`: notebooks of students, run with limits."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from captum_vz.cli import main
from captum_vz.testbed.lab import grade_notebook
from tests.command import refused
from tests.engine.parameters import sampled

IMPORT = "from captum_vz.testbed import check"


def check_cell(source: str, id: str = "check") -> NotebookNode:
    return new_code_cell(source, id=id, metadata={"tags": ["check"]})


def written(path: Path, *cells: str | NotebookNode) -> Path:
    found = [new_code_cell(cell) if isinstance(cell, str) else cell for cell in (IMPORT, *cells)]
    nbformat.write(new_notebook(cells=found), path)
    return path


def attempt(name: str, source: str) -> list[str | NotebookNode]:
    """A cell that tries something, and a check that is right if it was refused."""
    lines = "\n".join(f"    {line}" for line in source.splitlines())
    tried = f"try:\n{lines}\n    refused = 0\nexcept (PermissionError, MemoryError, RuntimeError):\n    refused = 1"
    return [tried, check_cell(f"check.value(refused, 1, name={name!r})", id=name.replace(" ", "-"))]


@pytest.mark.slow
def test_table_of_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "handed_in"
    folder.mkdir()
    checks = [check_cell(f"check.value({name}, 42, name={name!r})", id=name) for name in ("first", "second")]
    lesson = written(tmp_path / "lesson.ipynb", "first = second = 42", *checks)
    written(folder / "all_right.ipynb", "first = second = 42", *checks)
    written(folder / "half.ipynb", "first = ...\nsecond = 42", checks[0], "1 / 0", "undefined + 1", checks[1])
    written(folder / "changed.ipynb", "first, second = 1, 42", check_cell("check.value(42, 42)", id="first"))
    (folder / "broken.ipynb").write_text("{", "utf-8")
    table = tmp_path / "grades.csv"
    assert main(["lab", "grade", str(folder), "--lesson", str(lesson), "--csv", str(table)]) == 0
    shown = capsys.readouterr().out
    assert "broken.ipynb is no notebook" in shown
    found = pd.read_csv(table, index_col=0)
    exercises = found[["1 first", "2 second"]].astype(object)
    assert exercises.loc["all_right.ipynb"].tolist() == [True, True]
    assert exercises.loc["half.ipynb"].tolist() == [False, True]
    assert exercises.loc["changed.ipynb"].tolist() == [
        False,
        False,
    ]  # a check that was changed, and one that was deleted
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
    last = check_cell("import os\ncheck.value(os.path.getsize('a.png') > 0, True, name='own folder')", id="own")
    grade = grade_notebook(written(tmp_path / "tries.ipynb", *cells, allowed, last), memory=2)
    assert not grade.problem
    wrong = [name for name, passed in grade.exercises.items() if not passed]
    assert not wrong
    assert len(grade.exercises) == len(attempts) + 1
    assert outside.read_text("utf-8") == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside.txt", "tries.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("source", sampled(["while True: pass", "import os\nos._exit(1)"], "import os\nos._exit(1)"))
def test_notebook_that_does_not_end(tmp_path: Path, source: str) -> None:
    checks = [check_cell(f"check.value({number}, 1, name='one')", id=f"c{number}") for number in (1, 2)]
    grade = grade_notebook(written(tmp_path / "one.ipynb", checks[0], source, checks[1]), seconds=60)
    assert grade.problem
    assert list(grade.exercises.values()) == [True, False]


def test_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no notebook in" in refused(capsys, "lab", "grade", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["lab", "grade", str(tmp_path), "--seconds", "0"])
    assert "0 is not above 0" in capsys.readouterr().err
