"""Layers that carry several vectors of each token, in streams (hyper-connections, AltUp): a layout of tokens."""

from __future__ import annotations

from captum_vz._engine.capture.layer_runner import Streams
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz.errors import UnsupportedLayerError

# The axis of the streams: (batch, tokens, stream, d) in DeepSeek-V4, (stream, batch, tokens, d) in Gemma 3n.
AXES = (2, 0)


def find_streams(record: LayerRecord, attention: AttentionRecord) -> Streams | None:
    """The streams of a layer, or None if its tokens have one vector each.

    Raises:
        UnsupportedLayerError: Tokens and streams have the same number, so that either axis could hold the streams.
    """
    output = first_tensor(record.output)
    if output is None or output.dim() != 4 or not record.states or record.states[0].shape != output.shape:
        return None
    batch, _, out, sources = attention.shape
    if out != sources:  # other sources than the tokens: summaries of them (DeepSeek-V4), or a cache
        return None
    axes = [axis for axis in AXES if output.shape[axis] > 1 and output.movedim(axis, 2).shape[:2] == (batch, out)]
    if len(axes) > 1:
        raise UnsupportedLayerError(
            f"The layer {record.name} carries {tuple(output.shape)}, as many vectors of each token as there are tokens "
            "and examples, so the axes cannot be distinguished. Pass another number of examples."
        )
    return Streams(axes[0], output.shape[axes[0]]) if axes else None
