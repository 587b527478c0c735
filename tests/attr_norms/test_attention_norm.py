"""LayerAttentionNorm, and GlobEnc's rollouts of it, against the naive twin that writes every vector out, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomModel

from captum_vz import GlobEnc, LayerAttentionNorm, find_layers
from captum_vz._engine import AttentionBlock, Decomposition, LayerPass, LayerRecord, attention_site, decompositions
from tests.engine.compare import assert_same
from tests.reference import FAMILIES, Case, naive_rollout
from tests.reference.norms import POST_NORMS, PRE_NORM, naive_attention_norm, naive_mixing_ratio, naive_vectors

# What each family has: a decoder's block with two attentions does not end in the norm of the first.
INCLUDED = {
    **{name: ["attention", "residual", "layer_norm", "encoder"] for name in POST_NORMS},
    **{name: ["attention", "residual"] for name in PRE_NORM},
    "bart-decoder": ["attention", "residual", "layer_norm"],
    "gemma2": ["attention"],  # it norms its attention's output before the residual is added
}
EACH = [(name, include) for name, includes in INCLUDED.items() for include in includes]
each = pytest.mark.parametrize(("name", "include"), EACH)
VARIED = [("bert", "attention"), ("bert", "encoder"), ("gpt2", "residual"), ("llama", "attention")]
each_varied = pytest.mark.parametrize(("name", "include"), VARIED)


@each
def test_every_layer_of_every_family(name: str, include: Any) -> None:
    case = FAMILIES[name].case
    for normalize in (False, True):
        maps = LayerAttentionNorm(case.model, case.layers, include=include, normalize=normalize).attribute(case.inputs)
        for index, layer_map in enumerate(maps):
            assert_same(layer_map, naive_attention_norm(case, index, include, normalize=normalize))


@pytest.mark.parametrize("name", ["bart-decoder", "t5-decoder", "whisper-decoder"])
def test_cross_attention(name: str) -> None:
    case = FAMILIES[name].case
    for index, layer in enumerate(case.layers):
        cross = LayerAttentionNorm(case.model, layer, attention="cross").attribute(case.inputs)
        assert_same(cross, naive_attention_norm(case, index, "attention", attention="cross"))


@each
def test_the_mixing_ratio(name: str, include: Any) -> None:
    case = FAMILIES[name].case
    method = LayerAttentionNorm(case.model, case.layers, include=include)
    ratios = method.mixing_ratio(case.inputs)
    for index, ratio in enumerate(ratios):
        assert_same(ratio, naive_mixing_ratio(case, index, include))
    assert_same(method.mixing_ratio(case.inputs, token=1), [ratio[:, 1] for ratio in ratios])


def decomposition_of(case: Case, include: str, layer_index: int = 0) -> Decomposition:
    """All examples and rows of a layer at once: these are so small that they fit one chunk."""
    found: list[Decomposition] = []

    def keep(record: LayerRecord) -> Tensor:
        found.extend(decompositions(AttentionBlock(attention_site(record, "self")), include, None, None))
        return torch.zeros(1)

    LayerPass([case.layers[layer_index]], keep, steps=True).run(lambda: case.model(**case.inputs))
    return found[-1]  # of a layer that runs several times, the last run counts


@each
def test_vectors_and_biases_sum_to_output(name: str, include: str) -> None:
    """Sum of R + b_O = p1; sum of Z + g(b_O) + beta = h; sum of g2(Z) + g2(g1(b_O) + beta1 + FFN) + beta2 = y."""
    case = FAMILIES[name].case
    ours, naive = decomposition_of(case, include), naive_vectors(case, 0, include)
    sums = torch.einsum("bijk,bjkd->bid", ours.weights, ours.vectors)
    real = torch.from_numpy(naive.real)
    assert_same(ours.whole[real], torch.from_numpy(naive.whole)[real])
    assert_same((sums + torch.from_numpy(naive.rest))[real], ours.whole[real])
    assert not sums[~real].any()


@pytest.mark.parametrize("normalize", [False, True])
@each_varied
def test_vectors_of_a_group_are_summed(name: str, include: Any, normalize: bool) -> None:
    case = FAMILIES[name].case
    tokens = case.inputs["input_ids"].shape[1]
    pairs = torch.arange(tokens) // 2
    for mask in (pairs[None], torch.stack([pairs, torch.arange(tokens) % 2, 0 * pairs])):
        method = LayerAttentionNorm(case.model, case.layers[1], include=include, normalize=normalize)
        whole = method.attribute(case.inputs, feature_mask=mask)
        assert_same(whole, naive_attention_norm(case, 1, include, groups=mask, normalize=normalize))
        assert_same(method.attribute(case.inputs, feature_mask=mask, token=2), whole[:, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    """Against the same rounded parameters in float64, on the first layer, whose input is rounded once."""
    include = INCLUDED[name][-1]
    case = FAMILIES[name].build(dtype)
    layer_map = LayerAttentionNorm(case.model, case.layers[0], include=include).attribute(case.inputs)
    assert layer_map.dtype == torch.float32
    exact = case.model.double()
    expected = LayerAttentionNorm(exact, case.layers[0], include=include).attribute(case.inputs)
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    assert_same(layer_map.double(), expected, tolerance)


@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_own_layers(norm_first: bool, sequence_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(
        16, 4, 24, batch_first=not sequence_first, norm_first=norm_first, dtype=torch.float64
    ).eval()
    attention, norm = layer.self_attn, layer.norm1
    nn.init.normal_(attention.in_proj_bias)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    include = "residual" if norm_first else "layer_norm"
    method = LayerAttentionNorm(layer, layer, include=include, normalize=False)
    found = method.attribute(x.transpose(0, 1) if sequence_first else x)

    given = (norm(x) if norm_first else x).detach()
    inputs = given.transpose(0, 1) if sequence_first else given
    weights = attention(inputs, inputs, inputs, average_attn_weights=False)[1].detach().numpy()
    value = (given @ attention.in_proj_weight[32:].T + attention.in_proj_bias[32:]).detach().numpy()
    matrix = attention.out_proj.weight.detach().numpy()
    for b, i, j in np.ndindex(2, 5, 5):
        vector = np.zeros(16)
        for head in range(4):
            columns = slice(4 * head, 4 * head + 4)
            vector += weights[b, head, i, j] * matrix[:, columns] @ value[b, j, columns]
        vector += x[b, i].numpy() * (i == j)
        if not norm_first:
            total = x[b, i] + attention(inputs, inputs, inputs)[0].transpose(0, int(sequence_first))[b, i]
            deviation = (total.var(unbiased=False) + norm.eps).sqrt().item()
            vector = norm.weight.detach().numpy() * (vector - vector.mean()) / deviation
        assert abs(found[b, i, j].item() - np.sqrt((vector**2).sum())) < 1e-10


@pytest.mark.parametrize(
    ("name", "include", "complaint"),
    [
        ("gpt2", "layer_norm", "'layer_norm' is not"),
        ("llama", "encoder", "'encoder' is not"),
        ("gemma2", "residual", "has no residual"),
        ("granite", "layer_norm", "has no residual"),
        ("bart-decoder", "encoder", "not end in a norm"),
    ],
)
def test_structures_that_are_not_recognised(name: str, include: Any, complaint: str) -> None:
    case = FAMILIES[name].case
    with pytest.raises(AssertionError, match=complaint):
        LayerAttentionNorm(case.model, case.layers[0], include=include).attribute(case.inputs)


class Gate(nn.Module):
    """Stands for a projection and is none: what it makes is not linear in what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def test_unrecognised_modules_are_refused() -> None:
    case = FAMILIES["bert"].build()
    method = LayerAttentionNorm(case.model, case.layers[0], include="layer_norm")
    case.layers[0].attention.output.LayerNorm = nn.Tanh()
    with pytest.raises(AssertionError, match="sum of its residual"):
        method.attribute(case.inputs)
    case.layers[0].attention.output.dense = Gate()
    with pytest.raises(AssertionError, match="a Gate, which"):
        method.attribute(case.inputs)
    model = BloomModel(BloomConfig(vocab_size=9, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(AssertionError, match="weights of Bloom"):
        LayerAttentionNorm(model, find_layers(model)).attribute(torch.tensor([[1, 2]]))


def test_tokens_in_a_cache_are_sources() -> None:
    case = FAMILIES["gpt2"].build()
    ids = case.inputs["input_ids"][:1]
    first = case.model(ids[:, :3], use_cache=True)

    def forward(ids: Tensor) -> Any:
        return case.model(ids, past_key_values=first.past_key_values)

    method = LayerAttentionNorm(forward, case.layers[0])
    assert_same(method.attribute(ids[:, 3:]), LayerAttentionNorm(case.model, case.layers[0]).attribute(ids)[:, 3:])


def test_unknown_options_are_refused() -> None:
    model = nn.Identity()
    with pytest.raises(AssertionError, match="include is 'all'"):
        LayerAttentionNorm(model, model, include="all")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(AssertionError, match="a cross-attention"):
        LayerAttentionNorm(model, model, include="residual", attention="cross")
    with pytest.raises(AssertionError, match="mixing ratio needs"):
        LayerAttentionNorm(model, model, attention="cross").mixing_ratio(torch.ones(1, 2))


# GlobEnc: the rollout of the norms of whole layers.

each_post_norm = pytest.mark.parametrize("name", ["bert", "roberta", "electra", "distilbert", "bart-encoder"])


@each_post_norm
def test_rollouts_of_every_layer(name: str) -> None:
    """Rows that are not divided by their sums are known up to a factor, and rank otherwise."""
    case = FAMILIES[name].case
    real = case.inputs["attention_mask"].bool()
    for normalize in (True, False):
        maps = [naive_attention_norm(case, index, "encoder", normalize=normalize) for index in range(len(case.layers))]
        found = GlobEnc(case.model, case.layers, normalize=normalize).attribute(case.inputs, all_layers=True)
        expected = naive_rollout(maps)
        if normalize:
            divided = found[-1]
            assert_same(found, expected)
            assert_same(divided.sum(-1), real.double())
            for residual in (0.5, "renormalize"):
                mixed = GlobEnc(case.model, case.layers, residual=residual).attribute(case.inputs, all_layers=True)
                assert_same(mixed, naive_rollout(maps, residual))
        else:
            assert_same(found[0].amax((1, 2)), torch.ones(case.batch, dtype=torch.float64))
            assert_same([by_largest(one) for one in found], [by_largest(one) for one in expected])
    assert not torch.allclose(found[-1][0] / found[-1][0].sum(-1, keepdim=True), divided[0], atol=1e-4)


def by_largest(maps: Tensor) -> Tensor:
    return maps / maps.amax((1, 2), keepdim=True)


def test_pre_norm_layers_are_refused() -> None:
    case = FAMILIES["gpt2"].case
    with pytest.raises(AssertionError, match="norms the attention"):
        GlobEnc(case.model, case.layers).attribute(case.inputs)
