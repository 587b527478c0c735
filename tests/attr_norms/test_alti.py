"""LayerALTI and ALTI against the naive twin that writes every vector out, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from captum_vz import ALTI, LayerALTI
from captum_vz._engine import decomposition
from captum_vz.functional import alti_contributions
from tests.benchmarks.measure import operations
from tests.budget import set_budget
from tests.engine.compare import assert_same
from tests.reference import FAMILIES, naive_rollout
from tests.reference.norms import POST_NORMS, PRE_NORM, naive_alti, naive_vectors

each_family = pytest.mark.parametrize("name", [*POST_NORMS, *PRE_NORM])
each_varied = pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
each_norm = pytest.mark.parametrize("p", [1, 2])


@each_norm
@each_family
def test_every_layer_of_every_family(name: str, p: Any) -> None:
    case = FAMILIES[name].case
    for normalize in (False, True):
        maps = LayerALTI(case.model, case.layers, p=p, normalize=normalize).attribute(case.inputs)
        for index, layer_map in enumerate(maps):
            assert_same(layer_map, naive_alti(case, index, norm=f"l{p}", normalize=normalize))


@each_norm
@pytest.mark.parametrize("name", ["bert", "roberta", "electra", "distilbert", "gpt2", "llama", "opt", "vit"])
def test_the_rollout_of_every_layer(name: str, p: Any) -> None:
    case = FAMILIES[name].case
    maps = [naive_alti(case, index, norm=f"l{p}") for index in range(len(case.layers))]
    for residual in (None, 0.5):
        rollouts = ALTI(case.model, case.layers, p=p, residual=residual).attribute(case.inputs, all_layers=True)
        assert_same(rollouts, naive_rollout(maps, residual))


@pytest.mark.parametrize("name", [name for name in POST_NORMS if name != "bart-decoder"])  # has a norm between them
def test_after_the_second_norm(name: str) -> None:
    case = FAMILIES[name].case
    maps = LayerALTI(case.model, case.layers, include="encoder").attribute(case.inputs)
    expected = [naive_alti(case, index, include="encoder") for index in range(len(case.layers))]
    for layer_map, twin in zip(maps, expected, strict=True):
        assert_same(layer_map, twin)
    assert not torch.allclose(maps[0], naive_alti(case, 0))
    if name in ("bert", "roberta"):
        assert_same(
            ALTI(case.model, case.layers, include="encoder").attribute(case.inputs), naive_rollout(expected)[-1]
        )


@pytest.mark.parametrize("normalize", [False, True])
@each_varied
def test_vectors_of_a_group_are_summed(name: str, normalize: bool) -> None:
    case = FAMILIES[name].case
    tokens = case.inputs["input_ids"].shape[1]
    pairs = torch.arange(tokens) // 2
    method = LayerALTI(case.model, case.layers[1], normalize=normalize)
    for mask in (pairs[None], torch.stack([pairs, torch.arange(tokens) % 2, torch.zeros(tokens, dtype=torch.long)])):
        whole = method.attribute(case.inputs, feature_mask=mask)
        assert_same(whole, naive_alti(case, 1, groups=mask, normalize=normalize))
        assert_same(method.attribute(case.inputs, feature_mask=mask, token=2), whole[:, 2])


@pytest.mark.parametrize("rows", [1, 2, 5])
@each_varied
def test_any_size_of_chunk(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES[name].case
    method = LayerALTI(case.model, case.layers[0])
    mask = torch.arange(7)[None] // 2
    expected, of_pairs = method.attribute(case.inputs), method.attribute(case.inputs, feature_mask=mask)
    # So many rows of seven sources, 32 numbers each.
    set_budget(monkeypatch, chunk_bytes=rows * 7 * 32 * 8)
    monkeypatch.setattr(decomposition, "ROWS", rows)
    assert_same(method.attribute(case.inputs), expected)
    assert_same(method.attribute(case.inputs, feature_mask=mask), of_pairs)


def test_hidden_pairs_of_long_texts_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    case, ids = FAMILIES["gpt2"].case, torch.randint(4, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    method = LayerALTI(case.model, case.layers[0])
    plain = operations(lambda: case.model(ids))
    whole = operations(lambda: method.attribute(ids)) - plain
    set_budget(monkeypatch, chunk_bytes=24 * 32 * 8)
    monkeypatch.setattr(decomposition, "ROWS", 4)
    few = operations(lambda: method.attribute(ids)) - plain
    assert few < 0.75 * whole, (few, whole)


def test_row_without_contributions_is_zero() -> None:
    """The bias is so large that no vector of a source shortens the distance to the sum: all contributions are zero."""
    case = FAMILIES["gpt2"].build()
    block = case.layers[0]
    with torch.no_grad():
        case.model.wte.weight.zero_()
        case.model.wpe.weight.zero_()  # the residual is nothing
        block.attn.c_proj.bias[:] = 100.0
        width = block.attn.c_attn.bias.shape[0] // 3
        block.attn.c_attn.bias[2 * width :] = 0.1
        block.attn.c_attn.weight[:, 2 * width :] = 0.0
        block.attn.c_proj.weight[:] = -1.0
    with pytest.warns(UserWarning, match="no source changes"):
        layer_map = LayerALTI(case.model, block).attribute(case.inputs)
    assert not layer_map.any()
    assert naive_vectors(case, 0, "residual").vectors.any()


def test_known_contributions() -> None:
    vectors = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]])
    whole = torch.tensor([[3.0, 4.0]])
    assert alti_contributions(vectors, whole).tolist() == [[3.0, 4.0, 0.0]]
    assert alti_contributions(vectors, whole, p=2).tolist() == [[1.0, 2.0, 0.0]]
    assert alti_contributions(-vectors, whole).tolist() == [[0.0, 0.0, 0.0]]


def test_bad_arguments() -> None:
    for wrong, message in (({"p": "cosine"}, "p is 'cosine'"), ({"include": "residual"}, "is 'residual'")):
        with pytest.raises(AssertionError, match=message):
            LayerALTI(nn.Identity(), nn.Identity(), **wrong)
    pre = FAMILIES["gpt2"].case
    with pytest.raises(AssertionError, match="is not defined"):
        ALTI(pre.model, pre.layers, include="encoder").attribute(pre.inputs)
    with pytest.raises(AssertionError, match="p is 3: pass 1 or 2"):
        alti_contributions(torch.ones(1, 1, 2), torch.ones(1, 2), p=3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(AssertionError, match=r"whole is \(3, 2\)"):
        alti_contributions(torch.ones(1, 3, 2), torch.ones(3, 2))
    case = FAMILIES["gemma2"].case
    with pytest.raises(AssertionError, match="can be recognised"):
        LayerALTI(case.model, case.layers[0]).attribute(case.inputs)
