"""The notebooks as they are in the repository. `.ci/run` executes them.

Many people read a notebook without running it. So the outputs are kept. They have to be complete and free of machine
paths.
"""

import re
from pathlib import Path

import nbformat
import pytest

TUTORIALS = sorted((Path(__file__).parents[1] / "tutorials").glob("*.ipynb"))
LARGEST = 1_000_000  # bytes
MACHINE_PATH = re.compile(r"/(?:home|root|Users|tmp|work)/|[A-Z]:\\\\|site-packages")


def test_tutorials_exist() -> None:
    assert TUTORIALS


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_outputs_are_complete(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}  # no error
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_is_small_and_clean(path: Path) -> None:
    assert path.stat().st_size < LARGEST
    assert not MACHINE_PATH.search(path.read_text("utf-8"))
    notebook = nbformat.read(path, as_version=4)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in notebook.cells)
