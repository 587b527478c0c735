"""Which replay gave a map, and whether it was folded. Only this file of the sweep depends on the engine's replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from captum_vz._engine import chunks, scoring
from captum_vz._engine.replay import PackedPairs
from captum_vz._engine.windows import Windows

# The replays of packed pairs, as the tables name them.
PACKED = ("packed pairs", "packed, function answered")

# Read at import, because the tests set the threshold to zero.
_THRESHOLD = chunks.CALLS, chunks.CALLS_ELSEWHERE


@dataclass
class Replays:
    """What the engine tried for one map.

    Attributes:
        tried: The replays that the engine constructed. The last one gave the map.
        folded: Whether the folded replay gave the map.
        why_not_folded: The reason that the folded replay gave, if it did not.
    """

    tried: list[Any] = field(default_factory=list)
    folded: bool = False
    why_not_folded: str = ""


def way_of(replays: Replays) -> str:
    """The name of the replay that gave the map, or "" if the engine tried none."""
    if not replays.tried:
        return ""
    last = replays.tried[-1]
    if isinstance(last, Windows):
        return "windows"
    if isinstance(last, scoring.WholeSequences):
        return "whole sequences"
    return PACKED[0] if isinstance(last.answer, torch.nn.Module) else PACKED[1]


@contextmanager
def replays_noted() -> Iterator[Replays]:
    """Note what the engine tries for the map that is computed inside."""
    replays = Replays()
    folded = _noting_result(scoring._folded_pairs, replays)
    with ExitStack() as patches:
        for kind in (PackedPairs, scoring.WholeSequences, Windows):
            constructor = _noting_constructor(kind.__init__, replays)
            patches.enter_context(patch.object(kind, "__init__", constructor))
        patches.enter_context(patch.object(scoring, "WAYS", (folded, *scoring.WAYS[1:])))
        patches.enter_context(patch.object(scoring, "_folded_pairs", folded))
        yield replays


@contextmanager
def folding_threshold(on: bool) -> Iterator[None]:
    """Fold where users get the folded replay (`on`), or wherever folding saves any row of a matrix (not `on`)."""
    calls: tuple[Mapping[str, float], float] = _THRESHOLD if on else ({}, 0)
    with patch.object(chunks, "CALLS", calls[0]), patch.object(chunks, "CALLS_ELSEWHERE", calls[1]):
        yield


def _noting_constructor(construct: Callable[..., None], replays: Replays) -> Callable[..., None]:
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        replays.tried.append(self)
        construct(self, *args, **kwargs)

    return noting


def _noting_result(folded_pairs: Callable[..., Tensor], replays: Replays) -> Callable[..., Tensor]:
    def noting(*args: Any, **kwargs: Any) -> Tensor:
        try:
            scores = folded_pairs(*args, **kwargs)
        except Exception as error:
            replays.why_not_folded = str(error)
            raise
        replays.folded = True
        return scores

    return noting
