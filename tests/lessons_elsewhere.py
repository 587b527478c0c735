"""Grades lessons of installed wheels: `python - 09 < tests/lessons_elsewhere.py`, outside of the checkout.

A lesson with its solutions is right, and the student's copy is open. Both reach their end.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import captum_vz
import captum_vz_lessons
from captum_vz_lessons.lab import grade_notebook, lessons, write_student_copy


def main(*names: str) -> None:
    for package in (captum_vz, captum_vz_lessons):
        place = Path(package.__file__).parents[1]
        assert not (place / "setup.cfg").exists() and not (place / "pyproject.toml").exists(), f"{place} is a checkout"
    assert len(lessons()) == 11, lessons()
    for lesson in lessons(*names):
        with TemporaryDirectory() as folder:
            copy = Path(folder) / "copy.ipynb"
            write_student_copy(lesson, copy)
            solved, unsolved = grade_notebook(lesson), grade_notebook(copy, lesson=lesson)
        assert not solved.problem and not unsolved.problem, (solved, unsolved)
        assert solved.exercises and all(solved.exercises.values()), solved
        assert solved.exercises.keys() == unsolved.exercises.keys() and not any(unsolved.exercises.values()), unsolved
        print(f"{lesson.name}: {len(solved.exercises)} exercises are right, and open in the student's copy", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:] or ("09",))
