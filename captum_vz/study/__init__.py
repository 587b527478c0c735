"""Many methods on many sentences."""

from captum_vz.study.comparison import compare
from captum_vz.study.encoding import BadExample, Encoded, encode
from captum_vz.study.example import Example, read_jsonl, write_jsonl
from captum_vz.study.methods import DEFAULT_METHODS, METHODS, Method
from captum_vz.study.table import Table

__all__ = [
    "DEFAULT_METHODS",
    "METHODS",
    "BadExample",
    "Encoded",
    "Example",
    "Method",
    "Table",
    "compare",
    "encode",
    "read_jsonl",
    "write_jsonl",
]
