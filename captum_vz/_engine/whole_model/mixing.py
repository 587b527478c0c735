"""Whether anything mixes the tokens of a stack except the attention of its layers.

A rollout multiplies the maps of layers that follow each other. Another mixer between two layers (the recurrent layers
of a hybrid model), or a layer that is left out, has a share that no map shows. So has a mixer that runs in parallel to
the attention of a layer (a recurrent one, a convolution).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from captum_vz._engine.capture.layer_runner import LayerRunner
from captum_vz._engine.numerics.perturbation import PROBE_STRENGTHS, noise_like
from captum_vz._engine.numerics.tensors import clone_tensor, first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_reproduced
from captum_vz._engine.structure.dependence import values_depend_on_own_position
from captum_vz._engine.structure.streams import find_streams
from captum_vz._engine.taps.handler import AttentionHandler

if TYPE_CHECKING:
    from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
    from captum_vz._engine.taps.handler import AttentionCall


class OtherMixing:
    """Where a stack mixes its tokens by anything except attention. `note` is called with each layer's record.

    Attributes:
        pairs: Indices of layers that ran one after the other, the second on something else than what the first
            returned. Each pair once, in the order in which they ran.
        mixers: The layers that mix their tokens by more than their attention.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []
        self.mixers: list[int] = []
        # By device where replicas of a model run side by side.
        self._before: dict[torch.device | None, tuple[int, Tensor]] = {}
        self._lock = threading.Lock()

    def note(self, record: LayerRecord) -> None:
        """Look at a layer that has just run."""
        output = first_tensor(record.output)
        if output is None:
            return
        mixes = _mixes(record, output)
        place = output.device if getattr(record.layer, "_is_replica", False) else None
        with self._lock:
            if mixes and record.index not in self.mixers:
                self.mixers.append(record.index)
            before = self._before.get(place)
            # A copy, because models may write into their tensors later.
            self._before[place] = record.index, output.clone()
            if before is not None and not record.is_given(before[1]):
                self.pairs = list(dict.fromkeys([*self.pairs, (before[0], record.index)]))


def _mixes(record: LayerRecord, output: Tensor) -> bool:
    """Whether one token reaches others when all attention is answered as in the clean pass.

    The token is replaced by NaN, and by noise because some layers remove NaN. Layers whose attention is computed in
    parts cannot be answered and are not tested. A module that computes attention inline is answered as a whole, so
    other mixing inside it is not seen.
    """
    attentions = record.attentions
    streams = find_streams(record, attentions[0]) if len(attentions) == 1 else None
    runner = LayerRunner(record, streams)
    if streams is not None and not values_depend_on_own_position(runner, attentions[0]):
        streams, runner = None, LayerRunner(record)
    if streams is not None:
        output = streams.tokens(output)
    hidden = next((x for x in tree_leaves(runner.arguments) if isinstance(x, Tensor) and x.is_floating_point()), None)
    inline = [one for one in attentions if one.inline is not None]
    others = [one for one in attentions if one.inline is None]
    known = bool(attentions) and all(one.context is not None and one.calls == 1 for one in others)
    if not known or hidden is None or hidden.shape != output.shape or hidden.dim() != 3:
        return False
    axis = 0 if attentions[0].tokens_first else 1
    token = (hidden.shape[axis] - 1) // 2
    kept = torch.arange(hidden.shape[axis], device=hidden.device) != token
    runner.replace_modules({one.module: CleanModule(one) for one in inline})

    def other_tokens(given: Tensor) -> Tensor | None:
        """The layer's output at the other tokens. None: it does not run on what it is given."""
        try:
            answer = runner.run(CleanContexts(others), *runner.arguments_with(hidden, given))
        except CannotReplayError:
            return None
        return None if answer is None or answer.shape != output.shape else answer.transpose(0, axis)[kept]

    clean = other_tokens(hidden.clone())  # a hook of the layer may have changed the recorded output
    if clean is None:
        return False
    for strength in PROBE_STRENGTHS:
        noisy = hidden.clone()
        noisy.select(axis, token).copy_(noise_like(hidden.select(axis, token), strength))
        found = other_tokens(noisy)
        if found is not None and not is_reproduced(found, clean):
            return True
    return False


class CleanContexts(AttentionHandler):
    """Answers each attention with its context in the clean pass."""

    def __init__(self, attentions: Sequence[AttentionRecord]) -> None:
        self._attentions: Iterator[AttentionRecord] = iter(attentions)

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        attention = next(self._attentions, None)
        if attention is None or attention.context is None:
            raise CannotReplayError("it calls attention more often than in the clean pass")
        return attention.context.clone(), attention.weights


class CleanModule(nn.Module):
    """Returns what a module returned in the clean pass, whatever it is given."""

    def __init__(self, attention: AttentionRecord) -> None:
        super().__init__()
        self.output = attention.output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(clone_tensor, self.output)
