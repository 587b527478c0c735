"""Key-value caches: the user's cache stays as it is, and its tokens are sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingRollout
from tests.engine.compare import assert_same
from tests.engine.parameters import CACHES, quick
from tests.reference import FAMILIES, Case
from tests.sweep.models import small_models, working_inputs

each_family = pytest.mark.parametrize("name", quick(["gpt2", "llama", "gpt-neox", "opt", "phi"], "llama"))
each_method = pytest.mark.parametrize("method", [ValueZeroing, LayerAttention])


def tokens() -> torch.Tensor:
    return torch.randint(4, 60, (2, 7))


@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention, ValueZeroingRollout])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_empty_cache_stays_empty(name: str, method: type[ValueZeroing]) -> None:
    case, ids = FAMILIES[name].case, tokens()
    cache = DynamicCache(config=case.model.config)
    maps = method(case.model, case.layers).attribute({"input_ids": ids, "past_key_values": cache, "use_cache": True})
    assert cache.get_seq_length() == 0
    plain = {"input_ids": ids, "use_cache": False}
    assert_same(maps, method(case.model, case.layers).attribute(plain))


def test_encoder_decoder_cache_stays_empty() -> None:
    case = FAMILIES["bart-decoder"].case
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    inputs = {**case.inputs, "past_key_values": cache, "use_cache": True}
    maps = ValueZeroing(case.model, case.layers).attribute(inputs)
    assert (cache.get_seq_length(), cache.cross_attention_cache.get_seq_length()) == (0, 0)
    assert_same(maps, ValueZeroing(case.model, case.layers).attribute({**case.inputs, "use_cache": False}))


def test_same_call_with_a_filled_cache_gives_the_same_map() -> None:
    case, ids = FAMILIES["llama"].case, tokens()
    cache = filled_cache(case, ids[:, :4])
    keys = cache.layers[0].keys
    rest = {"input_ids": ids[:, 4:], "past_key_values": cache}
    maps = [ValueZeroing(case.model, case.layers).attribute(rest) for _ in range(2)]
    assert_same(*maps)
    assert cache.get_seq_length() == 4
    assert cache.layers[0].keys is keys


def test_target_of_a_function_with_a_cache() -> None:
    """The check of the axis runs the function again, on another copy of the cache."""
    case, ids = FAMILIES["llama"].case, tokens()
    method = ValueZeroing(lambda x, cache: case.model(x, past_key_values=cache).last_hidden_state, case.layers)
    rest = {"additional_forward_args": filled_cache(case, ids[:, :4])}
    with pytest.warns(UserWarning, match="and 7 sources"):
        rows = method.attribute(ids[:, 4:], target=(-1, 5), **rest)
    assert_same(rows, ValueZeroing(case.model, case.layers).attribute(ids, token=-1))


def filled_cache(case: Case, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=case.model.config)
    case.model(ids, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("past", [1, 6])
@each_method
@pytest.mark.parametrize("name", ["mistral", "gemma3"])  # windows in all layers; in some of them
def test_columns_of_a_cut_cache_are_tokens(name: str, method: type[ValueZeroing], past: int) -> None:
    """A window has dropped the first tokens, and the maps have columns for them all the same."""
    case, ids = FAMILIES[name].case, tokens()
    words = torch.tensor([[0, 0, 1, 1, 2, 2, 2]])
    for further in ({}, {"feature_mask": words}, {"token": -1}):
        whole = method(case.model, case.layers).attribute(ids, **further)
        rest = {"input_ids": ids[:, past:], "past_key_values": filled_cache(case, ids[:, :past])}
        for layer_map, expected in zip(method(case.model, case.layers).attribute(rest, **further), whole, strict=True):
            expected = expected[:, past:] if expected.dim() == 3 else expected
            # A word of which the window has dropped a part has the score of its other part.
            kept = layer_map.any(1, keepdim=True) if "feature_mask" in further else True
            assert_same(layer_map, expected * kept, tolerance=1e-6)


@pytest.mark.parametrize("argument", CACHES)
@pytest.mark.parametrize("past", [4, 6])
@each_method
@each_family
def test_cached_tokens_are_sources(
    name: str, method: type[ValueZeroing], past: int, argument: str, recwarn: Any
) -> None:
    case, ids = FAMILIES[name].case, tokens()
    whole = method(case.model, case.layers).attribute(ids)
    rest = {"input_ids": ids[:, past:], argument: filled_cache(case, ids[:, :past])}
    recwarn.clear()
    for layer_map, expected in zip(method(case.model, case.layers).attribute(rest), whole, strict=True):
        assert_same(layer_map, expected[:, past:])
    assert not [one for one in recwarn if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize("past", [4, 6])
def test_half_precision_with_a_cache(past: int) -> None:
    case, ids = FAMILIES["gpt2"].build(torch.bfloat16), tokens()
    rest = {"input_ids": ids[:, past:], "past_key_values": filled_cache(case, ids[:, :past])}
    with pytest.raises(AssertionError, match="its tokens are in"):
        ValueZeroing(case.model, case.layers).attribute(rest)


@each_method
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_static_cache_is_refused(name: str, method: type[ValueZeroing]) -> None:
    """A static cache holds keys for all of its places, so the last keys belong to no token."""
    case = FAMILIES[name].case
    cache = StaticCache(config=case.model.config, max_cache_len=12)
    inputs = {"input_ids": tokens(), "past_key_values": cache, "use_cache": True}
    for _ in range(2):  # a refused call leaves the cache empty
        with pytest.raises(AssertionError, match="12 sources for 7"):
            method(case.model, case.layers).attribute(inputs)


def prefix_of(case: Case, examples: slice) -> DynamicCache:
    """Keys and values of three tokens that never ran, as prefix tuning learns them."""
    config, random, cache = case.model.config, torch.Generator().manual_seed(1), DynamicCache()
    size = (2, config.num_attention_heads, 3, config.hidden_size // config.num_attention_heads)
    for number in range(len(case.layers)):
        keys, values = (torch.randn(size, generator=random, dtype=case.model.dtype)[examples] for _ in range(2))
        cache.update(keys, values, number)
    return cache


@pytest.mark.parametrize("padding", [slice(5, 7), slice(0, 2)], ids=["right", "left"])
@each_method
@pytest.mark.parametrize("name", ["bert", "electra"])
def test_bidirectional_tokens_after_a_prefix(name: str, method: type[ValueZeroing], padding: slice) -> None:
    case, ids = FAMILIES[name].case, tokens()
    mask = torch.ones_like(ids).index_put((torch.tensor(1), torch.arange(7)[padding]), torch.tensor(0))
    places = (mask.cumsum(1) - 1).clamp_min(0)
    seen = torch.cat([torch.ones(2, 3, dtype=mask.dtype), mask], dim=1)
    explain = method(case.model, case.layers)

    def maps(examples: slice, kept: torch.Tensor | slice = slice(None)) -> list[torch.Tensor]:
        cache, sees = prefix_of(case, examples), seen[examples]
        sees = sees if isinstance(kept, slice) else sees[sees.bool()][None]
        inputs = {"input_ids": ids[examples, kept], "position_ids": places[examples, kept], "attention_mask": sees}
        return explain.attribute({**inputs, "past_key_values": cache})

    together = maps(slice(None))
    assert all(torch.equal(one.any(2), mask.bool()) and torch.equal(one.any(1), seen.bool()) for one in together)
    for number in range(2):
        kept = mask[number].nonzero().flatten()
        alone = maps(slice(number, number + 1), kept)
        found = [one[number][kept][:, seen[number].bool()] for one in together]
        assert_same(found, [one[0] for one in alone])


def test_joint_attention_is_no_cache() -> None:
    """T5Gemma 2's decoder has one attention over its own tokens and the encoder's, and makes its own cache."""
    model = next(small_models("t5gemma2"))
    inputs, _ = working_inputs(model)
    without = ValueZeroing(model, list(model.decoder.layers)).attribute({**inputs, "use_cache": False})
    half = ValueZeroing(model.bfloat16(), list(model.decoder.layers))
    assert_same(half.attribute({**inputs, "use_cache": True}), half.attribute({**inputs, "use_cache": False}))
    assert_same(half.attribute({**inputs, "use_cache": True}), without, tolerance=0.05)


@pytest.mark.parametrize("model_type", quick(["gemma3n_text", "gemma4_text"], "gemma4_text"))
def test_state_shared_between_layers(model_type: str) -> None:
    model = next(small_models(model_type))
    inputs, layers = working_inputs(model)[0], list(model.layers)
    outputs = []

    def forward(**inputs: torch.Tensor) -> torch.Tensor:
        outputs.append(model(**inputs)[0])
        return outputs[-1]

    maps = ValueZeroing(forward, layers).attribute(inputs)
    assert_same(outputs[0], model(**inputs)[0], tolerance=1e-6)
    for use_cache in (False, True):  # the cache keeps nothing for layers that use the keys of others
        assert_same(maps, ValueZeroing(model, layers).attribute({**inputs, "use_cache": use_cache}), tolerance=1e-6)
    assert_same(maps, [ValueZeroing(model, layer).attribute(inputs) for layer in layers], tolerance=1e-6)
