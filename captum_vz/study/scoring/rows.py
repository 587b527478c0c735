"""The rows of a study: their columns, and the reasons for which there is no number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.errors import RefusedError, needs_extra
from captum_vz.study.examples import Example
from captum_vz.study.examples.encoding import Encoded

with needs_extra("captum_vz.study", "study"):
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
    "metric": pa.string(),
    "skipped": pa.string(),
    "tokens": pa.list_(pa.string()),
    "target": pa.int32(),
    "cue": pa.list_(pa.int32()),
    "content": pa.list_(pa.int32()),
    "scores": pa.list_(pa.float64()),
}


def score_rows(
    example: Example,
    encoded: Encoded,
    method: str,
    layered: bool,
    tokens: Sequence[str],
    content: Sequence[int],
    scores: Tensor,
) -> list[Row]:
    """The rows of one method for one example, one for each layer or one for all.

    Args:
        example: The example.
        encoded: The same as token ids.
        method: The name of the method.
        layered: Whether it has rows for each layer.
        tokens: Its tokens, as a person reads them.
        content: The positions of the tokens that are neither special nor the target.
        scores: `(layers, tokens or more)`; scores of padding are dropped.
    """
    about = dict.fromkeys(COLUMNS) | _about(example)
    about |= {"method": method, "tokens": list(tokens), "target": encoded.target}
    about |= {"cue": list(encoded.cue), "content": list(content)}
    return [
        about | {"layer": layer if layered else None, "scores": row[: len(encoded.ids)].tolist()}
        for layer, row in enumerate(scores)
    ]


def skipped_row(
    reason: str, example: Example | str, method: str | None = None, metric: str | None = None, names: Iterable[str] = ()
) -> Row:
    """The row of an example without numbers, with the reason.

    Args:
        reason: Why there is no number.
        example: The example, or the id of something that is none.
        method: The method that cannot explain it. None: no method can.
        metric: The metric that has no number. None: no metric has.
        names: The names of metrics, which get None.
    """
    nothing: Row = dict.fromkeys((*COLUMNS, *names))
    about = _about(example) if isinstance(example, Example) else {"example": example, "group": ""}
    empty: Row = {"tokens": [], "cue": [], "content": [], "scores": []}
    return nothing | empty | about | {"method": method, "metric": metric, "skipped": reason}


def reason_of(error: BaseException) -> str:
    """Why something failed, for the table of skipped examples."""
    told = str(error) or type(error).__name__
    if ran_out_of_memory(error):
        return f"{OUT_OF_MEMORY}{told}"
    # A refusal is a sentence of this package. Other errors are named, because their text alone may say little.
    return told if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"


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
