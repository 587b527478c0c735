"""The three evaluations of Mohebbi et al. 2023, of any model, with all methods.

Everything here is made with the public names of `captum_vz.study`. It needs the extra `study`.

    reproduce                the evaluations of one or more models, in a folder
    Reproduction             their tables, and the report with its figures
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from captum_vz.paper.evaluations import reproduce
    from captum_vz.paper.report import Reproduction

__all__ = ["Reproduction", "reproduce"]

_NEED_EXTRA = {"Reproduction": "report", "reproduce": "evaluations"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from captum_vz.study import run_study  # noqa: F401 - where the extra is missing, its error names the extra

    return getattr(import_module(f"{__name__}.{_NEED_EXTRA[name]}"), name)
