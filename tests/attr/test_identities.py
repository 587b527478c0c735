"""Identities of all models: batches, padding, chunks, forms of input and other layers do not change a map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from captum_vz import (
    ALTI,
    AttentionFlow,
    AttentionRollout,
    GlobEnc,
    HiddenTokenAttribution,
    LayerALTI,
    LayerAttention,
    LayerAttentionNorm,
    ValueZeroing,
    ValueZeroingRollout,
)
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.reference import FAMILIES, Case
from tests.reference.norms import PRE_NORM

LAYER_METHODS = [ValueZeroing, LayerAttention]
STACK_METHODS = [ValueZeroingRollout, AttentionRollout, AttentionFlow]
each_family = pytest.mark.parametrize("name", quick(FAMILIES, "bert", "gpt2", "llama", "albert", "bart-decoder", "vit"))
each_varied = pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "albert", "t5-decoder"])
each_method = pytest.mark.parametrize("method", LAYER_METHODS + STACK_METHODS)


def maps_of(case: Case, method: Any = ValueZeroing, **arguments: Any) -> Any:
    return method(case.model, case.layers).attribute(case.inputs, **arguments)


def real_tokens(case: Case) -> torch.Tensor:
    length = maps_of(case, LayerAttention)[0].shape[1]
    return case.mask(case.family.mask, length)


# All ways to ask for maps that have no identities in a file of their own.
ASKED: dict[str, Callable[..., Any]] = {
    **{method.__name__: method for method in (ValueZeroing, LayerAttention, LayerAttentionNorm, LayerALTI, ALTI)},
    "each head": partial(ValueZeroing, reduce_heads=None),
    "mean values": partial(ValueZeroing, intervention="mean"),
    "knockout": partial(ValueZeroing, intervention="knockout"),
    "jacobian": HiddenTokenAttribution,
    "probes": partial(HiddenTokenAttribution, probes=2),
    "vectors": partial(LayerAttentionNorm, normalize=False, include="residual"),
}
POST_NORM = {"GlobEnc": GlobEnc, "encoder": partial(LayerAttentionNorm, include="encoder")}
BATCHES = {*product(("bert", "gpt2", "llama", "albert", "vit"), ASKED), *product(("bert", "roberta"), POST_NORM)}
BATCHES |= {*product(FAMILIES, ("ValueZeroing", "LayerAttention")), *product(PRE_NORM, ("LayerAttentionNorm", "ALTI"))}
FAST = [("bert", "mean values"), ("gpt2", "probes")]


@pytest.mark.parametrize(("name", "asked"), quick(sorted(BATCHES), *FAST))
def test_padded_batch_equals_its_examples(name: str, asked: str) -> None:
    case, method = FAMILIES[name].case, (ASKED | POST_NORM)[asked]
    together = as_list(maps_of(case, method))
    for index in range(case.batch):
        for layer_map, alone in zip(together, as_list(maps_of(case.example(index), method)), strict=True):
            length = alone.shape[-1]
            assert_same(layer_map[index, ..., :length, :length], alone[0])
            assert not layer_map[index, ..., length:, :].any()
            assert not layer_map[index, ..., length:].any()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral"])
@each_method
def test_padding_on_the_left(method: Any, name: str, implementation: str) -> None:
    case = FAMILIES[name].build(attn_implementation=implementation)
    lengths = case.inputs["attention_mask"].sum(1).tolist()
    moved = {
        key: torch.stack([row.roll(len(row) - n) for row, n in zip(x, lengths, strict=True)])
        for key, x in case.inputs.items()
    }
    right = as_list(maps_of(case, method))
    alone = [as_list(maps_of(case.example(index), method)) for index in range(case.batch)]
    # Positions are counted from the first token, be it padding, unless the model is told.
    mask = moved["attention_mask"]
    places = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    left = as_list(maps_of(replace(case, inputs=moved | places), method))
    for layer, (from_right, from_left) in enumerate(zip(right, left, strict=True)):
        for index, n in enumerate(lengths):
            assert_same(from_left[index, -n:, -n:], from_right[index, :n, :n])
            assert_same(from_left[index, -n:, -n:], alone[index][layer][0])
            assert not from_left[index, :-n].any() or n == mask.shape[1]
            assert not from_left[index, :, :-n].any() or n == mask.shape[1]


def as_list(maps: Any) -> list[torch.Tensor]:
    return maps if isinstance(maps, list) else [maps]


@each_family
def test_rows_sum_to_one_and_see_no_later_token(name: str) -> None:
    case = FAMILIES[name].case
    real = real_tokens(case)
    for method in LAYER_METHODS + STACK_METHODS[:2]:
        for one in as_list(maps_of(case, method)):
            assert (one >= 0).all()
            assert_same(one.sum(-1), real.double())
            if case.causal:
                assert not one.triu(1).any()
                assert (one[:, 0, 0] == 1).all()
            else:
                assert one.triu(1).max() > 1e-3


@each_varied
def test_layer_alone_or_with_others(name: str) -> None:
    case = FAMILIES[name].case
    for method in LAYER_METHODS:
        together = maps_of(case, method)
        for layer, expected in zip(case.layers, together, strict=True):
            assert_same(method(case.model, layer).attribute(case.inputs), expected)
        backwards = method(case.model, case.layers[::-1]).attribute(case.inputs)
        assert_same(backwards[::-1], together)


@each_method
def test_further_arguments_follow_the_inputs(method: Any) -> None:
    case = FAMILIES["bert"].case
    ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
    kinds = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(3, -1)
    expected = maps_of(replace(case, inputs=case.inputs | {"token_type_ids": kinds}), method)
    of = method(case.model, case.layers)
    assert_same(of.attribute(ids, additional_forward_args=(mask, kinds)), expected)
    (last,) = as_list(of.attribute((ids, mask, kinds)))[-1:]
    assert_same(last[0] if isinstance(last, tuple) else last, as_list(expected)[-1])
    assert not torch.allclose(as_list(maps_of(case, method))[-1], as_list(expected)[-1], atol=1e-4)


@each_varied
def test_zero_values_change_nothing(name: str) -> None:
    """Rounding gives no score to a zero value, and a row that no source changes stays zero."""
    case = FAMILIES[name].build()
    site = case.family.attention
    projection = case.layers[0].get_submodule(site.value)
    with torch.no_grad():
        for head in range(site.value_heads):
            # GPT-2's Conv1D keeps its weights transposed.
            weight = projection.weight.T if type(projection).__name__ == "Conv1D" else projection.weight
            weight[site.columns(head)] = 0
            if getattr(projection, "bias", None) is not None:
                projection.bias[site.columns(head)] = 0
    with pytest.warns(UserWarning, match="no source changes"):
        layer_map = ValueZeroing(case.model, case.layers[0]).attribute(case.inputs)
    assert not layer_map.any()
