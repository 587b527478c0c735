"""The lessons as they are in the repository. `python -m tests.lessons`, which `.ci/run` calls, executes them.

Many people read a notebook without running it. So the outputs are kept. They have to be complete, free of machine
paths, and hold every number that the prose quotes.
"""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from captum_vz_lessons.lab import lessons, student_copy, tags_of
from tests.lessons import (
    NOT_YET,
    RIGHT,
    TAGS,
    disorder,
    early_answers,
    minutes,
    not_handed_on,
    quoted_numbers,
    run_lesson,
    shown,
    unsupported_numbers,
)

TUTORIALS = lessons()
LARGEST = 1_000_000  # bytes
MACHINE_PATH = re.compile(r"/(?:home|root|Users|tmp|work)/|[A-Z]:\\\\|site-packages")


@pytest.fixture(params=TUTORIALS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def notebook(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def test_eleven_lessons() -> None:
    assert [path.name[:3] for path in TUTORIALS] == [f"{number:02}_" for number in range(1, 12)]


def test_lesson_asks_and_grades(notebook: NotebookNode) -> None:
    tags = [tags_of(cell) for cell in notebook.cells]
    assert sum("question" in one for one in tags) >= 2
    assert sum("exercise" in one for one in tags) >= 1
    assert not disorder(notebook)
    checks = [shown(cell) for cell in notebook.cells if "check" in tags_of(cell)]
    assert all(RIGHT in said and NOT_YET not in said for said in checks)


def test_imports_are_one_short_cell(notebook: NotebookNode) -> None:
    """A student sees at a glance what a lesson takes: imports, nothing else. No other cell sets up the notebook."""
    first, *others = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    lines = [line for line in first.splitlines() if line]
    assert all(re.match(r"(import|from) .+[^(]$", line) for line in lines)
    assert len(lines) <= 10
    assert not any("%matplotlib" in source or "IProgress" in source for source in others)


def test_outputs_are_complete(notebook: NotebookNode) -> None:
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}  # no error
    assert not [output.text for output in outputs if output.get("name") == "stderr"]  # no warning
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_lesson_is_small_and_clean(path: Path, notebook: NotebookNode) -> None:
    assert path.stat().st_size < LARGEST
    assert not MACHINE_PATH.search(path.read_text("utf-8"))
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert all(set(cell.metadata) <= {"tags"} and tags_of(cell) <= TAGS for cell in notebook.cells)


def test_page_of_lessons_has_their_minutes(path: Path, notebook: NotebookNode) -> None:
    page = (path.parent / "docs" / "teaching.md").read_text("utf-8")
    (row,) = [line.split("|") for line in page.splitlines() if line.startswith("|") and path.name in line]
    assert (int(row[2]), int(row[3])) == minutes(notebook)


def test_quoted_numbers_are_computed(notebook: NotebookNode) -> None:
    assert not unsupported_numbers(notebook)


def test_students_copy_tells_no_answer(notebook: NotebookNode) -> None:
    """The copy lacks all that quotes a result after a question or an exercise, and its cells do not need solutions."""
    assert not early_answers(notebook)
    assert not not_handed_on(notebook)
    copy = student_copy(notebook)
    nbformat.validate(copy)
    assert not [cell for cell in copy.cells if "solution" in tags_of(cell) or cell.get("outputs")]
    told = [cell.source for cell in notebook.cells if {"answer", "summary", "solution"} & tags_of(cell)]
    lines = {line for text in told for line in text.splitlines() if not line.startswith("#")}
    kept = {line for cell in copy.cells for line in cell.source.splitlines()}
    elsewhere = {line for cell in notebook.cells if cell.source not in told for line in cell.source.splitlines()}
    assert not (lines & kept) - elsewhere


# ---- The command, and what the functions above find ----------------------------------------------------------------


def lesson(*cells: NotebookNode) -> NotebookNode:
    return new_notebook(cells=list(cells))


def code(source: str, *tags: str, output: str = "") -> NotebookNode:
    outputs = [new_output("stream", name="stdout", text=output)] if output else []
    return new_code_cell(source, metadata={"tags": list(tags)}, outputs=outputs)


def exercise(stub: str, solution: str) -> list[NotebookNode]:
    check = "print('Right. one' if answer == 42 else 'Not yet. one')"
    return [code(stub, "exercise"), code(solution, "solution"), code(check, "check")]


def test_students_copy_of_a_lesson() -> None:
    told = new_markdown_cell("## Two\n\nIt is 42.", metadata={"tags": ["answer"]})
    shows = code("print(answer)", "answer")
    whole = lesson(new_markdown_cell("# One"), *exercise("answer = ...", "answer = 42  # secret"), shows, told)
    first, stub, _, answer = student_copy(whole).cells
    assert first.source.startswith("# One\n\n**This is the student's copy.**")
    assert stub.source == "answer = ..."
    assert answer.source.startswith("## Two\n\n**Your answer.**")


def test_cells_that_need_a_solution_are_found() -> None:
    cells = exercise("answer = ...", "answer = 42")
    using, rebinding = code("print(answer)"), code("verdict = grade(answer)\nanswer = verdict.answer", "check")
    assert len(not_handed_on(lesson(*cells, using))) == 1
    assert not not_handed_on(lesson(*cells, code("print(answer)", "answer")))  # the copy lacks this cell
    assert not not_handed_on(lesson(*cells[:2], rebinding, using))
    unwritten = code("def f():\n    raise NotImplementedError", "exercise")
    assert not_handed_on(lesson(unwritten, code("def f(): return 1", "solution"), code("f()")))


def test_lesson_runs_offline_and_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub is tried before its solution, and is not accepted."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("tests.lessons.LONGEST", 0)
    reaching = lesson(
        code("from urllib.request import urlopen\nfrom huggingface_hub import HfApi"),
        *(
            code(f"try:\n    {call}\nexcept Exception as error:\n    print(type(error).__name__)\nelse:\n    1 / 0")
            for call in ("HfApi().model_info('bert-base-uncased')", "urlopen('https://huggingface.co')")
        ),
        *exercise("answer = ...", "answer = 42"),
    )
    (problem,) = run_lesson(reaching)
    assert problem.endswith("more than 0.")
    assert [shown(cell).strip() for cell in reaching.cells[1:3]] == ["OfflineModeIsEnabled", "URLError"]
    assert len(reaching.cells) == 6


@pytest.mark.slow
def test_what_is_wrong_with_a_lesson_is_told() -> None:
    stale = [code("print(0.25)"), new_markdown_cell("The share is 0.24.")]
    wrong = lesson(*stale, *exercise("answer = 42", "answer = 42"), *exercise("answer = ...", "answer = 41"))
    accepted, refused, outdated = run_lesson(wrong)
    assert "the grader accepts the stub" in accepted
    assert "the solution is not accepted: Not yet." in refused
    assert "no output shows '0.24'" in outdated
    raising = lesson(code("1 / 0"))
    assert run_lesson(raising) == ["cell 0 raises ZeroDivisionError: division by zero"]


@pytest.mark.parametrize(
    ("prose", "found"),
    [
        ("a share of 0.97, in layer 3, in 200 sentences", [0.97]),
        ("44 % and 100%", [0.44, 1.0]),
        ("right in 378 of 400, in 4 of the 5", [378, 4]),
        ("from -0.02 to 0.05", [-0.02, 0.05]),
        ("`residual=0.5` and $\\frac{1}{2} 0.5$ and [this](page.md#0.5) and http://x.org/0.3", []),
        ("```python\nx = 0.3\n```\n<!-- 0.4 -->", []),
        ("section 2.2.1, version 1.2.3, 2023, layer-0.5, v0.1", []),
        ("in 1,300.5 steps", [1300.5]),
        ("Mohebbi et al. 2023 use 12 layers.", []),
        ("It is 0.5. Then 0.25, or 1.00", [0.5, 0.25, 1.0]),
    ],
)
def test_numbers_of_prose(prose: str, found: list[float]) -> None:
    assert [one.value for one in quoted_numbers(prose)] == found


@pytest.mark.parametrize(
    ("prose", "output", "is_computed"),
    [
        ("0.97", "pictures  0.9714", True),
        ("0.97", "pictures  0.9651", True),
        ("0.97", "pictures  0.9649", False),
        ("44 %", "layer 3:  44%", True),
        ("44 %", "layer 3:  0.4351", True),
        ("44 %", "layer 3:  0.45", False),
        ("-0.10", "-0.1012", True),
        ("-0.10", "0.1012", False),
        ("0.10", "-0.1012", True),
        ("about 0.6", "0.72", True),
        ("about 0.6", "0.83", False),
        ("378 of 400", "378", True),
        ("378 of 400", "377", False),
        ("0.001", "1.2e-03", True),
        ("1,300.5", "1300.5", True),
    ],
)
def test_number_is_compared_as_rounded(prose: str, output: str, is_computed: bool) -> None:
    notebook = lesson(code("", output=output), new_markdown_cell(f"The value is {prose} here."))
    assert (not unsupported_numbers(notebook)) == is_computed


def test_numbers_are_looked_for_near_the_prose() -> None:
    one, two, three = (new_markdown_cell(f"## {name}") for name in "ABC")
    quoting = new_markdown_cell("It is 0.25.")
    far = [one, code("", output="0.25"), two, code("", output="0.5"), three, quoting]
    assert unsupported_numbers(lesson(*far))
    assert not unsupported_numbers(lesson(*far[:3], quoting))
    quoting.metadata.tags = ["summary"]
    assert not unsupported_numbers(lesson(*far))
    quoting.metadata.tags = []
    tagged = [code("", output="0.25"), code("", "quoted", output="0.5"), quoting]
    assert unsupported_numbers(lesson(*tagged))
    quoting.metadata.tags = ["elsewhere"]
    assert not unsupported_numbers(lesson(*tagged))


def test_early_answers_are_found() -> None:
    question = new_markdown_cell("Which share?", metadata={"tags": ["question"]})
    reveal = code("print(share)", output="0.25")
    text, asserts = new_markdown_cell("It is 0.25."), code("assert share > 0.2")
    assert early_answers(lesson(question, reveal))  # no answer at all
    assert len(early_answers(lesson(question, reveal, text, asserts))) == 3
    assert not early_answers(lesson(text, asserts))
    for cell in (text, asserts):
        cell.metadata.tags = ["answer"]
    assert not early_answers(lesson(question, reveal, text, asserts))


def test_order_of_exercises_is_checked() -> None:
    stub, solution, check = exercise("answer = ...", "answer = 42")
    assert not disorder(lesson(stub, solution, check))
    assert disorder(lesson(stub, check))
    assert disorder(lesson(stub, solution))
    assert disorder(lesson(solution, check))
    assert disorder(lesson(code("", "hidden")))
    question = new_markdown_cell("Which token?", metadata={"tags": ["question"]})
    assert not disorder(lesson(question, code("1")))
    assert disorder(lesson(question, new_markdown_cell("The answer")))
