"""Several rows at once: a list of positions for a single example, or a slice for all."""

from __future__ import annotations

import pytest
import torch

from captum_vz import AttentionFlow, AttentionRollout, LayerAttention, ValueZeroing, ValueZeroingRollout
from tests.reference import FAMILIES

each_method = pytest.mark.parametrize(
    "method", [ValueZeroing, ValueZeroingRollout, LayerAttention, AttentionRollout, AttentionFlow]
)


@each_method
def test_a_list_of_positions_of_one_example(method: type) -> None:
    case = FAMILIES["bert"].case
    ids = case.inputs["input_ids"][:1]
    explain = method(case.model, case.layers)
    full, rows = explain.attribute(ids), explain.attribute(ids, target=[4, 0, -1])
    full, rows = (x[-1] if isinstance(x, list) else x for x in (full, rows))
    assert rows.shape == (1, 3, ids.shape[1])
    torch.testing.assert_close(rows, full[:, [4, 0, -1]], rtol=0, atol=1e-12)


@each_method
def test_a_slice_of_positions_of_every_example(method: type) -> None:
    case = FAMILIES["gpt2"].case
    explain = method(case.model, case.layers)
    for target in [(slice(0, 3),), (slice(None, 3, 2), 0), (2, slice(0, 2))]:
        full, rows = explain.attribute(case.inputs), explain.attribute(case.inputs, target=target)
        full, rows = (x[-1] if isinstance(x, list) else x for x in (full, rows))
        torch.testing.assert_close(rows, full[(slice(None), *target)], rtol=0, atol=1e-12)
