"""TODO."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz._engine.capture.float32 import is_half, rerun_in_float32
from captum_vz._engine.capture.layer_runner import FAILURES
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tensors import first_tensor, gather_rows
from captum_vz._engine.numerics.tolerance import SameAgainError, TooFewError, with_rounding
from captum_vz._engine.replay.base import Ablation, OutputDistance, TargetRows, empty_map, group_members, wanted_targets
from captum_vz._engine.replay.folded.replay import _folded_pairs
from captum_vz._engine.replay.packed import _packed_first, _packed_pairs
from captum_vz._engine.replay.sequences import _in_its_batch, _whole_by_trial, _whole_sequences
from captum_vz._engine.replay.windows import _in_windows
from captum_vz._engine.structure.site import over_positions
from captum_vz._engine.structure.streams import as_one_vector

# Tried in this order. All give the same numbers: a test may leave the first one out.
REPLAYS = (_folded_pairs, _packed_pairs, _packed_first, _whole_sequences, _whole_by_trial, _in_its_batch)


def value_zeroing_map(recording: LayerRecord, call: AttentionRecord, zeroing: Ablation) -> tuple[Tensor, int]:
    """The raw distances of one layer, `(batch, row, group)`; padded rows and sources are 0.

    And how many rows change, but by no more than rounding may: where what a layer adds is a millionth of what it
    carries on, their scores say nothing.
    """
    name = recording.name
    if call.streams is not None:
        recording = as_one_vector(recording, call.streams)
    output = _output(recording, call)
    assert output is not None  # attention_call saw to it
    assert output.abs().amax().isfinite(), (
        f"{name} returned values that are not finite (NaN or infinity) in {output.dtype}; no distance can be taken of "
        "them. float16 overflows above 65504: load the model in bfloat16 or float32, and check its weights and inputs."
    )
    assert not recording.state.drew_lots_in_training(), (
        f"The layer {name} draws random numbers, so that no two runs of it agree: call model.eval() first."
    )
    if not is_half(recording):
        return _replayed(recording, call, output, zeroing)
    site = 0 if call.windows is not None else recording.calls.index(call)
    notes = recording.notes
    recording.made.clear()  # in half precision, of no use
    recording = rerun_in_float32(recording)
    recording.notes = notes
    with torch.autocast(output.device.type, enabled=False):
        again = recording.calls[site]
        again = again if call.windows is None else over_positions(recording, again)
        again.streams = call.streams
        output = _output(recording, again)
        assert output is not None
        return _replayed(recording, again, output, zeroing)


def _rounding(clean: Tensor, measure: OutputDistance) -> Tensor:
    """The distance by which rounding alone may move outputs `(n, d)`, `(n)`."""
    prepared, rounded = measure.prepare(torch.cat([clean, with_rounding(clean)])).chunk(2)
    return measure.between(with_rounding(rounded), prepared)  # for what the measure makes of them is rounded as well


def _replayed(recording: LayerRecord, call: AttentionRecord, output: Tensor, zeroing: Ablation) -> tuple[Tensor, int]:
    targets = wanted_targets(recording, call, zeroing)
    if not len(targets):
        return empty_map(call, zeroing, group_members(call, zeroing)), 0
    # First: what the user's own functions raise is to be told as it is, and not as a layer's failure.
    rounding = _rounding(gather_rows(output, targets.batch, targets.out), zeroing.measure)
    scores = _scores(recording, call, output, zeroing, targets)
    largest = scores.amax(-1)[targets.batch, targets.place]
    return scores, int(((largest > 0) & (largest < rounding.to(largest))).sum())


def _scores(recording: LayerRecord, call: AttentionRecord, output: Tensor, zeroing: Ablation, targets: TargetRows) -> Tensor:
    reasons = []
    for way in REPLAYS if call.windows is None else (_folded_pairs, _in_windows):
        try:
            return way(recording, call, output, zeroing, targets)
        # A layer that does not fit a way can fail in it in any manner; the next way, or the error below, answers.
        except FAILURES as error:
            if way is _folded_pairs:  # a faster form of the next way, whose reason is the one that counts
                if zeroing.fast and not isinstance(error, TooFewError):
                    room = isinstance(error, torch.OutOfMemoryError)
                    why = "found no memory for" if room else "knows no shape like that of"
                    recording.notes.append(f"matmul_precision='medium' {why} {recording.name}, computed exactly")
            elif isinstance(error, torch.OutOfMemoryError):
                raise
            elif not isinstance(error, SameAgainError):
                reasons.append(f"{way.__name__.strip('_').replace('_', ' ')}: {error}")
    raise AssertionError(
        f"The layer {recording.name} cannot be replayed: run again on its own clean input, it does not "
        f"return its clean output, so that no distance could be trusted. Tried {'; '.join(reasons)}. Pass a single "
        "Transformer block in eval mode, whose output at each token depends on its input alone."
    )


def _output(recording: LayerRecord, call: AttentionRecord) -> Tensor | None:
    """The layer's hidden states, `(batch, out, d)`."""
    output = first_tensor(recording.output)
    if output is not None and call.windows is not None:
        return call.windows.by_position(output)
    return output if output is None else call.batch_first(output)
