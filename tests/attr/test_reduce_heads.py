"""With `reduce_heads=None`, one pass gives the map of each head: attention, norms and Value Zeroing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz import AttentionRollout, LayerAttention, LayerAttentionNorm, Rollout, ValueZeroing
from captum_vz.errors import ArgumentError
from captum_vz.functional import normalize_rows
from captum_vz.visualization import draw_maps
from tests.engine.compare import assert_same
from tests.reference.case import Case
from tests.reference.families import FAMILIES

WORDS = torch.tensor([[0, 0, 1, 1, 2, 2, 3]])
ARGUMENTS: list[dict[str, Any]] = [{}, {"token": 1}, {"token": [2, 0, 1]}, {"token": slice(1, 3)}, {"target": (1, 0)}]
each_family = pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])


def heads_of(case: Case) -> int:
    heads: int = case.model.config.num_attention_heads
    return heads


@each_family
@pytest.mark.parametrize("normalize", [True, False])
def test_value_zeroing_of_each_head(name: str, normalize: bool) -> None:
    case = FAMILIES[name].case
    found = ValueZeroing(case.model, reduce_heads=None, normalize=normalize).attribute(case.inputs)
    for head in range(heads_of(case)):
        alone = ValueZeroing(case.model, heads=[head], normalize=normalize).attribute(case.inputs)
        assert all(torch.equal(one[:, head], other) for one, other in zip(found, alone, strict=True))


@each_family
def test_attention_of_each_head(name: str) -> None:
    case = FAMILIES[name].build(attn_implementation="eager")
    found = LayerAttention(case.model, reduce_heads=None, normalize=False).attribute(case.inputs)
    with torch.no_grad():
        weights = case.model(**case.inputs, output_attentions=True).attentions
    there = case.mask(case.family.mask, 7)
    real = there[:, None, :, None] & there[:, None, None, :]
    assert_same(found, [one * real for one in weights])


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
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_rows_of_heads(method: Any, arguments: dict[str, Any]) -> None:
    case = FAMILIES["bert"].case
    layer = case.layers[1]
    whole = method(case.model, layer, reduce_heads=None).attribute(case.inputs)
    assert whole.shape == (3, heads_of(case), 7, 7)
    found = method(case.model, layer, reduce_heads=None).attribute(case.inputs, **arguments)
    rows: Any = arguments.get(
        "token", arguments.get("target", (slice(None),))[0] if "target" in arguments else slice(None)
    )
    expected = (
        torch.stack([one[:, row] for one, row in zip(whole, rows, strict=True)])
        if isinstance(rows, list)
        else whole[:, :, rows]
    )
    assert_same(found, expected)


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


def test_selected_heads_have_an_axis() -> None:
    case = FAMILIES["bert"].case
    for method in (ValueZeroing, LayerAttention):
        whole = method(case.model, case.layers[0], reduce_heads=None).attribute(case.inputs)
        found = method(case.model, case.layers[0], heads=[3, 1], reduce_heads=None).attribute(case.inputs)
        assert torch.equal(found, whole[:, [3, 1]])


def test_a_batch_is_its_examples_and_pads_nothing() -> None:
    case = FAMILIES["gpt2"].case
    method = ValueZeroing(case.model, case.layers[1], reduce_heads=None)
    together: Tensor = method.attribute(case.inputs)
    for index in range(case.batch):
        alone = method.attribute(case.example(index).inputs)[0]
        length = alone.shape[-1]
        assert_same(together[index, :, :length, :length], alone)
        assert not together[index, :, length:].any()
        assert not together[index, :, :, length:].any()


def test_model_runs_once() -> None:
    case, runs = FAMILIES["bert"].case, []
    with case.model.register_forward_hook(lambda *_: runs.append(0)):
        ValueZeroing(case.model, reduce_heads=None).attribute(case.inputs)
    assert len(runs) == 1


def test_heads_are_drawn() -> None:
    case = FAMILIES["bert"].case
    maps = ValueZeroing(case.model, case.layers[1], reduce_heads=None).attribute(case.example(0).inputs)
    figure = draw_maps({"layer 1": maps}, list("abcdefg"), heads=True)
    assert [panel.get_title() for panel in figure.axes[:2]] == ["layer 1, head 0", "layer 1, head 1"]


def test_what_has_no_map_of_heads_is_refused() -> None:
    case = FAMILIES["bert"].case
    for method in (ValueZeroing, LayerAttention, LayerAttentionNorm):
        with pytest.raises(ArgumentError, match="reduce_heads is 'median'"):
            method(case.model, reduce_heads="median")
    with pytest.raises(ArgumentError, match="the residual connection belongs to no head"):
        LayerAttentionNorm(case.model, include="residual", reduce_heads=None)
    for joined in (
        AttentionRollout(case.model, reduce_heads=None),
        Rollout(ValueZeroing(case.model, reduce_heads=None)),
    ):
        with pytest.raises(ArgumentError, match="reduce_heads is None"):
            joined.attribute(case.inputs)
