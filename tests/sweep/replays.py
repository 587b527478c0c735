"""Which replay gave a map. Only this file of the sweep depends on the engine's replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from captum_vz._engine import numerics, traced_replays
from captum_vz._engine.value_zeroing import ReplayTrace

# The replay of packed pairs, as the tables name it, and its faster form.
PACKED, FOLDED = "packed pairs", "folded pairs"
# The definition, where a layer sees its tokens in windows or in another order.
WINDOWS = "definition, windows"

replays_noted = traced_replays


def way_of(traces: list[ReplayTrace], long: bool) -> str:
    """The name of the replay that gave the last map, or "" if no replay did. The short table has no folded pairs."""
    replay = traces[-1].replay if traces else None
    if replay is None:
        return ""
    if replay.name.startswith("packed"):
        return PACKED
    if replay.name == FOLDED:
        return FOLDED if long else PACKED
    return WINDOWS if traces[-1].layout == "windows" else replay.name


def why_not_folded(traces: list[ReplayTrace]) -> str:
    """Why the folded replay did not give the last map."""
    return traces[-1].failed.get(FOLDED, "it would not pay") if traces else ""


@contextmanager
def folded_wherever_possible() -> Iterator[None]:
    """Fold wherever folding saves any row of a matrix, for models that are too small for it to pay."""
    always = {kind: replace(one, folding_calls=0) for kind, one in numerics.BUDGETS.items()}
    with patch.object(numerics, "BUDGETS", always):
        yield
