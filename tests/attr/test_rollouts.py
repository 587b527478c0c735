"""Rollouts against products and flows taken in loops: of every method's maps, and for each receptive field."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import (
    ALTI,
    AttentionFlow,
    AttentionRollout,
    GlobEnc,
    HiddenTokenAttribution,
    LayerALTI,
    LayerAttention,
    LayerAttentionNorm,
    RandomAttribution,
    Rollout,
    ValueZeroing,
    ValueZeroingRollout,
    find_layers,
)
from captum_vz.functional import normalize_rows, receptive_fields
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.functional.test_groups import naive_pool
from tests.reference import FAMILIES, Case, naive_attention_maps, naive_flow, naive_rollout, naive_value_zeroing_maps

RESIDUALS = [None, 0.5, "renormalize"]
each_residual = pytest.mark.parametrize("residual", RESIDUALS)
each_family = pytest.mark.parametrize("name", quick(FAMILIES, "bert", "gpt2", "llama", "albert", "bart-decoder", "vit"))

# The class, the naive twin of its maps, and the naive twin of its join.
ROLLOUTS: dict[Any, tuple[Any, Any]] = {
    ValueZeroingRollout: (naive_value_zeroing_maps, naive_rollout),
    AttentionRollout: (naive_attention_maps, naive_rollout),
    AttentionFlow: (naive_attention_maps, naive_flow),
}
each_method = pytest.mark.parametrize("method", ROLLOUTS)


@cache
def naive_maps(method: Any, case: Case) -> list[Tensor]:
    return ROLLOUTS[method][0](case)


def check(method: Any, case: Case, residual: Any, options: dict[str, Any], **attribute: Any) -> None:
    _, join = ROLLOUTS[method]
    named = {"heads" if name == "reduce_heads" else name: value for name, value in options.items()}
    maps = naive_maps(method, case) if not options else ROLLOUTS[method][0](case, **named)
    expected = join(maps, residual)
    of = method(case.model, case.layers, residual=residual, **options)
    answers = of.attribute(case.inputs, all_layers=True, **attribute)
    assert len(answers) == len(expected)
    assert_same(answers, expected)
    assert_same(of.attribute(case.inputs, **attribute), expected[-1])


@each_family
def test_the_papers_rollouts_of_every_family(name: str) -> None:
    check(ValueZeroingRollout, FAMILIES[name].case, None, {})
    check(AttentionRollout, FAMILIES[name].case, 0.5, {})


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("bert", "gpt2", "albert-two-in-turn", "t5-decoder", "vit")),
    ("gpt2", {"reduce_heads": "max"}),
    *(("gpt2", {"heads": heads}) for heads in (1, [0, 3])),
    *(("llama", {"distance": "euclidean", **some}) for some in ({"heads": [0, 2]}, {"normalize": False})),
]


@each_residual
@pytest.mark.parametrize(("name", "options"), OPTIONS)
@each_method
def test_residuals_and_options(method: Any, name: str, options: dict[str, Any], residual: Any) -> None:
    options = {key: value for key, value in options.items() if hasattr(method(len, [nn.Identity()]), key)}
    heads = options.get("heads")
    if method is ValueZeroingRollout and isinstance(heads, int):
        options["heads"] = [heads]
    check(method, FAMILIES[name].case, residual, options)


def test_repeated_layer_counts_each_run() -> None:
    """ALBERT runs one layer three times, or two layers in turn, twice each."""
    for name, runs in (("albert", 3), ("albert-two-in-turn", 4)):
        case = FAMILIES[name].case
        for method in (ValueZeroingRollout, AttentionRollout):
            of = method(case.model, case.layers)
            assert len(of.attribute(case.inputs, all_layers=True)) == runs


@each_method
def test_part_of_a_stack(method: Any) -> None:
    case = FAMILIES["bert"].case
    _, join = ROLLOUTS[method]
    for some in (slice(1, 3), slice(0, 1), slice(1, 2), slice(0, 3, 2)):
        left_out = {"other_mixing": "ignore"} if some.step else {}
        answer = method(case.model, case.layers[some], residual=0.5, **left_out).attribute(case.inputs)
        assert_same(answer, join(naive_maps(method, case)[some], 0.5)[-1])


@each_residual
@each_method
def test_row_equals_row_of_the_map(method: Any, residual: Any) -> None:
    case = FAMILIES["bert"].case
    of = method(case.model, case.layers, residual=residual)
    whole = of.attribute(case.inputs, all_layers=True)
    real = case.inputs["attention_mask"].bool()
    for one in whole:
        assert not one[~real].any()
        assert not one.mT[~real].any()
    rows = of.attribute(case.inputs, token=-5, all_layers=True)
    assert_same(rows, [one[:, -5] for one in whole])
    several = of.attribute(case.inputs, token=[6, 0, 2], all_layers=True)
    assert_same(several, [one[range(3), [6, 0, 2]] for one in whole])


def by_feature(method: Any, case: Case, mask: Tensor, residual: Any) -> list[Tensor]:
    """Each layer's map pooled to features, example by example, then joined, then given to the features' tokens."""
    added = method is not ValueZeroingRollout
    maps = naive_attention_maps(case) if added else naive_value_zeroing_maps(case, groups=mask)
    length = maps[0].shape[-1]
    reals = case.mask(case.family.mask, length)
    answers = [torch.zeros_like(one) for one in maps]
    for b in range(case.batch):
        real = reals[b]
        features = mask.expand(case.batch, -1)[b : b + 1, real]
        by_group = [naive_pool(one[b : b + 1, real][..., real], features, "mean", not added) for one in maps]
        place = features[0].unique(return_inverse=True)[1]
        for answer, one in zip(answers, ROLLOUTS[method][1](by_group, residual), strict=True):
            answer[b, real] = answer[b, real].index_copy(1, real.nonzero().flatten(), one[0][place][:, place])
    return answers


MASKS = {
    "each its own": torch.arange(7).flip(0)[None],
    "scattered": torch.tensor([[7, -2, 7, -2, 5, 5, 5]]),
    "one": torch.zeros(1, 7, dtype=torch.long),
    "of each example": torch.tensor([[0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 4, 4], [1, 1, 0, 0, 0, 0, 0]]),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
@each_residual
@each_method
def test_features(method: Any, residual: Any, name: str, mask: Tensor) -> None:
    case = FAMILIES[name].case
    of, expected = method(case.model, case.layers, residual=residual), by_feature(method, case, mask, residual)
    assert_same(of.attribute(case.inputs, feature_mask=mask, all_layers=True), expected)
    row = of.attribute(case.inputs, feature_mask=mask, token=1)
    assert_same(row, expected[-1][:, 1])


@each_method
@pytest.mark.parametrize("name", ["bart-decoder", "t5-decoder"])
def test_encoder_and_decoder_of_equal_length(name: str, method: Any) -> None:
    case = FAMILIES[name].case
    ids = torch.randint(4, 60, (2, 6))
    inputs = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    encoder = find_layers(case.model, stack="encoder")
    with pytest.raises(AssertionError, match="multiplies maps"):
        method(case.model, case.layers, attention="cross").attribute(inputs)
    with pytest.raises(AssertionError, match="runs between the"):
        method(case.model, [*encoder, *case.layers]).attribute(inputs)
    for layers in (encoder, case.layers):
        assert method(case.model, layers).attribute(inputs).shape == (2, 6, 6)


# Rollouts of any maps, and scores for each receptive field.

BERT, GPT2 = FAMILIES["bert"].case, FAMILIES["gpt2"].case

# The special rollout, the arguments of the general rollout, and the residual of the paper.
SPECIAL: dict[str, tuple[Any, Callable[[Case], Any], Any]] = {
    "value zeroing": (ValueZeroingRollout, lambda case: ValueZeroing(case.model, case.layers), None),
    "attention": (AttentionRollout, lambda case: LayerAttention(case.model, case.layers), 0.5),
    "ALTI": (ALTI, lambda case: LayerALTI(case.model, case.layers), None),
    "GlobEnc": (GlobEnc, lambda case: LayerAttentionNorm(case.model, case.layers, include="encoder"), None),
}
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


def test_maps_of_wrong_type() -> None:
    for maps, message in (
        (AttentionRollout(BERT.model, BERT.layers), "AttentionRollout"),
        ([torch.ones(1, 2, 2)], "of type list:"),
        (HiddenTokenAttribution(BERT.model, BERT.layers), "HiddenToken"),
    ):
        with pytest.raises(AssertionError, match=message):
            Rollout(maps)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(AssertionError, match="type NoneType"):
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
    with pytest.raises(AssertionError, match="one layer, got none"):
        receptive_fields([])
    with pytest.raises(AssertionError, match="the maps before it"):
        receptive_fields([map_, map_[:, :3, :3]])
