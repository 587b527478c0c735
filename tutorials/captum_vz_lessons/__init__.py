"""Lessons on Value Zeroing: eleven notebooks, their grader, and commands for a class.

`captum_vz_lessons.check` grades the exercises, `captum_vz_lessons.lab` writes copies for students and grades what they
hand in. The command `captum-vz-lessons` does the same from a terminal.
"""

__version__ = "0.1.0"
#: The type under which a notebook keeps a verdict, for `captum-vz-lessons grade`.
MIME_TYPE = "application/vnd.captum-vz.verdict+json"
