"""ValueZeroingRollout, AttentionRollout and AttentionFlow against products and flows taken in loops."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz import AttentionFlow, AttentionRollout, ValueZeroingRollout, find_layers
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.reference import (
    FAMILIES,
    Case,
    naive_attention_maps,
    naive_flow,
    naive_rollout,
    naive_value_zeroing_maps,
)

RESIDUALS = [None, 0.5, "renormalize"]
each_residual = pytest.mark.parametrize("residual", RESIDUALS)
each_family = pytest.mark.parametrize("name", quick(FAMILIES, "bert", "gpt2", "llama", "albert", "bart-decoder", "vit"))
each_varied = pytest.mark.parametrize("name", ["bert", "gpt2", "albert-two-in-turn", "t5-decoder", "vit"])

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


@each_residual
@each_varied
@each_method
def test_residuals(method: Any, name: str, residual: Any) -> None:
    check(method, FAMILIES[name].case, residual, {})


@pytest.mark.parametrize("options", [{"reduce_heads": "max"}, {"heads": 1}, {"heads": [0, 3]}])
@pytest.mark.parametrize("method", [AttentionRollout, AttentionFlow])
def test_heads_of_attention(method: Any, options: dict[str, Any]) -> None:
    check(method, FAMILIES["gpt2"].case, 0.5, options)


@pytest.mark.parametrize(
    "options", [{"heads": [0, 2]}, {"distance": "l1"}, {"normalize": False}, {"distance": "euclidean", "heads": [1]}]
)
def test_options_of_value_zeroing(options: dict[str, Any]) -> None:
    check(ValueZeroingRollout, FAMILIES["llama"].case, None, options)


def test_repeated_layer_counts_each_run() -> None:
    """ALBERT runs one layer three times, or two layers in turn, twice each."""
    for name, runs in (("albert", 3), ("albert-two-in-turn", 4)):
        case = FAMILIES[name].case
        assert len(naive_maps(ValueZeroingRollout, case)) == runs
        for method in ROLLOUTS:
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
    for target in (0, -5, 2):
        rows = of.attribute(case.inputs, token=target, all_layers=True)
        assert_same(rows, [one[:, target] for one in whole])
    several = of.attribute(case.inputs, token=[6, 0, 2], all_layers=True)
    assert_same(several, [one[range(3), [6, 0, 2]] for one in whole])


def pooled(layer_map: Tensor, features: list[int], real: list[bool], added: bool) -> Tensor:
    """One example's map (1, feature, feature): a feature's rows averaged, its columns added up or one for all."""
    names = sorted({feature for feature, is_real in zip(features, real, strict=True) if is_real})
    members = [[i for i, feature in enumerate(features) if feature == name and real[i]] for name in names]
    answer = torch.zeros(1, len(names), len(names), dtype=torch.float64)
    for g, rows in enumerate(members):
        for h, columns in enumerate(members):
            for i in rows:
                scores = [float(layer_map[i, j]) for j in columns]
                answer[0, g, h] += (sum(scores) if added else scores[0]) / len(rows)
    return answer


def by_feature(method: Any, case: Case, mask: Tensor, residual: Any) -> list[Tensor]:
    """Each layer's map pooled to features, example by example, then joined, then given to the features' tokens."""
    added = method is not ValueZeroingRollout
    maps = naive_attention_maps(case) if added else naive_value_zeroing_maps(case, groups=mask)
    length = maps[0].shape[-1]
    reals = case.mask(case.family.mask, length)
    answers = [torch.zeros_like(one) for one in maps]
    for b in range(case.batch):
        features, real = mask.expand(case.batch, -1)[b].tolist(), reals[b].tolist()
        names = sorted({feature for feature, is_real in zip(features, real, strict=True) if is_real})
        joined = ROLLOUTS[method][1]([pooled(one[b], features, real, added) for one in maps], residual)
        for answer, one in zip(answers, joined, strict=True):
            for i in range(length):
                for j in range(length):
                    if real[i] and real[j]:
                        answer[b, i, j] = one[0, names.index(features[i]), names.index(features[j])]
    return answers


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[0, 0, 1, 1, 1, 2, 3]]),
        torch.tensor([[7, -2, 7, -2, 5, 5, 5]]),
        torch.tensor([[0, 0, 0, 0, 0, 0, 0]]),
        torch.tensor([[0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 4, 4], [1, 1, 0, 0, 0, 0, 0]]),
    ],
    ids=["spans", "scattered", "one", "of each example"],
)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
@each_residual
@each_method
def test_features(method: Any, residual: Any, name: str, mask: Tensor) -> None:
    case = FAMILIES[name].case
    of, expected = method(case.model, case.layers, residual=residual), by_feature(method, case, mask, residual)
    assert_same(of.attribute(case.inputs, feature_mask=mask, all_layers=True), expected)
    row = of.attribute(case.inputs, feature_mask=mask, token=1)
    assert_same(row, expected[-1][:, 1])


def test_features_of_one_token() -> None:
    case = FAMILIES["bert"].case
    for method in ROLLOUTS:
        of = method(case.model, case.layers)
        each = of.attribute(case.inputs, feature_mask=torch.arange(7).flip(0)[None])
        assert_same(each, of.attribute(case.inputs))


@each_method
@pytest.mark.parametrize("name", ["bart-decoder", "t5-decoder"])
def test_encoder_and_decoder_of_equal_length(name: str, method: Any) -> None:
    case = FAMILIES[name].case
    ids = torch.randint(4, 60, (2, 6))
    inputs = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    encoder = find_layers(case.model, stack="encoder")
    with pytest.raises(AssertionError, match="multiplies maps of self-attention"):
        method(case.model, case.layers, attention="cross").attribute(inputs)
    with pytest.raises(AssertionError, match="runs between the layers 2"):
        method(case.model, [*encoder, *case.layers]).attribute(inputs)
    for layers in (encoder, case.layers):
        assert method(case.model, layers).attribute(inputs).shape == (2, 6, 6)
