"""Whether each layer is given what the one before it returned, or whether anything else ran between them.

A rollout multiplies the maps of layers that follow each other. Another mixer between two of them (the recurrent layers
of a hybrid model), or a layer that was left out, has a share in what a token draws on that no map shows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from captum_vz._engine.recording import Recording, first_tensor


class Gaps:
    """Pairs of layers that ran one after the other, the second on something else than what the first returned.

    Attributes:
        pairs: Their indices, each pair once, in the order in which they ran.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []
        # By device where replicas of a model run side by side.
        self._before: dict[torch.device | None, tuple[int, Tensor]] = {}
        self._lock = threading.Lock()

    def note(self, index: int, recording: Recording) -> None:
        """Take note of a layer that has just run."""
        output = first_tensor(recording.output)
        if output is None:
            return
        place = output.device if getattr(recording.layer, "_is_replica", False) else None
        with self._lock:
            before = self._before.get(place)
            # A copy, for models go on to write into their tensors.
            self._before[place] = index, output.clone()
            if before is not None and not any(
                _same(x, before[1]) for x in tree_leaves((recording.args, recording.kwargs))
            ):
                self.pairs = list(dict.fromkeys([*self.pairs, (before[0], index)]))


def _same(given: object, returned: Tensor) -> bool:
    if not isinstance(given, Tensor) or given.shape != returned.shape or not given.is_floating_point():
        return False
    return torch.allclose(given, returned.to(given), rtol=0, atol=0, equal_nan=True)


_noting: ContextVar[Gaps | None] = ContextVar("captum_vz_gaps", default=None)


def gaps_to_note() -> Gaps | None:
    """Where this thread's pass is to note its gaps, or None."""
    return _noting.get()


@contextmanager
def noting_gaps() -> Iterator[Gaps]:
    """Note the gaps between the layers of the passes in a `with` block."""
    gaps = Gaps()
    token = _noting.set(gaps)
    try:
        yield gaps
    finally:
        _noting.reset(token)
