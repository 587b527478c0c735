"""Many methods on many sentences.

`compare` shows several methods on one text. `run_study` runs models x methods x examples, and judges them; what it is
made of is public, for studies of another kind. All but `compare` and the examples need the extra `study`.

    compare                  many methods on one text, in one table that prints, draws itself and is exported
    Example                  a sentence with the word that is explained and those that decide
    read_jsonl, write_jsonl  files of them
    encode                   from words to tokens
    METHODS, METRICS         what can be compared, and what it can be judged by
    Scorer                   methods and metrics on a batch of examples; columns in, columns out
    blimp_examples           the paper's sentences, of BLiMP
    reproduce, Reproduction  the paper's three evaluations, of any model
    run_study, Study         shard after shard in a folder, and what came out; goes on where it was killed
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from captum_vz.study.blimp import blimp_examples
from captum_vz.study.comparison import compare
from captum_vz.study.encoding import BadExample, Encoded, encode
from captum_vz.study.example import Example, read_jsonl, write_jsonl
from captum_vz.study.methods import DEFAULT_METHODS, METHODS, Method
from captum_vz.study.table import Table

if TYPE_CHECKING:
    from captum_vz.study.judging import DEFAULT_METRICS, METRICS, Metric
    from captum_vz.study.paper import reproduce
    from captum_vz.study.reproduction import Reproduction
    from captum_vz.study.results import Study
    from captum_vz.study.run import run_study
    from captum_vz.study.scorer import Scorer

__all__ = [
    "DEFAULT_METHODS",
    "DEFAULT_METRICS",
    "METHODS",
    "METRICS",
    "BadExample",
    "Encoded",
    "Example",
    "Method",
    "Metric",
    "Reproduction",
    "Scorer",
    "Study",
    "Table",
    "blimp_examples",
    "compare",
    "encode",
    "read_jsonl",
    "reproduce",
    "run_study",
    "write_jsonl",
]

# These need the extra `study`, and seconds to import: whoever only compares waits for neither.
_NEED_EXTRA = {
    "DEFAULT_METRICS": "judging",
    "METRICS": "judging",
    "Metric": "judging",
    "Reproduction": "reproduction",
    "Scorer": "scorer",
    "Study": "results",
    "reproduce": "paper",
    "run_study": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_EXTRA[name]}"), name)
