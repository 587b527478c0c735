"""The rows of a study: their columns, and how scores become rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.metrics.extra import study_extra
from captum_vz.study.examples.encoding import Encoded
from captum_vz.study.examples.example import Example
from captum_vz.study.methods import METHODS

with study_extra("captum_vz.study"):
    import pyarrow as pa

Row = dict[str, Any]

_NO_MEMORY: Final = re.compile(r"out of memory|not enough memory|(can't|cannot) allocate memory", re.IGNORECASE)

#: How the reason begins for which an example is computed again.
OUT_OF_MEMORY: Final = "out of memory: "

#: The columns of a row before the metrics, and their types.
COLUMNS: Final = {
    "example": pa.string(),
    "group": pa.string(),
    "label": pa.string(),
    "method": pa.string(),
    "layer": pa.int32(),
    "skipped": pa.string(),
    "tokens": pa.list_(pa.string()),
    "target": pa.int32(),
    "cue": pa.list_(pa.int32()),
    "scores": pa.list_(pa.float64()),
}


def score_rows(
    example: Example,
    encoded: Encoded,
    method: str,
    tokens: Sequence[str],
    scores: Tensor,
    values: Mapping[str, Sequence[float]],
) -> list[Row]:
    """The rows of one method for one example, one for each layer or one for all.

    Args:
        example: The example.
        encoded: The same as token ids.
        method: The name of the method.
        tokens: Its tokens, as a person reads them.
        scores: `(layers, tokens or more)`; scores of padding are dropped.
        values: For each metric its value in each layer.
    """
    about = _about(example) | {
        "method": method,
        "skipped": None,
        "tokens": list(tokens),
        "target": encoded.target,
        "cue": list(encoded.cue),
    }
    return [
        about
        | {"layer": layer if METHODS[method].layered else None, "scores": row[: len(encoded.ids)].tolist()}
        | {name: each[layer] for name, each in values.items()}
        for layer, row in enumerate(scores)
    ]


def skipped_row(metrics: Iterable[str], id: str, reason: str, example: Example | None = None) -> Row:
    """The row of an example that cannot be used, with the reason."""
    nothing: Row = dict.fromkeys((*COLUMNS, *metrics))
    about = {"example": id, "group": ""} if example is None else _about(example)
    return nothing | {"tokens": [], "cue": [], "scores": [], "skipped": reason} | about


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, or was raised because another one said so."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    kinds = (MemoryError, torch.OutOfMemoryError)
    # On a CPU, torch raises a RuntimeError that only its text tells from others.
    return any(isinstance(one, kinds) or _NO_MEMORY.search(str(one)) for one in seen)


def is_out_of_memory(row: Row) -> bool:
    """Whether an example was skipped because there was not enough memory, which another start may have."""
    return (row["skipped"] or "").startswith(OUT_OF_MEMORY)


def _about(example: Example) -> Row:
    return {"example": example.id, "group": example.group, "label": example.label}
