"""ValueZeroing against the naive twin that reruns a layer for each zeroed value, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz import ValueZeroing
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.reference import FAMILIES, Case, naive_value_zeroing
from tests.reference.inputs import barely_padded_tokens, padded_tokens

# Post-norm, fused values, shared keys and values, a replay inside the attention module, and two decoders. One decoder
# is replayed as whole sequences.
VARIED = ["bert", "gpt2", "llama", "albert", "bart-decoder", "t5-decoder"]
each_varied = pytest.mark.parametrize("name", VARIED)


@cache
def twins(name: str) -> list[Tensor]:
    case = FAMILIES[name].case
    return [naive_value_zeroing(case, index) for index in range(len(case.layers))]


def check_all_layers(case: Case, options: dict[str, Any], twin_options: dict[str, Any] | None = None) -> None:
    expected = [naive_value_zeroing(case, index, **(twin_options or options)) for index in range(len(case.layers))]
    assert_same(ValueZeroing(case.model, case.layers, **options).attribute(case.inputs), expected)


@pytest.mark.parametrize("name", quick(FAMILIES, "bert", "gpt2", "llama", "albert", "bart-decoder", "vit", "gemma2"))
def test_every_layer_of_every_family(name: str) -> None:
    case = FAMILIES[name].case
    assert_same(ValueZeroing(case.model, case.layers).attribute(case.inputs), twins(name))


WITHOUT_SDPA = {"gemma2", "gpt-oss"}  # soft caps and sinks are more than scaled_dot_product_attention computes


@pytest.mark.parametrize("name", quick(sorted(FAMILIES.keys() - WITHOUT_SDPA), "bert", "gpt2", "llama", "bart-decoder"))
def test_a_model_loaded_with_sdpa(name: str) -> None:
    case = FAMILIES[name].build(attn_implementation="sdpa")
    assert case.model.config._attn_implementation == "sdpa"
    # Eager attention, which the twins run, may compute its softmax in float32.
    assert_same(ValueZeroing(case.model, case.layers).attribute(case.inputs), twins(name), 1e-6)


# Long enough for the folded replay to save time.
TOKENS = (padded_tokens, barely_padded_tokens)
LONGER = {name: family.inputs for name, family in FAMILIES.items() if family.inputs in TOKENS}


@pytest.mark.parametrize("name", LONGER)
def test_longer_sequences(name: str) -> None:
    lengths = (20, 19, 18) if LONGER[name] is barely_padded_tokens else (20, 13, 2)
    case = replace(FAMILIES[name].case, inputs=padded_tokens(lengths))
    layer_map = ValueZeroing(case.model, case.layers[1 % len(case.layers)]).attribute(case.inputs)
    assert_same(layer_map, naive_value_zeroing(case, 1 % len(case.layers)))


@pytest.mark.parametrize("distance", ["cosine", "euclidean", "l1"])
@each_varied
def test_distances(name: str, distance: str) -> None:
    case, norm = FAMILIES[name].case, FAMILIES[name].case.final_norm
    check_all_layers(case, {"distance": distance, "normalize": False})
    check_all_layers(case, {"distance": distance, "heads": [1, 2], "final_norm": norm})


def test_errors_of_distance_and_norm() -> None:
    case = FAMILIES["bert"].case

    def distance(a: Tensor, b: Tensor) -> Tensor:
        raise ValueError("a distance of nobody's own")

    with pytest.raises(ValueError, match="nobody's own"):
        ValueZeroing(case.model, case.layers[0], distance=distance).attribute(case.inputs)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        ValueZeroing(case.model, case.layers[0], final_norm=torch.nn.LayerNorm(7).double()).attribute(case.inputs)


@pytest.mark.parametrize("name", ["bert", "albert"])  # pairs; whole sequences
def test_a_distance_in_another_dtype(name: str) -> None:
    case, single = FAMILIES[name].case, FAMILIES[name].build(torch.float32)
    layer = single.layers[0]

    def in_float64(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() - b.double()).norm(dim=-1)

    scores = ValueZeroing(single.model, layer, distance=in_float64, normalize=False).attribute(single.inputs)
    expected = ValueZeroing(case.model, case.layers[0], distance="euclidean", normalize=False).attribute(case.inputs)
    assert scores.dtype == torch.float32
    assert_same(scores.double(), expected, tolerance=1e-4)
    moved = ValueZeroing(case.model, case.layers[0], distance=lambda a, b: (a != b).any(-1), normalize=False)
    assert_same(moved.attribute(case.inputs), (expected > 0).double())


@pytest.mark.parametrize("heads", [1, [0, 2], [0, 1, 2, 3]])
@each_varied
def test_heads(name: str, heads: int | list[int]) -> None:
    chosen = [heads] if isinstance(heads, int) else heads
    check_all_layers(FAMILIES[name].case, {"heads": heads}, {"heads": chosen})


@each_varied
def test_other_heads_in_each_layer(name: str) -> None:
    case = FAMILIES[name].case
    heads = [[2], None, 3, [0, 1]][: len(case.layers)]
    maps = ValueZeroing(case.model, case.layers, heads=heads).attribute(case.inputs)
    for index, (layer_map, chosen) in enumerate(zip(maps, heads, strict=True)):
        chosen = [chosen] if isinstance(chosen, int) else chosen
        assert_same(layer_map, naive_value_zeroing(case, index, heads=chosen))


def features(length: int, examples: int = 3) -> dict[str, Tensor]:
    pairs = torch.arange(length) // 2
    return {
        "pairs": pairs[None],
        "any numbers": torch.tensor([-3, 100, 5])[pairs % 3][None],
        "all in one": torch.zeros(1, length, dtype=torch.long),
        "each its own": torch.arange(length).flip(0)[None],
        "others in each example": torch.stack([pairs, torch.arange(length) % 2, torch.arange(length)])[:examples],
    }


@pytest.mark.parametrize("heads", [None, [0, 2]])
@pytest.mark.parametrize("kind", features(1))
@pytest.mark.parametrize("name", [*VARIED, "vit", "wav2vec2", "whisper-encoder"])  # patches and frames too
def test_features_are_zeroed_together(name: str, kind: str, heads: list[int] | None) -> None:
    case = FAMILIES[name].case
    mask = features(twins(name)[0].shape[-1], len(twins(name)[0]))[kind]
    last = ValueZeroing(case.model, case.layers[-1], heads=heads).attribute(case.inputs, feature_mask=mask)
    assert_same(last, naive_value_zeroing(case, -1, heads=heads, groups=mask))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.norm])
def test_the_final_norm(name: str) -> None:
    case = FAMILIES[name].case
    normed = ValueZeroing(case.model, case.layers[-1], final_norm=case.final_norm).attribute(case.inputs)
    assert_same(normed, naive_value_zeroing(case, -1, final_norm=case.final_norm))
    assert not torch.allclose(normed, twins(name)[-1], atol=1e-4)
