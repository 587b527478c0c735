"""The naive twins have the properties that hold in any model, and equal each other where both apply."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.reference.families import FAMILIES, FURTHER_FAMILIES, SEQUENCE_TO_SEQUENCE
from tests.reference.naive import (
    DISTANCES,
    naive_value_zeroing,
    record,
    rerun_with_zeroed_heads,
    rerun_with_zeroed_rows,
    site_of,
)

# The further families run with the slow tests.
SLOW = {name: [pytest.mark.slow] for name in FURTHER_FAMILIES}
ATTENTIONS = [pytest.param(name, "self", marks=SLOW.get(name, [])) for name in FAMILIES]
ATTENTIONS += [pytest.param(name, "cross") for name, family in SEQUENCE_TO_SEQUENCE.items() if family.cross]
each_attention = pytest.mark.parametrize(("name", "attention"), ATTENTIONS)


@each_attention
def test_zeroing_nothing_changes_nothing(name: str, attention: str) -> None:
    case = FAMILIES[name].case
    site = site_of(case, attention)
    runs, output = record(case, output_attentions=True)
    assert len(runs) == len(output[site.weights]) >= len(case.layers)
    for run, weights in zip(runs, output[site.weights], strict=True):
        nothing = np.zeros((case.batch, weights.shape[-1]), dtype=bool)
        assert torch.equal(rerun_with_zeroed_rows(run, site, nothing), run.hidden)
        by_hand = rerun_with_zeroed_heads(run, site, weights, nothing, range(site.heads))
        torch.testing.assert_close(by_hand, run.hidden, rtol=1e-12, atol=1e-12)


@each_attention
def test_zeroing_all_heads_equals_zeroing_row(name: str, attention: str) -> None:
    case = FAMILIES[name].case
    options = {"attention": attention, "distance": "l1", "normalize": False}
    by_hand = naive_value_zeroing(case, -1, heads=range(case.family.attention.heads), **options)
    assert by_hand.any()
    torch.testing.assert_close(by_hand, naive_value_zeroing(case, -1, **options), rtol=1e-10, atol=1e-12)
    some = naive_value_zeroing(case, -1, heads=[1], **options)
    assert some.any()
    assert not torch.allclose(some, by_hand, rtol=0.1)


@pytest.mark.parametrize("heads", [None, [0, 2]])
def test_groups_are_zeroed_together(heads: list[int] | None) -> None:
    case = FAMILIES["bert"].case
    each_alone = naive_value_zeroing(case, 0, heads=heads)
    assert torch.equal(naive_value_zeroing(case, 0, heads=heads, groups=[range(7)]), each_alone)
    assert torch.equal(
        naive_value_zeroing(case, 0, heads=heads, groups=torch.arange(7).flip(0).expand(3, 7)), each_alone
    )

    # Tokens 2 and 3 are one group. The row sums to one if the group counts once.
    pair = naive_value_zeroing(case, 0, heads=heads, groups=[[0, 1, 2, 2, 3, 4, 5]])
    assert torch.equal(pair[0, :, 2], pair[0, :, 3])
    torch.testing.assert_close(pair[0].sum(-1) - pair[0, :, 3], torch.ones(7, dtype=torch.float64))

    # All tokens are one group, which has the whole score, except for padding.
    everything = naive_value_zeroing(case, 0, heads=heads, groups=[[5] * 7])
    real = case.inputs["attention_mask"].double()
    assert torch.equal(everything, real[:, :, None] * real[:, None, :])


def test_distances_of_known_vectors() -> None:
    a, b = np.array([3.0, 0.0]), np.array([0.0, 4.0])
    assert {name: distance(a, b) for name, distance in DISTANCES.items()} == {
        "cosine": 1.0,
        "euclidean": 5.0,
        "l1": 7.0,
    }
    assert {distance(a, a) for distance in DISTANCES.values()} == {0.0}
