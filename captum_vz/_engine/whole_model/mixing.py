"""Whether anything mixes the tokens of a stack except the attention of its layers.

A rollout multiplies the maps of layers that follow each other. Another mixer between two layers (the recurrent layers
of a hybrid model), or a layer that is left out, has a share that no map shows. So has a mixer that runs in parallel to
the attention of a layer (a recurrent one, a convolution).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import LAYER_ERRORS, LayerRunner
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.attention import Weights
from captum_vz._engine.numerics.tensors import ReturnedTensor, binary_digits, clone_tensor, first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.structure.dependence import mixes_outside, run_on, values_depend_on_own_position
from captum_vz._engine.structure.layout import find_streams
from captum_vz._engine.structure.modules import LayerTrust, is_library_code, matrix
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz._private import is_replica, modules_of, tree_leaves, tree_map


class OtherMixing:
    """Where a stack mixes its tokens by anything except attention. `note` is called with each layer's record.

    A linear module or a norm of `model` may run between two of its `layers`, because it treats each token alone.
    """

    def __init__(self, model: Any = None, layers: Sequence[nn.Module] = ()) -> None:
        inside = {part for layer in layers for part in modules_of(layer)}
        modules = set(modules_of(model)) - inside if isinstance(model, nn.Module) else set()
        self._each_token = [one for one in modules if matrix(one) is not None or _is_norm(one)]
        # Indices of layers that ran one after the other, the second on something else than what the first returned.
        # Each pair once, in the order in which they ran.
        self.pairs: list[tuple[int, int]] = []
        self.mixers: list[int] = []  # the layers that mix their tokens by more than their attention
        self.untested: list[int] = []  # those of unknown code of which no run shows whether they do
        self._known: dict[Any, bool | None] = {}  # by the kind of a layer
        # By device where replicas of a model run side by side.
        self._before: dict[torch.device | None, tuple[int, ReturnedTensor]] = {}
        self._lock = threading.Lock()

    def note(self, record: LayerRecord) -> None:
        """Look at a layer that has just run."""
        output = first_tensor(record.output)
        if output is None:
            return
        kind = _kind(record)
        mixes = self._known[kind] if kind in self._known else _mixes(record, output)
        if kind is not None:
            self._known[kind] = mixes
        place = output.device if is_replica(record.layer) else None
        with self._lock:
            if mixes and record.index not in self.mixers:
                self.mixers.append(record.index)
            if mixes is None and record.index not in self.untested and not is_library_code(record):
                self.untested.append(record.index)
            before = self._before.get(place)
            self._before[place] = record.index, ReturnedTensor(output)
            if before is not None and not record.is_given(before[1]) and not self._is_given_alone(record, before[1]):
                self.pairs = list(dict.fromkeys([*self.pairs, (before[0], record.index)]))

    @torch.no_grad()
    def _is_given_alone(self, record: LayerRecord, before: ReturnedTensor) -> bool:
        """Whether a layer is given what one module makes of each token of `before`."""
        for module in self._each_token:
            with suppress(*LAYER_ERRORS):  # it is for other vectors
                if record.is_given(ReturnedTensor(module.forward(before.copy))):
                    return True
        return False


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) == 1


def _kind(record: LayerRecord) -> Any:
    """A key. Layers of one stack with the same key mix tokens alike, so one is tested. None: each is tested.

    NaN shows mixing by any module, also where its numbers are zero. So the code and its settings decide. Experts may
    make tokens compete by their numbers.
    """
    if not record.attentions or not LayerTrust.of(record).independent:
        return None
    settings: list[Any] = [(type(module), *_settings(module)) for module in modules_of(record.layer)]
    settings.append(tuple(x.shape for x in record.parameters))
    given = [name for name, x in record.kwargs.items() if x is not None]
    shapes = [(one.shape, one.inline is None) for one in record.attentions]
    return (*settings, *given, len(record.args), *shapes)


def _settings(module: nn.Module) -> list[Any]:
    """The attributes by which a module's code may decide, such as the axis of a softmax or the size of a norm.

    The index of a layer in its stack is left out.
    """
    # Two partial functions are never equal, but their texts are.
    own = [(name, repr(x) if isinstance(x, partial) else x) for name, x in vars(module).copy().items()]
    return [(name, x) for name, x in own if name not in ("layer_idx", "layer_id") and _is_setting(x)]


def _is_setting(x: Any) -> bool:
    if type(x) is tuple:
        return all(map(_is_setting, x))
    return x is None or type(x) in (bool, int, str) or callable(x)


def _mixes(record: LayerRecord, output: Tensor) -> bool | None:
    """Whether tokens reach others by anything but the weights of attention. None: no run shows it.

    All attention is answered as in the clean pass. In code from elsewhere, values may be made of several tokens.

    Disturbed are, in library code, the middle token; in other code, the tokens whose position has a binary digit, and
    those whose position has not. A module that computes attention inline is answered as a whole, so other mixing inside
    it is not seen.
    """
    attentions = record.attentions
    streams = find_streams(record, attentions[0]) if len(attentions) == 1 else None
    runner = LayerRunner(record, streams)
    if streams is not None and not values_depend_on_own_position(runner, attentions[0]):
        streams, runner = None, LayerRunner(record)
    if streams is not None:
        output = streams.tokens(output)
    hidden = next((x for x in tree_leaves(runner.arguments) if isinstance(x, Tensor) and x.is_floating_point()), None)
    library, tokens_first = is_library_code(record), any(one.tokens_first for one in attentions[:1])
    if not attentions or hidden is None or hidden.shape != output.shape or (library and hidden.dim() != 3):
        return None
    if not library and values_depend_on_own_position(runner, attentions[0]) is False:
        return True
    runner.replace_forwards({one.module: _clean_output_of(one) for one in attentions if one.inline is not None})
    contexts: list[tuple[Tensor, Weights | None]] = []
    # It fills the contexts. A hook of the layer may have changed the recorded output.
    clean = run_on(runner, hidden, hidden.clone(), CleanContexts(contexts))
    disturbed = [both for digit in binary_digits(hidden, tokens_first) for both in (digit, ~digit)]
    if library:
        disturbed = [torch.zeros_like(hidden[..., 0], dtype=torch.bool)]
        disturbed[0].select(0 if tokens_first else 1, (output.shape[not tokens_first] - 1) // 2).fill_(True)
    return None if clean is None else mixes_outside(runner, hidden, clean, disturbed, lambda: CleanContexts(contexts))


class CleanContexts(AttentionHandler):
    """Answers each attention call with its context in the clean pass. A run without `contexts` fills them."""

    def __init__(self, contexts: list[tuple[Tensor, Weights | None]]) -> None:
        self._contexts = contexts
        self._answers = iter([*contexts]) if contexts else None

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        if self._answers is None:
            context, weights = call.compute(call.values)
            self._contexts.append((context.clone(), weights))
            return context, weights
        answer, weights_then = next(self._answers, (None, None))
        if answer is None:
            raise CannotReplayError("it calls attention more often than in the clean pass")
        return answer.clone(), weights_then


def _clean_output_of(attention: AttentionRecord) -> Callable[..., Any]:
    """Returns what the attention module returned in the clean pass, whatever it is given."""
    return lambda *args, **kwargs: tree_map(clone_tensor, attention.output)
