"""Run the lessons under `tutorials/` and compare what they say with what they compute.

`python -m tests.lessons` runs all lessons, `python -m tests.lessons 03 04` some, and `--write` keeps the outputs. For
each exercise, the stub is tried before the solution: the grader must not accept it. The checks must hand on the
package's answers to the cells that use them. The student's copies run too with `--copies`, with all stubs unsolved;
`.ci/run` runs one of them where it grades a lesson from the wheel.
tutorials/README.md says how a lesson is made.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbformat import NotebookNode

from captum_vz_lessons.lab import QUIET_KERNEL, lessons, student_copy, tags_of

FOLDER = Path(__file__).parents[1] / "tutorials"
TAGS = {"question", "exercise", "solution", "check", "answer", "quoted", "summary", "elsewhere"}
RIGHT, NOT_YET = "Right. ", "Not yet. "
SECONDS = 600
LONGEST = 180  # seconds of the processor that a lesson may take
# No download: the hub is off, and requests over HTTP are sent to a port that refuses them.
OFFLINE = {"HF_HUB_OFFLINE": "1", "no_proxy": "", "NO_PROXY": ""} | dict.fromkeys(
    ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
)

# Formulas, code, addresses and comments are no prose, and 95 % is the usual level of an interval.
NO_PROSE = re.compile(
    r"95 %\s+(?:confidence\s+)?interval|```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$|<!--.*?-->|\]\([^)]*\)|https?://\S+",
    re.DOTALL,
)
NUMBER = re.compile(
    r"(?P<about>\babout )?(?<![\w.,/:-])(?P<sign>-?)(?P<digits>\d+(?:,\d{3})*(?:\.\d+)?)"
    r"(?P<unit> ?%|(?P<of> of (?:the )?\d+))?(?![\w]|\.\d)"
)
ASSERTED = re.compile(r"^\s*assert .*[<>] ?-?\d", re.MULTILINE)  # a result is above or below a number
COMPUTED = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?:[^\S\n]?%)?", re.IGNORECASE)


class Quoted(NamedTuple):
    """A number in the prose of a lesson: its value, and half a unit of its last digit."""

    text: str
    value: float
    half: float

    def is_in(self, numbers: list[float]) -> bool:
        """Whether one of the numbers rounds to this one. A number without a sign may be a size."""
        sizes = numbers if self.text.startswith("-") else [abs(one) for one in numbers]
        return any(abs(one - abs(self.value) if self.value >= 0 else one - self.value) <= self.half for one in sizes)


def quoted_numbers(markdown: str) -> Iterator[Quoted]:
    """The numbers of a text that some output must hold: decimals, percentages, and "378 of 400".

    Other whole numbers are names or counts (layer 3, 200 sentences). "about 0.6" allows two units of the last digit.
    """
    for match in NUMBER.finditer(NO_PROSE.sub(" ", markdown)):
        digits, unit = match["digits"].replace(",", ""), match["unit"] or ""
        is_share = unit.strip() == "%"
        if not ("." in digits or is_share or match["of"]):
            continue
        places = len(digits.partition(".")[2]) + 2 * is_share
        value = float(digits) * (-1 if match["sign"] else 1) / (100 if is_share else 1)
        yield Quoted(
            f"{match['sign']}{match['digits']}{unit}", value, 10.0**-places * (2 if match["about"] else 0.5) + 1e-9
        )


def computed_numbers(cell: NotebookNode) -> list[float]:
    """The numbers that the outputs of a code cell show as text. A percentage is a share."""
    texts: list[str] = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        html = re.sub(r"<style.*?</style>|<[^>]+>", " ", data.get("text/html", ""), flags=re.DOTALL)
        texts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/markdown", ""), unescape(html)]
    found = [match[0].replace(",", "") for text in texts for match in COMPUTED.finditer(text)]
    return [float(one.rstrip("% ")) / 100 if one.endswith("%") else float(one) for one in found]


def sections(notebook: NotebookNode) -> list[list[NotebookNode]]:
    """The cells of each section. A section begins with a heading."""
    found: list[list[NotebookNode]] = [[]]
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and re.match(r"#+ ", cell.source):
            found.append([])
        found[-1].append(cell)
    return [section for section in found if section]


def unsupported_numbers(notebook: NotebookNode) -> list[str]:
    """The numbers of the prose that no output shows.

    The output has to be in the same section or in the section before. If cells of these are tagged "quoted", only
    their outputs count. Markdown tagged "summary" may quote any section, markdown tagged "elsewhere" other texts.
    """
    parts = sections(notebook)
    everything = [number for cell in notebook.cells for number in computed_numbers(cell)]
    missing = []
    for index, section in enumerate(parts):
        near = [cell for one in parts[max(0, index - 1) : index + 1] for cell in one if cell.cell_type == "code"]
        near = [cell for cell in near if "quoted" in tags_of(cell)] or near
        numbers = [number for cell in near for number in computed_numbers(cell)]
        for cell in section:
            if cell.cell_type == "markdown" and "elsewhere" not in tags_of(cell):
                known = everything if "summary" in tags_of(cell) else numbers
                missing += [
                    f"{one.text!r} in {cell.source[:60]!r}"
                    for one in quoted_numbers(cell.source)
                    if not one.is_in(known)
                ]
    return missing


def shown(cell: NotebookNode) -> str:
    """What the outputs of a cell show as text."""
    return "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "") + output.get("evalue", "")
        for output in cell.get("outputs", [])
    )


def early_answers(notebook: NotebookNode) -> list[str]:
    """Where a student could read an answer before giving one.

    The text that answers a question is tagged "answer", so that the student's copy lacks it. After a question or an
    exercise, text of the same section that quotes results has such a tag too, and so has code that asserts a result.
    """
    found = []
    for section in sections(notebook):
        asked = waiting = False
        for cell in section:
            tags = tags_of(cell)
            if "question" in tags:
                found += [f"no answer before {cell.source[:60]!r}."] if waiting else []
                waiting = True
            waiting = waiting and not ("answer" in tags and cell.cell_type == "markdown")
            is_open = cell.cell_type == "markdown" and not tags & {"answer", "summary", "elsewhere", "solution"}
            if asked and is_open and (quoted := [one.text for one in quoted_numbers(cell.source)]):
                found.append(f"{cell.source[:60]!r} quotes {quoted} and is not tagged 'answer'.")
            if asked and cell.cell_type == "code" and "answer" not in tags and ASSERTED.search(cell.source):
                found.append(f"{cell.source[:60]!r} asserts a result and is not tagged 'answer'.")
            asked = asked or bool(tags & {"question", "exercise"})
        found += [f"no answer to the last question of {section[0].source[:60]!r}."] if waiting else []
    return found


def disorder(notebook: NotebookNode) -> list[str]:
    """What is wrong with the order of questions and exercises.

    An exercise is a stub, then its solution (one cell or several), then its check. A question is followed by code.
    """
    found = []
    expected = ""
    for index, cell in enumerate(notebook.cells):
        tags = tags_of(cell)
        if unknown := tags - TAGS:
            found.append(f"cell {index} has unknown tags {sorted(unknown)}.")
        if "exercise" in tags:
            found += [f"cell {index}: the exercise before has no {expected}."] if expected else []
            expected = "solution"
        if "solution" in tags and cell.cell_type == "code" and expected == "solution":
            expected = "check"
        if "check" in tags:
            found += [] if expected == "check" else [f"cell {index} checks no exercise with a solution."]
            expected = ""
        if "question" in tags:
            after = notebook.cells[index + 1 : index + 2]
            found += [] if after and after[0].cell_type == "code" else [f"cell {index}: no code after the question."]
    return [*found, *([f"the last exercise has no {expected}."] if expected else [])]


def not_handed_on(notebook: NotebookNode) -> list[str]:
    """The names that a cell uses and that a student who solves nothing lacks.

    A solution binds names. If its stub does not, a check has to, before other cells use them.
    """
    open_names: set[str] = set()
    stub: set[str] = set()
    missing = []
    for cell in notebook.cells:
        tags = tags_of(cell)
        if cell.cell_type != "code" or ("answer" in tags and "solution" not in tags):
            continue
        tree = ast.parse(cell.source)
        if "exercise" in tags:
            stub = bound_names(tree)
        elif "solution" in tags:
            open_names |= bound_names(tree) - stub
        else:
            names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
            stored = {one.id for one in names if isinstance(one.ctx, ast.Store)} | bound_names(tree)
            lacking = sorted({one.id for one in names} & open_names - stored)
            missing += [f"{name} is not handed on to {cell.source[:60]!r}." for name in lacking if "check" not in tags]
            open_names -= stored
    return missing


def bound_names(tree: ast.Module) -> set[str]:
    """The names that the statements of a cell bind, except to `...` and to functions that are not written."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and "NotImplementedError" not in ast.dump(node):
            found.add(node.name)
        elif not isinstance(node, ast.FunctionDef) and "Ellipsis" not in ast.dump(node):
            names = [one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
            found |= {one.id for one in names}
    return found


def minutes(notebook: NotebookNode) -> tuple[int, int]:
    """A student's minutes for a lesson, in steps of five: for reading and predicting, and for the exercises.

    A student reads 120 words or 20 lines of code in a minute, predicts an answer in two, and writes one in eight. The
    times are estimates, of which no class was asked.
    """
    cells = [cell for cell in notebook.cells if "solution" not in tags_of(cell)]
    words = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    lines = sum(len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code")
    questions, exercises = (sum(tag in tags_of(cell) for cell in cells) for tag in ("question", "exercise"))
    return 5 * round((words / 120 + lines / 20 + 2 * questions) / 5), 5 * round(8 * exercises / 5)


def processor_seconds() -> float:
    """What the processes have taken that this one has started and that have ended."""
    used = os.times()
    return used.children_user + used.children_system


def _execute(notebook: NotebookNode) -> Iterator[tuple[Any, int, NotebookNode, str]]:
    """Execute the code of a notebook in place and offline: the client, the cell's index, the cell, and its error."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    resources = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        extra_arguments=QUIET_KERNEL,
        resources=resources,
        coalesce_streams=True,
    )
    with client.setup_kernel(env={**os.environ, **OFFLINE}):
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            said = ""
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                said = f"raises {error.ename}: {error.evalue}"
            yield client, index, cell, said


def run_lesson(notebook: NotebookNode) -> list[str]:
    """Execute a lesson in place and offline, each stub before its solution. Returns what is wrong with it."""
    problems: list[str] = []
    before = processor_seconds()
    for count, (client, index, cell, error) in enumerate(_execute(notebook), 1):
        if error:
            return [*problems, f"cell {index} {error}"]
        cell.execution_count = count
        if "exercise" in tags_of(cell):
            problems += _try_stub(client, notebook, index)
        if "check" in tags_of(cell) and (NOT_YET in shown(cell) or RIGHT not in shown(cell)):
            problems.append(f"cell {index}: the solution is not accepted: {shown(cell)}")
    if (seconds := processor_seconds() - before) > LONGEST:
        problems.append(f"it takes {seconds:.0f} s of the processor, more than {LONGEST}.")
    return [*problems, *(f"no output shows {one}" for one in unsupported_numbers(notebook))]


def run_unsolved(notebook: NotebookNode) -> list[str]:
    """Execute the student's copy of a lesson in which nothing is solved. Returns what is wrong with it."""
    problems: list[str] = []
    for _, _, cell, error in _execute(student_copy(notebook)):
        if error:
            problems.append(f"unsolved, the cell {cell.source.splitlines()[0]!r} {error}")
        if "check" in tags_of(cell) and (NOT_YET not in shown(cell) or RIGHT in shown(cell)):
            problems.append(f"unsolved, the check says: {shown(cell)}")
    return problems


def _try_stub(client: Any, notebook: NotebookNode, index: int) -> list[str]:
    """Run the check of an exercise before its solution."""
    after = range(index + 1, len(notebook.cells))
    place = next((one for one in after if "check" in tags_of(notebook.cells[one])), None)
    if place is None:
        return [f"cell {index}: the exercise has no check."]
    trial = nbformat.v4.new_code_cell(notebook.cells[place].source, metadata={"tags": ["raises-exception"]})
    client.nb.cells.append(trial)  # the client looks a cell up by its index
    client.execute_cell(trial, len(client.nb.cells) - 1)
    client.nb.cells.pop()
    said = shown(trial)
    failed = NOT_YET in said or any(output.output_type == "error" for output in trial.outputs)
    return [] if failed else [f"cell {index}: the grader accepts the stub: {said}"]


def clean(notebook: NotebookNode) -> None:
    """Leave out what differs between machines: times, versions, addresses of objects, warnings on stderr."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02}"
        for output in cell.get("outputs", []):
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count  # the kernel also counts the trials of stubs
            if "<iframe" in output.get("data", {}).get("text/html", ""):
                output.data["text/plain"] = "an interactive view"  # not the numbers of all maps once more
        cell.metadata = nbformat.from_dict({"tags": sorted(tags_of(cell))} if tags_of(cell) else {})


def _report(path: Path, write: bool, copies: bool) -> list[str]:
    """Run a lesson, and its unsolved copy if asked. Returns the lesson's name and time, and what is wrong with it."""
    notebook = nbformat.read(path, as_version=4)
    began = time.perf_counter()
    problems = [*disorder(notebook), *early_answers(notebook), *not_handed_on(notebook), *run_lesson(notebook)]
    problems += run_unsolved(notebook) if copies else []
    if write:
        clean(notebook)
        nbformat.write(notebook, path)
    return [f"{path.name}: {time.perf_counter() - began:.0f} s", *problems]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lessons", description=__doc__)
    parser.add_argument("lessons", nargs="*", help="beginnings of file names, such as 03 (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="how many lessons run at a time (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="keep the outputs in the notebooks")
    parser.add_argument("--copies", action="store_true", help="also run the student's copy of each lesson")
    options = parser.parse_args(arguments)
    failed = False
    with ProcessPoolExecutor(options.jobs) as pool:
        each = lessons(*options.lessons)[::-1]  # the last lessons take longest
        for report in pool.map(partial(_report, write=options.write, copies=options.copies), each):
            print(*report, sep="\n  ", flush=True)
            failed = failed or len(report) > 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
