"""TODO."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tolerance import check_reproduced
from captum_vz._engine.replay.base import Ablation, TargetRows, empty_map, group_members, zeroed_heads


def _in_windows(
    recording: LayerRecord, call: AttentionRecord, output: Tensor, zeroing: Ablation, _targets: TargetRows
) -> Tensor:
    assert call.windows is not None
    scores = empty_map(call, zeroing, group_members(call, zeroing))
    heads = zeroed_heads(call, zeroing.heads)
    nothing = torch.zeros_like(call.windows.position, dtype=torch.bool)
    clean = call.windows.run(nothing, heads)
    check_reproduced(clean.flatten(0, 1), output.flatten(0, 1))
    clean = zeroing.measure.prepare(clean)
    for zeroed, column in call.windows.steps(zeroing.groups, one_by_one=zeroing.at_most is not None):
        distance = zeroing.measure.between(zeroing.measure.prepare(call.windows.run(zeroed, heads)), clean)
        if zeroing.rows is not None:
            distance, column = distance.gather(1, zeroing.rows), column.gather(1, zeroing.rows)
        example, row = (column >= 0).nonzero(as_tuple=True)
        scores[example, row, column[example, row]] = distance[example, row].to(scores)
    return scores
