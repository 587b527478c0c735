"""Baselines without a model: random scores and scores by position."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from scipy import stats

from captum_vz import PositionAttribution, RandomAttribution
from captum_vz.errors import ArgumentError

IDS = torch.tensor([[7, 3, 5, 3, 9], [7, 4, 9, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
POSITIONS = ["nearest", "first", "last", "uniform"]
BASELINES = [RandomAttribution, *(partial(PositionAttribution, highest=highest) for highest in POSITIONS)]
each_baseline = pytest.mark.parametrize("build", BASELINES, ids=["random", *POSITIONS])


@each_baseline
@pytest.mark.parametrize("causal", [False, True])
def test_rows_padding_and_causal_mask(build: Any, causal: bool) -> None:
    maps = build(causal=causal).attribute({"input_ids": IDS, "attention_mask": MASK})
    assert maps.shape == (2, 5, 5)
    torch.testing.assert_close(maps.sum(-1), MASK.float())
    there = (MASK[:, :, None] * MASK[:, None, :]).bool()
    seen = there & torch.ones(5, 5).tril().bool() if causal else there
    assert torch.equal(maps > 0, seen)


@each_baseline
def test_token_and_target_pick_rows(build: Any) -> None:
    whole = build().attribute(IDS, attention_mask=MASK)
    vectors = build().attribute({"inputs_embeds": torch.randn(2, 5, 3), "attention_mask": MASK})
    torch.testing.assert_close(vectors.sum(-1), MASK.float())
    assert torch.equal(build().attribute(IDS, token=1, attention_mask=MASK), whole[:, 1])
    assert torch.equal(build().attribute(IDS, token=-1, attention_mask=MASK), whole[:, -1])
    assert torch.equal(build().attribute(IDS, token=[4, 2], attention_mask=MASK), whole[[0, 1], [4, 2]])
    assert torch.equal(build().attribute(IDS, (1, 9), "ignored", attention_mask=MASK), whole[:, 1])
    with pytest.raises(ArgumentError, match="name a class, but"):
        build().attribute(IDS, 1)


@each_baseline
def test_padded_batch_equals_its_examples(build: Any) -> None:
    whole = build().attribute(IDS, attention_mask=MASK)
    torch.testing.assert_close(whole[:1], build().attribute(IDS[:1]), rtol=0, atol=0)
    torch.testing.assert_close(whole[1:, :3, :3], build().attribute(IDS[1:, :3]), rtol=0, atol=0)
    left = build().attribute(IDS[1:].roll(2, 1), attention_mask=MASK[1:].roll(2, 1))
    torch.testing.assert_close(left[:, 2:, 2:], whole[1:, :3, :3], rtol=0, atol=0)


def test_positions_in_loops() -> None:
    distances = (lambda i, j: abs(i - j), lambda i, j: j, lambda i, j: 4 - j, lambda i, j: 0)
    for highest, far in zip(POSITIONS, distances, strict=True):
        found = PositionAttribution(highest=highest).attribute(IDS[:1])[0]
        for i in range(5):
            total = sum(1 / (1 + far(i, k)) for k in range(5))
            for j in range(5):
                assert found[i, j].item() == pytest.approx(1 / (1 + far(i, j)) / total, rel=1e-6)


def test_scores_depend_on_the_sentence() -> None:
    of = RandomAttribution(seed=1)
    assert torch.equal(of.attribute(IDS), of.attribute(IDS))
    assert torch.equal(of.attribute(IDS.flip(0)), of.attribute(IDS).flip(0))
    assert not torch.equal(of.attribute(IDS), RandomAttribution(seed=2).attribute(IDS))
    one_by_one = [of.attribute(torch.tensor([[7, word, 9]]), token=1)[0] for word in range(200)]
    assert len({tuple(row.tolist()) for row in one_by_one}) == 200
    state = torch.get_rng_state()
    of.attribute(IDS)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_source_has_the_same_chance() -> None:
    highest = [RandomAttribution().attribute(torch.tensor([[7, n, 5, 9]]), token=0).argmax().item() for n in range(800)]
    counts = torch.bincount(torch.tensor(highest), minlength=4)
    assert stats.chisquare(counts).pvalue > 0.001


@each_baseline
@pytest.mark.parametrize("causal", [False, True])
def test_feature_has_first_tokens_score(build: Any, causal: bool) -> None:
    of = build(causal=causal)
    mask = torch.tensor([[4, 1, 4, 1, 2], [0, 0, 7, 7, 7]])
    found = of.attribute(IDS, attention_mask=MASK, feature_mask=mask)
    whole = of.attribute(IDS, attention_mask=MASK)
    for b in range(2):
        there = [j for j in range(5) if MASK[b, j]]
        features = [int(mask[b, j]) for j in there]
        for i in there:
            total = sum(whole[b, i, features.index(feature)] for feature in set(features))
            for j in there:
                expected = whole[b, i, features.index(features[there.index(j)])] / total
                torch.testing.assert_close(found[b, i, j], expected)
    assert torch.equal(of.attribute(IDS, feature_mask=torch.arange(5)[None]), of.attribute(IDS))


def test_list_of_layers() -> None:
    layers = [torch.nn.Identity() for _ in range(3)]
    lots = RandomAttribution(None, layers).attribute(IDS, token=1, attention_mask=MASK)
    assert [lot.shape for lot in lots] == [(2, 5)] * 3
    assert not torch.equal(lots[0], lots[1])
    assert torch.equal(lots[0], RandomAttribution(None, layers[0]).attribute(IDS, token=1, attention_mask=MASK))
    places = PositionAttribution(None, layers).attribute(IDS)
    assert all(torch.equal(one, PositionAttribution().attribute(IDS)) for one in places)


@each_baseline
def test_bad_arguments_are_refused(build: Any) -> None:
    for arguments, message in (
        ({"inputs": torch.zeros(5)}, r"inputs is \(5,\)"),
        ({"inputs": {}}, "inputs is NoneType"),
        ({"inputs": IDS[:, :0]}, r"inputs is \(2, 0\)"),
        ({"inputs": IDS, "attention_mask": MASK[:, :2]}, r"mask is \(2, 2\)"),
        ({"inputs": IDS, "token": 5}, "token 5 is out of"),
        ({"inputs": IDS, "feature_mask": MASK[:, :3]}, r"mask is \(2, 3\)"),
        ({"inputs": IDS, "feature_mask": MASK.float()}, "mask is torch.float"),
    ):
        with pytest.raises(AssertionError, match=message):
            build().attribute(**arguments)
    with pytest.raises(AssertionError, match="highest is 'middle'"):
        PositionAttribution(highest="middle")
