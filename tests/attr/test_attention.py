"""LayerAttention equals the weights that the model itself returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from captum_vz import LayerAttention
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.reference import FAMILIES, SEQUENCE_TO_SEQUENCE, naive_attention
from tests.reference.naive import real_positions, record


def of_class(heads: Any) -> dict[str, Any]:
    """The options of the class for an option of the twin."""
    return {"reduce_heads": heads} if isinstance(heads, str) else {"heads": heads}


@pytest.mark.parametrize("name", quick(FAMILIES, "bert", "gpt2", "llama", "albert", "bart-decoder", "t5-decoder"))
def test_every_layer_of_every_family(name: str) -> None:
    case = FAMILIES[name].case
    maps = LayerAttention(case.model, case.layers).attribute(case.inputs)
    for index, layer_map in enumerate(maps):
        assert_same(layer_map, naive_attention(case, index))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("heads", ["mean", "max", 2, [0, 3]])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt-oss", "t5-decoder"])
def test_heads(name: str, heads: Any, normalize: bool) -> None:
    case = FAMILIES[name].case
    options = {"heads": heads, "normalize": normalize}
    own = of_class(heads) | {"normalize": normalize}
    layer_map = LayerAttention(case.model, case.layers[1], **own).attribute(case.inputs)
    assert_same(layer_map, naive_attention(case, 1, **options))


@pytest.mark.parametrize("name", [name for name, family in SEQUENCE_TO_SEQUENCE.items() if family.cross])
def test_cross_attention(name: str) -> None:
    case = FAMILIES[name].case
    maps = LayerAttention(case.model, case.layers, attention="cross").attribute(case.inputs)
    for index, layer_map in enumerate(maps):
        assert_same(layer_map, naive_attention(case, index, attention="cross"))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral", "vit", "bart-decoder"])
def test_every_attention_implementation(name: str, implementation: str) -> None:
    case = FAMILIES[name].build(attn_implementation=implementation)
    maps = LayerAttention(case.model, case.layers).attribute(case.inputs)
    for index, layer_map in enumerate(maps):
        # Eager attention may compute its softmax in float32.
        assert_same(
            layer_map, naive_attention(FAMILIES[name].case, index), 1e-10 if implementation == "eager" else 1e-7
        )
    assert case.model.config._attn_implementation == implementation


def test_weight_of_an_attention_sink() -> None:
    case = FAMILIES["gpt-oss"].case
    raw, normalized = (
        LayerAttention(case.model, case.layers[0], normalize=normalize).attribute(case.inputs)
        for normalize in (False, True)
    )
    real = case.inputs["attention_mask"].bool()
    assert (raw.sum(-1)[real] < 0.99).all()
    assert_same(normalized.sum(-1), real.double())


@pytest.mark.parametrize("heads", ["mean", "max", [0, 2]])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5-decoder"])
def test_weights_of_a_feature_are_summed(name: str, heads: Any) -> None:
    case = FAMILIES[name].case
    plain = naive_attention(case, -1, heads=heads, normalize=False)
    _, sources = real_positions(case, record(case)[0][-1], "self")
    length = plain.shape[-1]
    masks = [torch.arange(length)[None] // 2, torch.stack([torch.arange(length) % n for n in (2, 3, 7)])]
    for mask in masks:
        of = LayerAttention(case.model, case.layers[-1], normalize=False, **of_class(heads))
        answer = of.attribute(case.inputs, feature_mask=mask)
        groups = mask.expand(len(plain), -1)
        for b in range(len(plain)):
            for j in range(length):
                members = [k for k in range(length) if groups[b, k] == groups[b, j]]
                together = plain[b][:, members].sum(-1) if sources[b, j] else torch.zeros(length).double()
                assert_same(answer[b, :, j], together)
