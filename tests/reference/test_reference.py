"""The naive twins have the properties that hold in any model, and equal each other where both apply."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.reference.attention import naive_attention_maps, naive_flow, naive_rollout
from tests.reference.families import FAMILIES, FURTHER_FAMILIES, SEQUENCE_TO_SEQUENCE
from tests.reference.naive import (
    DISTANCES,
    naive_value_zeroing,
    naive_value_zeroing_maps,
    real_positions,
    record,
    rerun_with_zeroed_heads,
    rerun_with_zeroed_rows,
    site_of,
)

# The further families run with the slow tests.
SLOW = {name: [pytest.mark.slow] for name in FURTHER_FAMILIES}
ATTENTIONS = [pytest.param(name, "self", marks=SLOW.get(name, [])) for name in FAMILIES]
ATTENTIONS += [pytest.param(name, "cross") for name, family in SEQUENCE_TO_SEQUENCE.items() if family.cross]
each_family = pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, [])) for name in FAMILIES])
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


@each_attention
def test_rows_sum_to_one(name: str, attention: str) -> None:
    case = FAMILIES[name].case
    targets, sources = (torch.from_numpy(mask) for mask in real_positions(case, record(case)[0][0], attention))
    maps = naive_value_zeroing_maps(case, attention=attention)
    maps += naive_attention_maps(case, attention=attention, heads="max")
    for layer_map in maps:
        torch.testing.assert_close(layer_map.sum(-1), targets.double())
        assert not layer_map.transpose(1, 2)[~sources].any()


@each_attention
def test_padded_batch_equals_single_examples(name: str, attention: str) -> None:
    case = FAMILIES[name].case
    together = naive_value_zeroing(case, -1, attention=attention)
    for index in range(case.batch):
        (alone,) = naive_value_zeroing(case.example(index), -1, attention=attention)
        out, sources = alone.shape
        torch.testing.assert_close(together[index, :out, :sources], alone, rtol=0, atol=1e-10)
        assert not together[index, out:].any()
        assert not together[index, :, sources:].any()


@each_family
def test_causal_models_ignore_future_tokens(name: str) -> None:
    case = FAMILIES[name].case
    future = torch.stack([layer_map.triu(1) for layer_map in naive_value_zeroing_maps(case, normalize=False)]).max()
    # A mixture of experts sorts its tokens again in each run, which changes their last digit.
    assert (future < 1e-15) if case.causal else (future > 1e-6)


@each_family
def test_final_norm_follows_last_layer(name: str) -> None:
    case = FAMILIES[name].case
    runs, output = record(case)
    if case.final_norm:
        field = "encoder_last_hidden_state" if name.endswith("-encoder") else "last_hidden_state"
        assert torch.equal(case.final_norm(runs[-1].hidden), output[field])
        plain, normed = (naive_value_zeroing(case, -1, final_norm=norm) for norm in (None, case.final_norm))
        assert not torch.allclose(plain, normed)


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


def test_repeated_layers_give_several_maps() -> None:
    case = FAMILIES["albert-two-in-turn"].case
    maps = naive_value_zeroing_maps(case)
    assert [run.layer for run in record(case)[0]] == case.layers * 2
    assert torch.equal(naive_value_zeroing(case, 0), maps[2])
    assert torch.equal(naive_value_zeroing(case, 1), maps[3])


def test_distances_of_known_vectors() -> None:
    a, b = np.array([3.0, 0.0]), np.array([0.0, 4.0])
    assert {name: distance(a, b) for name, distance in DISTANCES.items()} == {
        "cosine": 1.0,
        "euclidean": 5.0,
        "l1": 7.0,
    }
    assert {distance(a, a) for distance in DISTANCES.values()} == {0.0}


@pytest.mark.parametrize("residual", [None, 0.5, "renormalize"])
def test_rollout_is_product_below_flow(residual: float | str | None) -> None:
    case = FAMILIES["bert"].case
    maps = naive_attention_maps(case)
    rollouts = naive_rollout(maps, residual)
    flows = naive_flow(maps, residual, normalize=False)
    real = case.inputs["attention_mask"].bool()
    for rollout, flow in zip(rollouts, flows, strict=True):
        torch.testing.assert_close(rollout.sum(-1), real.double())
        assert (flow >= rollout - 1e-12).all()
    torch.testing.assert_close(flows[0], rollouts[0])

    identity = torch.eye(7, dtype=torch.float64)
    factors = [layer_map[0] if residual is None else (layer_map[0] + identity) / 2 for layer_map in maps]
    torch.testing.assert_close(rollouts[-1][0], factors[2] @ factors[1] @ factors[0])
