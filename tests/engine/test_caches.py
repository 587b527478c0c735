"""Key-value caches: the user's own grows by one pass, and what it holds from before are sources like others."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingRollout
from tests.engine.compare import assert_same
from tests.reference import FAMILIES, Case

each_family = pytest.mark.parametrize("name", ["gpt2", "llama", "gpt-neox", "opt", "phi"])
each_method = pytest.mark.parametrize("method", [ValueZeroing, LayerAttention])


def tokens() -> torch.Tensor:
    return torch.randint(4, 60, (2, 7))


@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention, ValueZeroingRollout])
@each_family
def test_the_users_cache_grows_by_one_pass(name: str, method: type[ValueZeroing]) -> None:
    case, ids = FAMILIES[name].case, tokens()
    cache = DynamicCache(config=case.model.config)
    maps = method(case.model, case.layers).attribute({"input_ids": ids, "past_key_values": cache, "use_cache": True})
    assert cache.get_seq_length() == 7
    expected = DynamicCache(config=case.model.config)
    case.model(ids, past_key_values=expected, use_cache=True)
    for layer, clean in zip(cache.layers, expected.layers, strict=True):
        assert_same([layer.keys, layer.values], [clean.keys, clean.values])
    plain = {"input_ids": ids, "use_cache": False}
    assert_same(maps, method(case.model, case.layers).attribute(plain))


def test_the_users_cache_of_an_encoder_and_a_decoder_grows_by_one_pass() -> None:
    case = FAMILIES["bart-decoder"].case
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    inputs = {**case.inputs, "past_key_values": cache, "use_cache": True}
    maps = ValueZeroing(case.model, case.layers).attribute(inputs)
    assert (cache.get_seq_length(), cache.cross_attention_cache.get_seq_length()) == (5, 7)
    assert_same(maps, ValueZeroing(case.model, case.layers).attribute({**case.inputs, "use_cache": False}))


def filled_cache(case: Case, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=case.model.config)
    case.model(ids, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("past", [4, 6])
@each_method
@each_family
def test_tokens_in_the_cache_are_sources(name: str, method: type[ValueZeroing], past: int) -> None:
    case, ids = FAMILIES[name].case, tokens()
    whole = method(case.model, case.layers).attribute(ids)
    rest = {"input_ids": ids[:, past:], "past_key_values": filled_cache(case, ids[:, :past])}
    for layer_map, expected in zip(method(case.model, case.layers).attribute(rest), whole, strict=True):
        assert_same(layer_map, expected[:, past:])


@pytest.mark.parametrize("past", [4, 6])
def test_half_precision_cannot_be_run_again_without_what_is_in_the_cache(past: int) -> None:
    case, ids = FAMILIES["gpt2"].build(torch.bfloat16), tokens()
    rest = {"input_ids": ids[:, past:], "past_key_values": filled_cache(case, ids[:, :past])}
    with pytest.raises(AssertionError, match=f"GPT2Block is in half precision .* but {past} of its tokens are in"):
        ValueZeroing(case.model, case.layers).attribute(rest)


@each_method
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_static_cache_is_refused(name: str, method: type[ValueZeroing]) -> None:
    """Its keys are as many as it has room for, so that no token stands at the end of them."""
    case = FAMILIES[name].case
    cache = StaticCache(config=case.model.config, max_cache_len=12)
    inputs = {"input_ids": tokens(), "past_key_values": cache, "use_cache": True}
    with pytest.raises(AssertionError, match=r"has 12 sources for 7 tokens, .* static cache .* Pass use_cache=False"):
        method(case.model, case.layers).attribute(inputs)
