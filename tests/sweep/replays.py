"""Which replay gave a map, and whether it was folded. Only this file of the sweep depends on the engine's replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from captum_vz._engine import traced_replays
from captum_vz._engine.numerics import tensors
from captum_vz._engine.value_zeroing import ReplayTrace

# The replay of packed pairs, as the tables name it.
PACKED = "packed pairs"
FOLDED = "folded pairs"
# The definition, where a layer sees its tokens in windows or in another order.
WINDOWS = "definition, windows"

replays_noted = traced_replays
_BUDGETS = tensors.BUDGETS


def way_of(traces: list[ReplayTrace]) -> str:
    """The name of the replay that gave the last map, or "" if no replay did. Folded pairs are packed pairs."""
    replay = traces[-1].replay if traces else None
    if replay is None:
        return ""
    if replay.name.startswith(("packed", "folded")):
        return PACKED
    return WINDOWS if traces[-1].layout == "windows" else replay.name


def is_folded(traces: list[ReplayTrace]) -> bool:
    """Whether the folded replay gave the last map."""
    return bool(traces) and traces[-1].replay is not None and traces[-1].replay.name == FOLDED


def why_not_folded(traces: list[ReplayTrace]) -> str:
    """Why the folded replay did not give the last map."""
    return traces[-1].failed.get(FOLDED, "it would not pay") if traces else ""


@contextmanager
def folding_threshold(on: bool) -> Iterator[None]:
    """Fold where users get the folded replay (`on`), or wherever folding saves any row of a matrix (not `on`)."""
    always = {kind: replace(one, folding_calls=0) for kind, one in _BUDGETS.items()}
    with patch.object(tensors, "BUDGETS", _BUDGETS if on else always):
        yield
