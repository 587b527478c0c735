"""`captum-vz lab`: copies of the lessons for a class."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from captum_vz.cli.options import CommandError, add_command, check_files
from captum_vz.cli.output import print_table, working
from captum_vz.testbed.lab import grade_notebook, grade_table, write_student_copy

EXAMPLES: Final = (
    "lab student tutorials/09_redundant_words.ipynb",
    "lab student tutorials/09_redundant_words.ipynb --output class/09.ipynb",
    "lab grade handed_in --lesson tutorials/09_redundant_words.ipynb --csv grades.csv",
)


def add_lab(commands: Any) -> None:
    """Add the parser of this command."""
    help = "copies of lessons for students, and their grades"
    description = "Writes copies of the lessons under tutorials/ for students, and grades what they hand in."
    lab = add_command(commands, "lab", run, help=help, description=description, examples=EXAMPLES)
    kinds = lab.add_subparsers(dest="lab", required=True, metavar="COMMAND")
    student = add_command(
        kinds,
        "student",
        run,
        help="a notebook without solutions and outputs",
        description="Writes a copy of a notebook without the cells that are tagged 'solution', and without outputs. "
        "Text that tells what a cell shows (tagged 'answer' or 'summary') is left out too, except its heading. The "
        "stubs of the exercises stay, and the package grades what the student writes there.",
        examples=EXAMPLES,
    )
    student.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="a lesson, such as tutorials/*.ipynb")
    student.add_argument(
        "--output", type=Path, metavar="FILE", help="the copy (default: NAME_student.ipynb in the current folder)"
    )
    grade = add_command(
        kinds,
        "grade",
        run_grade,
        help="a table of students by exercises",
        description="Runs each notebook of a folder in a process of its own, in a scratch folder, without network, and "
        "with limits of time and memory (of memory on Linux only). The limits hold back mistakes, and no code that "
        "means harm. An exercise is right if the package's check says so. A notebook that cannot be run has a problem "
        "in the table, and the others are graded.",
        examples=EXAMPLES,
    )
    grade.add_argument("folder", type=Path, metavar="FOLDER", help="a folder with notebooks, or one notebook")
    grade.add_argument(
        "--lesson", type=Path, metavar="NOTEBOOK", help="the lesson, whose checks replace those of the students"
    )
    grade.add_argument("--csv", type=Path, metavar="FILE", help="where to write the table")
    grade.add_argument(
        "--seconds", type=positive, default=600, metavar="N", help="the time for each notebook (default: %(default)s)"
    )
    grade.add_argument(
        "--memory", type=positive, default=8, metavar="GIB", help="the memory for each notebook (default: %(default)s)"
    )


def positive(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def run_grade(options: argparse.Namespace) -> None:
    """Grade the notebooks, and print the table."""
    folder: Path = options.folder
    notebooks = [folder] if folder.is_file() else sorted(folder.glob("*.ipynb"))
    if not notebooks:
        raise CommandError(f"there is no notebook in {folder}: pass a folder with .ipynb files.")
    check_files(None, options.csv)
    grades = []
    with working("Grading") as tell:
        for number, notebook in enumerate(notebooks, 1):
            tell(f"Grading {notebook.name}, {number} of {len(notebooks)}")
            limits = {"seconds": options.seconds, "memory": options.memory}
            grades.append(grade_notebook(notebook, lesson=options.lesson, **limits))
    names = list(dict.fromkeys(name for grade in grades for name in grade.exercises))
    words = {True: "right", False: "open", None: ""}
    rows = [
        [grade.file, *(words[grade.exercises.get(name)] for name in names), str(sum(grade.exercises.values()))]
        for grade in grades
    ]
    print_table(["notebook", *names, "right"], rows, right=[len(names) + 1])
    for grade in grades:
        if grade.problem:
            print(f"{grade.file}: {grade.problem}")
    if options.csv is not None:
        try:
            grade_table(grades).to_csv(options.csv)
        except OSError as error:
            raise CommandError(f"cannot write {options.csv}: {error.strerror or error}.") from error
        print(f"{options.csv}: {len(grades)} notebooks")


def run(options: argparse.Namespace) -> None:
    """Write the copy."""
    output: Path = options.output or Path(f"{options.notebook.stem}_student.ipynb")
    check_files(None, output)
    try:
        cells, left_out = write_student_copy(options.notebook, output)
    except OSError as error:
        raise CommandError(f"cannot write {output}: {error.strerror or error}.") from error
    print(f"{output}: {cells} cells, {left_out} cells with solutions or answers left out")
