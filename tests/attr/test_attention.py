"""LayerAttention equals the weights that the model itself returns, and maps of each head those of a head alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from captum_vz import AttentionRollout, LayerAttention, LayerAttentionNorm, Rollout, ValueZeroing
from captum_vz.errors import ArgumentError
from captum_vz.functional import normalize_rows
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.reference import FAMILIES, SEQUENCE_TO_SEQUENCE, Case, naive_attention
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


# With `reduce_heads=None`, one pass gives the map of each head: attention, norms and Value Zeroing.

WORDS = torch.tensor([[0, 0, 1, 1, 2, 2, 3]])
ARGUMENTS: list[tuple[dict[str, Any], Any]] = [
    *(({"token": rows}, rows) for rows in (1, [2, 0, 1], slice(1, 3))),
    ({"target": (1, 0)}, 1),
]


def heads_of(case: Case) -> int:
    heads: int = case.model.config.num_attention_heads
    return heads


@pytest.mark.all_cases
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention])
def test_map_of_each_head(method: Any, name: str, normalize: bool) -> None:
    case = FAMILIES[name].case
    found = method(case.model, reduce_heads=None, normalize=normalize).attribute(case.inputs)
    for head in range(heads_of(case)):
        alone = method(case.model, heads=[head], normalize=normalize).attribute(case.inputs)
        assert all(torch.equal(one[:, head], other) for one, other in zip(found, alone, strict=True))


def test_norms_of_each_head() -> None:
    """The naive twin: each head's values through its part of the projection, times its weights."""
    case = FAMILIES["bert"].build(attn_implementation="eager")
    found = LayerAttentionNorm(case.model, reduce_heads=None, normalize=False).attribute(case.inputs)
    there = case.mask(case.family.mask, 7)
    with torch.no_grad():
        output = case.model(**case.inputs, output_attentions=True, output_hidden_states=True)
        for index, layer in enumerate(case.layers):
            attention = layer.attention
            values = attention.self.value(output.hidden_states[index]).unflatten(-1, (heads_of(case), -1))
            matrix = attention.output.dense.weight.unflatten(1, (heads_of(case), -1))  # (d, head, d_head)
            for head in range(heads_of(case)):
                vectors = values[:, :, head] @ matrix[:, head].T
                expected = output.attentions[index][:, head] * vectors.norm(dim=-1)[:, None]
                assert_same(found[index][:, head], expected * there[:, :, None] * there[:, None, :])


@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention, LayerAttentionNorm])
def test_rows_of_heads(method: Any) -> None:
    case = FAMILIES["bert"].case
    of = method(case.model, case.layers[1], reduce_heads=None)
    whole = of.attribute(case.inputs)
    assert whole.shape == (3, heads_of(case), 7, 7)
    for arguments, rows in ARGUMENTS:
        each = rows if isinstance(rows, list) else [rows] * 3
        expected = torch.stack([one[:, row] for one, row in zip(whole, each, strict=True)])
        assert_same(of.attribute(case.inputs, **arguments), expected)
    if method is not LayerAttentionNorm:
        assert_same(
            method(case.model, case.layers[1], heads=[3, 1], reduce_heads=None).attribute(case.inputs), whole[:, [3, 1]]
        )


@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention, LayerAttentionNorm])
def test_words_of_heads(method: Any) -> None:
    case = FAMILIES["bert"].case
    found = method(case.model, case.layers[1], reduce_heads=None).attribute(case.inputs, feature_mask=WORDS)
    firsts = found[..., [0, 2, 4, 6]]
    sums = firsts.sum(-1)
    assert_same(sums, (sums != 0).to(sums))  # rows sum to 1 over words
    assert torch.equal(found[..., 0], found[..., 1])
    if method is LayerAttention:
        whole = method(case.model, case.layers[1], reduce_heads=None).attribute(case.inputs)
        pooled = torch.zeros(*whole.shape[:3], 4, dtype=whole.dtype).index_add(3, WORDS[0], whole)
        assert_same(firsts, normalize_rows(pooled))


def test_what_has_no_map_of_heads_is_refused() -> None:
    case = FAMILIES["bert"].case
    for method in (ValueZeroing, LayerAttention, LayerAttentionNorm):
        with pytest.raises(ArgumentError, match="'median'"):
            method(case.model, reduce_heads="median")
    with pytest.raises(ArgumentError, match="belongs to no head"):
        LayerAttentionNorm(case.model, include="residual", reduce_heads=None)
    for joined in (
        AttentionRollout(case.model, reduce_heads=None),
        Rollout(ValueZeroing(case.model, reduce_heads=None)),
    ):
        with pytest.raises(ArgumentError, match="heads is None"):
            joined.attribute(case.inputs)
