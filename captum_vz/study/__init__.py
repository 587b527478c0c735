"""Many methods on many sentences.

`compare` shows several methods on one text. `run_study` evaluates models x methods x examples in a folder, and returns
a `Study`. Its parts are public, for studies of another kind: an `Example` and files of them, `METHODS` and `METRICS`
with their registration, a `Scorer` of batches, truths by patching, and what a report needs. Everything except `compare`
and the examples needs the extra `study`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from captum_vz._files import safe_name, write_whole
from captum_vz.errors import needs_extra
from captum_vz.methods import (
    COMPARED_METHODS,
    DEFAULT_METHODS,
    METHODS,
    Batch,
    Method,
    as_method,
    load_plugin,
    register_method,
)
from captum_vz.study.comparison import compare
from captum_vz.study.examples import BadExampleError, Encoded, Example, encode, read_csv, read_jsonl, write_jsonl
from captum_vz.study.examples.blimp import BlimpSelection, blimp_examples, select_blimp

if TYPE_CHECKING:
    from captum_vz.study.examples.patching import Patched, activation_patching, value_patching
    from captum_vz.study.folder import Source
    from captum_vz.study.results import Study, sign_figure, tied_pairs, with_interval
    from captum_vz.study.run import run_study
    from captum_vz.study.scoring import EvaluationBatch, Metric
    from captum_vz.study.scoring.metrics import (
        DEFAULT_METRICS,
        METRICS,
        lacks,
        metric_named,
        random_copy,
        random_layers,
        register_metric,
        sensitivity,
    )
    from captum_vz.study.scoring.scorer import Scorer

__all__ = [
    "COMPARED_METHODS",
    "DEFAULT_METHODS",
    "DEFAULT_METRICS",
    "METHODS",
    "METRICS",
    "BadExampleError",
    "Batch",
    "BlimpSelection",
    "Encoded",
    "EvaluationBatch",
    "Example",
    "Method",
    "Metric",
    "Patched",
    "Scorer",
    "Source",
    "Study",
    "activation_patching",
    "as_method",
    "blimp_examples",
    "compare",
    "encode",
    "lacks",
    "load_plugin",
    "metric_named",
    "random_copy",
    "random_layers",
    "read_csv",
    "read_jsonl",
    "register_method",
    "register_metric",
    "run_study",
    "safe_name",
    "select_blimp",
    "sensitivity",
    "sign_figure",
    "tied_pairs",
    "value_patching",
    "with_interval",
    "write_jsonl",
    "write_whole",
]

# These modules need the extra `study`, and take seconds to import. `compare` does not import them.
_NEED_EXTRA = "scoring.metrics scoring examples.patching scoring.scorer folder results run"


def __getattr__(name: str) -> Any:
    with needs_extra(__name__, "study"):
        for home in _NEED_EXTRA.split() if name in __all__ else ():
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
