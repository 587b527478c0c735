"""Lessons in a class: the student's copies, and their grades."""

from captum_vz.testbed.lab.copies import read_notebook, student_copy, write_student_copy
from captum_vz.testbed.lab.grading import Grade, grade_notebook, grade_table

__all__ = ["Grade", "grade_notebook", "grade_table", "read_notebook", "student_copy", "write_student_copy"]
