"""The twins are themselves checked against what must hold whatever the model: identities, and each twin by the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.reference.case import Case
from tests.reference.families import FAMILIES
from tests.reference.naive import (
    naive_value_zeroing,
    naive_value_zeroing_maps,
    real_positions,
    record,
    rerun_with_zeroed_rows,
)


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return FAMILIES[request.param].case


def test_zeroing_nothing_changes_nothing(case: Case) -> None:
    for run in record(case)[0]:
        nothing = np.zeros((case.batch, run.hidden.shape[1]), dtype=bool)
        unchanged = rerun_with_zeroed_rows(run, case.family.attention, nothing)
        assert torch.equal(unchanged, run.hidden)


def test_each_row_sums_to_one_and_padding_is_zero(case: Case) -> None:
    targets, sources = real_positions(case, record(case)[0][0], "self")
    for layer_map in naive_value_zeroing_maps(case):
        torch.testing.assert_close(
            layer_map.sum(-1), torch.from_numpy(targets).double()
        )
        assert not layer_map.transpose(1, 2)[~torch.from_numpy(sources)].any()


def test_future_tokens_do_not_count(case: Case) -> None:
    future = torch.cat(
        [layer_map.triu(1).flatten() for layer_map in naive_value_zeroing_maps(case)]
    )
    assert bool(future.any()) is not case.causal


def test_padded_batch_equals_unpadded_examples(case: Case) -> None:
    together = naive_value_zeroing(case, -1)
    for index in range(case.batch):
        alone = naive_value_zeroing(case.example(index), -1)[0]
        length = len(alone)
        torch.testing.assert_close(
            together[index, :length, :length], alone, rtol=0, atol=1e-10
        )


def test_zeroing_all_heads_by_hand_equals_zeroing_the_row(case: Case) -> None:
    every_head = range(case.family.attention.heads)
    by_hand = naive_value_zeroing(
        case, -1, heads=every_head, distance="l1", normalize=False
    )
    torch.testing.assert_close(
        by_hand, naive_value_zeroing(case, -1, distance="l1", normalize=False)
    )
