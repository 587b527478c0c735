"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import without_hooks
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tensors import first_tensor

# Where the axis of the streams is: (batch, tokens, stream, d) as in DeepSeek-V4, or (stream, batch, tokens, d) as in
# Gemma 3n.
AXES = (2, 0)


def streams_axis(recording: LayerRecord, call: AttentionRecord) -> int | None:
    """The axis of a layer's tensors along which each token has several vectors; None: it has one.

    Raises:
        AssertionError: There are as many examples as tokens and streams, so that it could be either.
    """
    output = first_tensor(recording.output)
    if output is None or output.dim() != 4 or not recording.states or recording.states[0].shape != output.shape:
        return None
    if call.size[2] != call.size[3]:  # other sources than the tokens: summaries of them (DeepSeek-V4), or a cache
        return None
    axes = [axis for axis in AXES if output.shape[axis] > 1 and output.movedim(axis, 2).shape[:2] == call.size[::2]]
    assert len(axes) < 2, (
        f"The layer {recording.name} carries {tuple(output.shape)}, as many vectors of each token as there are tokens "
        "and examples, so that they cannot be told apart: pass another number of examples."
    )
    return axes[0] if axes else None


def as_one_vector(recording: LayerRecord, axis: int) -> LayerRecord:
    """The recording of a layer whose tokens have one vector each, `(batch, tokens, stream * d)`."""
    output = first_tensor(recording.output)
    assert output is not None  # it has an axis of streams
    layer = _OneVector(recording, axis, output)
    args, kwargs = layer.each(layer.together, recording.args, recording.kwargs)
    return replace(recording, layer=layer, args=args, kwargs=kwargs, output=layer.together(output))


class _OneVector(nn.Module):
    """Takes the vectors of each token apart for a layer, and puts them together again."""

    def __init__(self, recording: LayerRecord, axis: int, output: Tensor) -> None:
        super().__init__()
        self.layer = without_hooks(recording.layer)
        self.axis = axis
        self.streams = output.shape[axis]
        arguments = [*enumerate(recording.args), *recording.kwargs.items()]
        self.states = {place for place, x in arguments if isinstance(x, Tensor) and x.shape == output.shape}

    def each(
        self, change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A layer's arguments, states changed."""
        changed = {place: change(x) if place in self.states else x for place, x in [*enumerate(args), *kwargs.items()]}
        return tuple(changed[place] for place in range(len(args))), {name: changed[name] for name in kwargs}

    def together(self, states: Tensor) -> Tensor:
        """The vectors of each token behind each other, `(batch, tokens, stream * d)`."""
        return states.movedim(self.axis, 2).flatten(2)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        args, kwargs = self.each(self._apart, args, kwargs)
        output = first_tensor(self.layer.forward(*args, **kwargs))
        return None if output is None else self.together(output)

    def _apart(self, states: Tensor) -> Tensor:
        return states.unflatten(2, (self.streams, -1)).movedim(2, self.axis)
