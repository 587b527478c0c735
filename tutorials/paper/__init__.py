"""The three evaluations of Mohebbi et al. 2023, of any model, with all methods: `python tutorials/paper --help`.

Everything here is made with public names of `captum_vz`. It needs the extra `study`.
`reproduce` makes a folder with the evaluations of some models, and returns a `Reproduction`: their tables and a report.
"""

from paper.evaluations import reproduce
from paper.report import Reproduction

__all__ = ["Reproduction", "reproduce"]
