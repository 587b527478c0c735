"""TODO."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from captum_vz._engine.capture.interventions import CleanContexts, CleanModule
from captum_vz._engine.capture.layer_runner import (
    instead,
    run_again,
    with_submodules_replaced,
    without_caches,
    without_hooks,
)
from captum_vz._engine.capture.records import LayerRecord
from captum_vz._engine.numerics.perturbation import PROBE_STRENGTHS, noise_like
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplay, is_reproduced
from captum_vz._engine.structure.dependence import are_in_order
from captum_vz._engine.structure.streams import as_one_vector, streams_axis
from captum_vz._engine.taps.handler import handled_by


class OtherMixing:
    """Where a stack mixes its tokens by anything but attention.

    Attributes:
        pairs: The layers that ran one after the other, the second on something else than what the first returned: their
            indices, each pair once, in the order in which they ran.
        mixers: The layers that mix their tokens by more than their attention.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []
        self.mixers: list[int] = []
        # By device where replicas of a model run side by side.
        self._before: dict[torch.device | None, tuple[int, Tensor]] = {}
        self._lock = threading.Lock()

    def note(self, index: int, recording: LayerRecord) -> None:
        """Take note of a layer that has just run."""
        output = first_tensor(recording.output)
        if output is None:
            return
        mixes = _mixes(recording, output)
        place = output.device if getattr(recording.layer, "_is_replica", False) else None
        with self._lock:
            if mixes and index not in self.mixers:
                self.mixers.append(index)
            before = self._before.get(place)
            # A copy, for models go on to write into their tensors.
            self._before[place] = index, output.clone()
            if before is not None and not _follows(recording, before[1]):
                self.pairs = list(dict.fromkeys([*self.pairs, (before[0], index)]))


def _mixes(recording: LayerRecord, output: Tensor) -> bool:
    """Whether other tokens than one depend on it when all attention is answered as in the clean pass.

    Seen by NaN in its place, and by noise, for some layers stop NaN. Not asked of layers whose attention cannot be
    answered, being in parts. A module that computes attention inline answers as a whole: what else mixes inside of it
    is not seen.
    """
    calls = recording.calls
    axis = streams_axis(recording, calls[0]) if len(calls) == 1 else None
    if axis is not None:
        of_one = as_one_vector(recording, axis)
        if are_in_order(of_one, calls[0], alone=True):
            recording, output = of_one, of_one.output
    arguments = without_caches((recording.args, recording.kwargs))
    hidden = next((x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.is_floating_point()), None)
    inline = [call for call in calls if call.value_projection is not None]
    known = bool(calls) and all(call in inline or (call.context is not None and call.parts == 1) for call in calls)
    if not known or hidden is None or hidden.shape != output.shape or hidden.dim() != 3:
        return False
    axis = 0 if calls[0].sequence_first else 1
    token = (hidden.shape[axis] - 1) // 2
    others = torch.arange(hidden.shape[axis], device=hidden.device) != token
    layer = with_submodules_replaced(without_hooks(recording.layer), {call.module: CleanModule(call) for call in inline})

    def of_others(given: Tensor) -> Tensor | None:
        """What the layer returns for the other tokens, or None where it does not run on what it is given."""
        args, kwargs = tree_map(partial(instead, hidden, given), arguments)
        try:
            with handled_by(CleanContexts([call for call in calls if call not in inline])):
                answer = first_tensor(run_again(layer, args, kwargs))
        except (CannotReplay, StopIteration):  # it asks for more attentions than it did
            return None
        return None if answer is None or answer.shape != output.shape else answer.transpose(0, axis)[others]

    clean = of_others(hidden.clone())  # the recorded output may have been through a hook of the layer's
    if clean is None:
        return False
    for noise in PROBE_STRENGTHS:
        disturbed = hidden.clone()
        disturbed.select(axis, token).copy_(noise_like(hidden.select(axis, token), noise))
        found = of_others(disturbed)
        if found is not None and not is_reproduced(found, clean):
            return True
    return False


def _follows(recording: LayerRecord, returned: Tensor) -> bool:
    """Whether a layer was given what the one before it returned, first of all.

    A decoder's first layer is given what the encoder's last returned as well, but behind its own hidden states.
    """
    tensors = [x for x in tree_leaves((recording.args, recording.kwargs)) if isinstance(x, Tensor)]
    given = next((x for x in tensors if x.is_floating_point() and x.shape == returned.shape), None)
    return given is not None and torch.allclose(given, returned.to(given), rtol=0, atol=0, equal_nan=True)


_noting: ContextVar[OtherMixing | None] = ContextVar("captum_vz_gaps", default=None)


def other_mixing_to_note() -> OtherMixing | None:
    """Where this thread's pass is to note its gaps, or None."""
    return _noting.get()


@contextmanager
def noting_other_mixing() -> Iterator[OtherMixing]:
    """Note the gaps between the layers of the passes in a `with` block."""
    gaps = OtherMixing()
    token = _noting.set(gaps)
    try:
        yield gaps
    finally:
        _noting.reset(token)
