"""The three evaluations of Mohebbi et al. 2023, of any model, with all methods: `python tutorials/paper --help`.

Everything here is made with public names of `captum_vz`. It needs the extra `study`.

    reproduce                the evaluations of one or more models, in a folder
    Reproduction             their tables, and the report with its figures
"""

from paper.evaluations import reproduce
from paper.report import Reproduction

__all__ = ["Reproduction", "reproduce"]
