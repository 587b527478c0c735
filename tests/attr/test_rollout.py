"""Rollout of every method's maps, the special rollouts, and scores for each receptive field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz import (
    ALTI,
    AttentionFlow,
    AttentionRollout,
    GlobEnc,
    HiddenTokenAttribution,
    LayerALTI,
    LayerAttention,
    LayerAttentionNorm,
    PositionAttribution,
    RandomAttribution,
    Rollout,
    ValueZeroing,
    ValueZeroingRollout,
)
from captum_vz.functional import normalize_rows, receptive_fields
from tests.engine.compare import assert_same
from tests.reference import FAMILIES, Case, naive_flow, naive_rollout

BERT, GPT2 = FAMILIES["bert"].case, FAMILIES["gpt2"].case

# The special rollout, the arguments of the general rollout, and the residual of the paper.
SPECIAL: dict[str, tuple[Any, Callable[[Case], Any], Any]] = {
    "value zeroing": (ValueZeroingRollout, lambda case: ValueZeroing(case.model, case.layers), None),
    "attention": (AttentionRollout, lambda case: LayerAttention(case.model, case.layers), 0.5),
    "ALTI": (ALTI, lambda case: LayerALTI(case.model, case.layers), None),
    "GlobEnc": (GlobEnc, lambda case: LayerAttentionNorm(case.model, case.layers, include="encoder"), None),
}
MAPS: dict[str, Callable[[Case], Any]] = {
    "norms": lambda case: LayerAttentionNorm(case.model, case.layers),
    "norms with the residual": lambda case: LayerAttentionNorm(case.model, case.layers, include="residual"),
    "a head": lambda case: LayerAttention(case.model, case.layers, heads=1),
    "ALTI": lambda case: LayerALTI(case.model, case.layers, p=2),
    "value zeroing": lambda case: ValueZeroing(case.model, case.layers, distance="l1"),
    "random": lambda case: RandomAttribution(case.model, case.layers, causal=case.causal),
    "position": lambda case: PositionAttribution(case.model, case.layers, causal=case.causal),
}
each_case = pytest.mark.parametrize("case", [BERT, GPT2], ids=["bert", "gpt2"])
each_map = pytest.mark.parametrize("name", MAPS)
WORDS = torch.tensor([[0, 0, 1, 1, 2, 2, 3]])


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(
    "keywords", [{}, {"target": [2, 0, 1]}, {"feature_mask": WORDS}, {"all_layers": True}], ids=str
)
def test_special_rollouts_equal_the_general_rollout(name: str, keywords: dict[str, Any]) -> None:
    special, maps, residual = SPECIAL[name]
    expected = special(BERT.model, BERT.layers).attribute(BERT.inputs, **keywords)
    found = Rollout(maps(BERT), residual=residual).attribute(BERT.inputs, **keywords)
    for one, other in zip(list(found), list(expected), strict=True):
        assert torch.equal(one, other)
    assert isinstance(special(BERT.model, BERT.layers), Rollout)


@each_map
@each_case
@pytest.mark.parametrize("residual", [None, 0.5, "renormalize"])
def test_maps_of_every_method(name: str, case: Case, residual: Any) -> None:
    maps = MAPS[name](case).attribute(case.inputs)
    expected = naive_rollout(maps, residual)
    of = Rollout(MAPS[name](case), residual=residual)
    # Baselines return float32 for any dtype of the model.
    assert_same(of.attribute(case.inputs), expected[-1].to(maps[0].dtype), tolerance=1e-7)
    rows = of.attribute(case.inputs, token=-5, all_layers=True)
    assert_same(rows, [one[:, -5].to(maps[0].dtype) for one in expected], tolerance=1e-7)
    torch.testing.assert_close(of.attribute(case.inputs).sum(-1), case.inputs["attention_mask"].to(maps[0].dtype))


def test_a_tuple_for_a_tuple() -> None:
    ids = BERT.inputs["input_ids"]
    of = Rollout(RandomAttribution(layer=BERT.layers))
    (answer,) = of.attribute((ids,))
    assert torch.equal(answer, of.attribute(ids))


def test_maps_of_wrong_type() -> None:
    with pytest.raises(AssertionError, match="maps is of type AttentionRollout"):
        Rollout(AttentionRollout(BERT.model, BERT.layers))  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(AssertionError, match="maps is of type list:"):
        Rollout([torch.ones(1, 2, 2)])  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(AssertionError, match="maps is a HiddenTokenAttribution"):
        Rollout(HiddenTokenAttribution(BERT.model, BERT.layers))
    with pytest.raises(AssertionError, match="layer is of type NoneType"):
        Rollout(RandomAttribution()).attribute(BERT.inputs)


def naive_per_receptive_field(joined: Tensor, maps: list[Tensor], residual: Any) -> Tensor:
    """Divide each score by the number of tokens that its source reaches, then normalise the rows."""
    answer = torch.zeros_like(joined)
    for b in range(len(joined)):
        length = joined.shape[-1]
        for j in range(length):
            reached = {j}
            for one in maps:
                kept = {i for i in reached if residual is not None and one[b, i].any()}
                reached = kept | {i for i in range(length) for k in reached if one[b, i, k] != 0}
            for i in range(length):
                answer[b, i, j] = joined[b, i, j] / max(len(reached), 1)
        for i in range(length):
            if answer[b, i].any():
                answer[b, i] /= sum(answer[b, i])
    return answer


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
@pytest.mark.parametrize("method", [ValueZeroingRollout, AttentionRollout, AttentionFlow])
def test_scores_for_each_receptive_field(method: Any, name: str) -> None:
    case = FAMILIES[name].case
    layered, join, residual = {
        ValueZeroingRollout: (ValueZeroing, naive_rollout, None),
        AttentionRollout: (LayerAttention, naive_rollout, 0.5),
        AttentionFlow: (LayerAttention, naive_flow, 0.5),
    }[method]
    maps = layered(case.model, case.layers).attribute(case.inputs)
    expected = [
        naive_per_receptive_field(one, maps[: depth + 1], residual) for depth, one in enumerate(join(maps, residual))
    ]
    of = method(case.model, case.layers, per_receptive_field=True)
    assert_same(of.attribute(case.inputs, all_layers=True), expected)
    assert_same(of.attribute(case.inputs, token=[6, 2, 1]), expected[-1][range(3), [6, 2, 1]])
    uncorrected = method(case.model, case.layers).attribute(case.inputs)
    assert (uncorrected - expected[-1]).abs().max() > 1e-3


def test_features_have_receptive_fields_too() -> None:
    case, by_token = GPT2.example(0), torch.arange(7)[None]
    of = AttentionRollout(case.model, case.layers, per_receptive_field=True)
    assert_same(of.attribute(case.inputs, feature_mask=by_token), of.attribute(case.inputs))
    words = of.attribute(case.inputs, feature_mask=WORDS, token=5)
    plain = AttentionRollout(case.model, case.layers).attribute(case.inputs, feature_mask=WORDS, token=5)
    # Of seven tokens in four words, the words reach 4, 3, 2 and 1 words; [5] is in the third.
    expected = plain[0] / torch.tensor([4, 4, 3, 3, 2, 2, 1])
    torch.testing.assert_close(words[0], expected / expected[[0, 2, 4, 6]].sum())


@pytest.mark.parametrize("method", [ValueZeroingRollout, AttentionRollout, AttentionFlow])
def test_receptive_fields_with_full_attention(method: Any) -> None:
    case = BERT.example(0)
    corrected = method(case.model, case.layers, per_receptive_field=True).attribute(case.inputs)
    assert_same(corrected, method(case.model, case.layers).attribute(case.inputs))


def test_receptive_fields_with_uniform_causal_attention() -> None:
    # In one layer of uniform causal attention, row i is 1 / (i + 1), and source j reaches n - j tokens.
    even = PositionAttribution(layer=[torch.nn.Identity()], causal=True, highest="uniform")
    (found,) = Rollout(even, per_receptive_field=True).attribute(torch.ones(1, 3, dtype=torch.long))
    expected = normalize_rows(torch.tensor([[1.0, 0, 0], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1]]))
    torch.testing.assert_close(found, expected)


def test_cost_of_one_flow_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from networkx.algorithms import flow

    solve, pairs = flow.shortest_augmenting_path, []

    def counted(network: object, source: object, sink: object, **options: object) -> object:
        pairs.append((source, sink))
        return solve(network, source, sink, **options)

    monkeypatch.setattr(flow, "shortest_augmenting_path", counted)
    for correct in (False, True):
        pairs.clear()
        AttentionFlow(BERT.model, BERT.layers, per_receptive_field=correct).attribute(BERT.inputs, token=[4, 2, 1])
        lengths = BERT.inputs["attention_mask"].sum(-1).tolist()
        assert pairs == [
            ((3, row), (0, token)) for row, length in zip([4, 2, 1], lengths, strict=True) for token in range(length)
        ]


def test_receptive_fields_of_a_deep_stack() -> None:
    map_ = normalize_rows(torch.eye(4) + 1e-6 * torch.ones(4, 4).tril())[None]
    assert receptive_fields([map_] * 500)[-1].tolist() == [[4, 3, 2, 1]]
    with pytest.raises(AssertionError, match="at least one layer, got none"):
        receptive_fields([])
    with pytest.raises(AssertionError, match=r"map 1 is \(1, 3, 3\), the maps before it are \(1, 4, 4\)"):
        receptive_fields([map_, map_[:, :3, :3]])
