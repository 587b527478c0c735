"""`captum-vz-lessons`: opens the lessons, writes the students' copies, and grades what they hand in."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from captum_vz.errors import ArgumentError
from captum_vz_lessons.lab import grade_notebook, grade_table, lessons, write_student_copy


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    found = argparse.ArgumentParser(prog="captum-vz-lessons", description="Lessons on Value Zeroing.")
    kinds = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    start = kinds.add_parser("start", help="open the lessons in JupyterLab", description=run_start.__doc__)
    start.set_defaults(run=run_start)
    start.add_argument("--student", action="store_true", help="copies without solutions and answers")
    student = kinds.add_parser("student", help="write copies without solutions", description=run_student.__doc__)
    student.set_defaults(run=run_student)
    student.add_argument("lessons", nargs="*", metavar="LESSON", help="beginnings of names, such as 09 (default: all)")
    for one in (start, student):
        one.add_argument("--folder", type=Path, default=Path("captum-vz-lessons"), help="default: %(default)s")
    grade = kinds.add_parser("grade", help="a table of students by exercises", description=run_grade.__doc__)
    grade.set_defaults(run=run_grade)
    grade.add_argument("handed_in", type=Path, metavar="FOLDER", help="a folder with notebooks, or one notebook")
    grade.add_argument("--lesson", metavar="LESSON", help="such as 09, or a file: its checks count")
    grade.add_argument("--csv", type=Path, metavar="FILE", help="where to write the table")
    limit = {"type": positive, "help": "for each notebook (default: %(default)s)"}
    grade.add_argument("--seconds", default=600, metavar="N", **limit)
    grade.add_argument("--memory", default=8, metavar="GIB", **limit)
    return found


def positive(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def run_start(options: argparse.Namespace) -> None:
    """Copies the lessons into a folder and opens JupyterLab there. A notebook that is in the folder stays as it is."""
    options.folder.mkdir(parents=True, exist_ok=True)
    for lesson in lessons():
        copy = options.folder / (f"{lesson.stem}_student.ipynb" if options.student else lesson.name)
        if not copy.exists():
            (write_student_copy if options.student else shutil.copyfile)(lesson, copy)
    print(f"{options.folder}: the lessons. Ctrl-C ends JupyterLab.", flush=True)
    command = [sys.executable, "-m", "jupyterlab", str(options.folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        for line in server.stderr or ():
            if "eavesdropping" not in line:  # each kernel warns of its connection, which stays on this machine
                sys.stderr.write(line)


def run_student(options: argparse.Namespace) -> None:
    """Writes copies of the lessons without solutions, outputs, and text that tells what a cell shows."""
    options.folder.mkdir(parents=True, exist_ok=True)
    for lesson in lessons(*options.lessons):
        output = options.folder / f"{lesson.stem}_student.ipynb"
        write_student_copy(lesson, output)
        print(output)


def run_grade(options: argparse.Namespace) -> None:
    """Runs each notebook of a folder, without network and with limits, and prints which exercises are right.

    The limits stop accidents, not malicious code. If a notebook cannot run, a line says why, and the rest are graded.
    """
    folder: Path = options.handed_in
    notebooks = [folder] if folder.is_file() else sorted(folder.glob("*.ipynb"))
    if not notebooks:
        raise ArgumentError(f"there is no notebook in {folder}: pass a folder with .ipynb files.")
    given = options.lesson
    lesson = None if given is None else Path(given) if Path(given).is_file() else lessons(given)[0]
    if options.csv is not None and not options.csv.parent.is_dir():
        raise ArgumentError(f"cannot write {options.csv}: there is no folder {options.csv.parent}.")
    grades = []
    for number, notebook in enumerate(notebooks, 1):
        print(f"{number} of {len(notebooks)}: {notebook.name}", end="", file=sys.stderr, flush=True)
        began = time.perf_counter()
        grades.append(grade_notebook(notebook, lesson=lesson, seconds=options.seconds, memory=options.memory))
        right, count = sum(grades[-1].exercises.values()), len(grades[-1].exercises)
        print(f", {right} of {count} right, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    table = grade_table(grades)
    exercises = table.drop(columns=["right", "problem"]).astype(object)
    shown = exercises.apply(lambda column: column.map({True: "right", False: "open"}).fillna(""))
    print(shown.assign(right=table["right"]).to_string())
    for grade in grades:
        if grade.problem:
            print(f"{grade.file}: {grade.problem}")
    if options.csv is not None:
        table.to_csv(options.csv)
        print(f"table: {options.csv}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns its exit status: 2 after an error, which is one line."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except (ArgumentError, OSError) as error:
        print(f"captum-vz-lessons: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
