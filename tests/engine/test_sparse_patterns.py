"""Attention in sparse patterns (Longformer, LED, LongT5, BigBird), in float64.

The twin reruns each layer with one row of its value projections zeroed.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers
from tests.engine.blocks import without_value_of
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.engine.test_inline_layers import Zeroing, map_by_reruns
from tests.reference.case import built

# These models compute the softmax in float32, whatever their dtype.
SOFTMAX = 1e-7
TOKENS, HEADS, WIDTH, WINDOW = 8, 4, 16, 4
IDS = torch.tensor([[5, 9, 3, 7, 8, 4, 6, 2], [6, 2, 7, 3, 9, 1, 1, 1]])
REAL = IDS != 1
GLOBAL = torch.zeros_like(REAL).index_fill(1, torch.tensor([0, 3]), True)

LONGFORMER = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "attention_window": [WINDOW] * 2,
    "pad_token_id": 1,
}
SIDE = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 24}
LED = {
    **{f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in SIDE.items()},
    **{name: LONGFORMER[name] for name in ("vocab_size", "attention_window", "pad_token_id")},
    "d_model": WIDTH,
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
}
LONGT5 = {
    "vocab_size": 50,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": HEADS,
    "local_radius": WINDOW - 2,  # a block is longer by one
    "pad_token_id": 1,
}
SPARSE = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1, "pad_token_id": 0}
BIGBIRD = {**LONGFORMER, **SPARSE, "sep_token_id": 1}
BIGBIRD_PEGASUS = {**LED, **SPARSE, "max_position_embeddings": 64}


def model_of(name: str, **config: Any) -> Any:
    return built(f"{name}Model", **config)


def encoder_of(name: str, **config: Any) -> nn.Module:
    return model_of(name, **config).get_encoder()


def of_name(name: str) -> nn.Module:
    return model_of("Longformer", **LONGFORMER) if name == "Longformer" else encoder_of("LED", **LED)


def wide_inputs(**more: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": REAL.long(), **more}


def longformer(layer: Any, source: int) -> AbstractContextManager[Any]:
    """Tokens come first, and global tokens have values of their own."""
    own = layer.attention.self if hasattr(layer, "attention") else layer.self_attn.longformer_self_attn
    return without_value_of(source, own.value, own.value_global, axis=0)


def longt5(layer: Any, source: int) -> AbstractContextManager[Any]:
    return without_value_of(source, layer.layer[0].LocalSelfAttention.v)


def bigbird(layer: Any, source: int) -> AbstractContextManager[Any]:
    attention = next(one for one in layer.modules() if type(one).__name__.endswith("BlockSparseAttention"))
    return without_value_of(source, attention.value)


@pytest.mark.parametrize("having_some", [[], [0, 1]], ids=["windows", "global tokens"])
@pytest.mark.parametrize("name", ["Longformer", "LED"])
def test_maps_equal_the_twins(name: str, having_some: list[int]) -> None:
    everywhere = torch.zeros_like(GLOBAL)
    everywhere[having_some] = GLOBAL[having_some]
    check_maps(of_name(name), wide_inputs(global_attention_mask=everywhere.long()), longformer)


def check_maps(model: nn.Module, inputs: dict[str, Any], zeroed: Zeroing) -> list[Tensor]:
    layers, real = find_layers(model), inputs["attention_mask"].bool()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # only rows of padding are zero
        maps = ValueZeroing(model, layers, normalize=False).attribute(inputs)
    for layer, layer_map in zip(layers, maps, strict=True):
        expected = map_by_reruns(model, layer, inputs, zeroed)
        assert_same(layer_map, expected, tolerance=SOFTMAX)
        assert (expected.amax(-1)[real] > 1e-4).all()
    return maps


@pytest.mark.parametrize("name", ["Longformer", "LED"])
def test_global_tokens_in_some_examples(name: str) -> None:
    """Longformer's code treats the others of such a batch in its own way. The maps are those of single examples."""
    everywhere = GLOBAL.clone()
    everywhere[1] = False
    model, inputs = of_name(name), wide_inputs(global_attention_mask=everywhere.long())
    together = ValueZeroing(model, find_layers(model)).attribute(inputs)
    for example in range(len(IDS)):
        length = int(REAL[example].sum())
        alone = {name: x[example : example + 1, :length] for name, x in inputs.items()}
        for found, expected in zip(together, ValueZeroing(model, find_layers(model)).attribute(alone), strict=True):
            assert_same(found[example : example + 1, :length, :length], expected, tolerance=SOFTMAX)


def test_longt5s_local_layers_equal_the_twins() -> None:
    check_maps(encoder_of("LongT5", **LONGT5), wide_inputs(), longt5)


def wide_and_full() -> tuple[nn.Module, nn.Module]:
    """A Longformer whose window is longer than its inputs, and a RoBERTa with the same weights."""
    wide = model_of("Longformer", **LONGFORMER | {"attention_window": [2 * TOKENS] * 2})
    full = model_of("Roberta", **LONGFORMER)
    missing = full.load_state_dict(wide.state_dict(), strict=False).missing_keys
    assert not missing
    return wide, full


@pytest.mark.parametrize("inputs", [wide_inputs(), IDS[:1], (IDS[:1],)], ids=["mapping", "ids", "tuple"])
@pytest.mark.parametrize("method", quick([ValueZeroing, ValueZeroingRollout], ValueZeroing))
def test_window_over_all_tokens(method: type[ValueZeroing], inputs: Any) -> None:
    """Padding that the model appends is not in the maps."""
    models = wide_and_full()
    words = torch.tensor([[0, 0, 1, 1, 2, 3, 3, 4]])
    for arguments in ({}, {"token": -4}, {"token": 2, "feature_mask": words}, {"feature_mask": words}):
        found, expected = (method(m, find_layers(m)).attribute(inputs, **arguments) for m in models)
        assert_same(found, expected, tolerance=SOFTMAX)


def test_effects_leave_out_added_padding() -> None:
    wide, full = wide_and_full()
    for words in (None, torch.tensor([[0, 0, 1, 1, 2, 3, 3, 4]])):
        found, expected = (
            ValueZeroingEffect(lambda m=m, **inputs: m(**inputs).last_hidden_state[:, 0, 0], find_layers(m)).attribute(
                wide_inputs(), feature_mask=words
            )
            for m in (wide, full)
        )
        assert_same(found, expected, tolerance=SOFTMAX)


def test_targets_after_the_inputs() -> None:
    wide, _ = wide_and_full()
    with pytest.raises(AssertionError, match="8 is out of range"):
        ValueZeroing(wide, find_layers(wide)[0]).attribute(wide_inputs(), token=TOKENS)
    with pytest.raises(AssertionError, match="there are 2 example"):
        ValueZeroing(wide, find_layers(wide)[0]).attribute(wide_inputs(), feature_mask=torch.arange(9)[None])


def test_own_padding_stays() -> None:
    """Every example has padding, and the model adds more."""
    model = model_of("Longformer", **LONGFORMER)
    layers = find_layers(model)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[:, 5:] = 0
    ids = torch.cat([IDS, IDS[:, :1]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    scores = ValueZeroing(model, layers[0]).attribute(inputs)
    assert scores.shape == (2, 9, 9)
    short = ValueZeroing(model, layers[0]).attribute({"input_ids": ids[:, :5], "attention_mask": mask[:, :5]})
    assert_same(scores[:, :5, :5], short, tolerance=SOFTMAX)
    assert not scores[:, 5:].any() and not scores[:, :, 5:].any()


def test_tokens_that_a_function_appends() -> None:
    """The appended tokens are no padding, although the inputs are shorter than the sequence."""
    model = model_of("Longformer", **LONGFORMER)
    method = partial(ValueZeroing, layer=find_layers(model))
    words = model.get_input_embeddings()(IDS)

    def with_prompt(given: Tensor) -> Any:
        return model(inputs_embeds=torch.cat([given, words[:, 5:]], dim=1))

    assert_same(method(with_prompt).attribute(words[:, :5]), method(model).attribute({"inputs_embeds": words}))


@pytest.mark.parametrize("name", ["BigBird", "BigBirdPegasus"])
def test_bigbirds_sparse_mode(name: str) -> None:
    model = model_of(name, **BIGBIRD) if name == "BigBird" else encoder_of(name, **BIGBIRD_PEGASUS)
    count = 19  # fewer than 15 tokens see all tokens; the model appends one
    ids = torch.randint(2, 50, (2, count), generator=torch.Generator().manual_seed(0))
    real = torch.arange(count) < torch.tensor([[count], [count - 3]])
    for one in check_maps(model, {"input_ids": ids, "attention_mask": real.double()}, bigbird):
        assert (one[real[:, :, None] & real[:, None, :]] == 0).any()  # some tokens do not see each other


def test_effects_and_half_precision() -> None:
    model = model_of("Longformer", **LONGFORMER)
    layers: Any = find_layers(model)
    inputs = wide_inputs(global_attention_mask=GLOBAL.long())

    def score(**inputs: Tensor) -> Tensor:
        return model(**inputs).last_hidden_state[:, 0, 0]

    effects = []
    with torch.no_grad():
        for source in range(TOKENS):
            with longformer(layers[1], source):
                effects.append(score(**inputs))
        expected = (score(**inputs)[:, None] - torch.stack(effects, dim=1)) * REAL
    assert_same(ValueZeroingEffect(score, layers[1]).attribute(inputs), expected, tolerance=SOFTMAX)

    exact = ValueZeroing(model, layers[0]).attribute(inputs)
    half = ValueZeroing(model.to(torch.bfloat16), layers[0]).attribute(inputs)
    assert half.dtype == torch.float32
    assert_same(half.double(), exact, tolerance=0.05)  # the layer's input was rounded
    assert all(not module._forward_hooks for module in model.modules())


def test_summaries_of_tokens_are_refused() -> None:
    """The values of LongT5's transient global tokens are computed from many tokens."""
    model: Any = encoder_of("LongT5", **LONGT5, encoder_attention_type="transient-global", global_block_size=2)
    layer: Any = find_layers(model)[0]
    for values in (None, layer.layer[0].TransientGlobalSelfAttention.v):
        with pytest.raises(AssertionError, match="values several"):
            ValueZeroing(model, layer, values=values).attribute(wide_inputs())
