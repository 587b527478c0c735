"""Attention times positive gradient equals a naive twin of weights and gradients that the model itself returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomModel

from captum_vz import LayerAttentionGradient, Rollout
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from tests.captum.footprint import footprint
from tests.engine.compare import assert_batch_is_its_examples, assert_same
from tests.reference.case import Case
from tests.reference.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:.*no source changes:UserWarning")
each_family = pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "bart-decoder"])


def number(output: Any) -> Tensor:
    """A number for each example that depends on an early token, which is not padding in any example."""
    hidden = output.last_hidden_state
    return (hidden[:, 2] ** 3).sum(-1) + hidden[:, 1, 0]


def method_of(case: Case, layer: Any = None, **options: Any) -> LayerAttentionGradient:
    return LayerAttentionGradient(case.model, layer or case.layers, **options)


def maps_of(case: Case, layer: Any = None, **options: Any) -> Any:
    return method_of(case, layer, **options).attribute(case.inputs, number)


def naive(case: Case, normalize: bool = True) -> list[Tensor]:
    """One example, head and pair at a time, from the weights that the model returns itself."""
    attentions = "decoder_attentions" if "decoder_input_ids" in case.inputs else "attentions"
    output = case.model.requires_grad_()(**case.inputs, output_attentions=True)
    given = list(getattr(output, attentions))
    gradients = torch.autograd.grad(number(output).sum(), given, allow_unused=True)
    maps = []
    for weights, gradient in zip(given, gradients, strict=True):
        batch, heads, out, sources = weights.shape
        one = torch.zeros(batch, out, sources, dtype=torch.float64)
        if gradient is not None:
            for b in range(batch):
                for head in range(heads):
                    one[b] += (weights[b, head] * gradient[b, head].clamp_min(0)).detach() / heads
        real = case.mask(case.family.mask, out)
        one *= real[:, :, None] * real[:, None, :]
        total = one.sum(-1, keepdim=True)
        maps.append(one / total.where(total != 0, 1) if normalize else one)
    return maps


@each_family
@pytest.mark.parametrize("normalize", [True, False])
def test_maps_equal_the_naive_twin(name: str, normalize: bool) -> None:
    case = FAMILIES[name].build(attn_implementation="eager")
    assert_same(maps_of(case, normalize=normalize), naive(case, normalize))


@each_family
def test_a_batch_is_its_examples(name: str) -> None:
    case = FAMILIES[name].case
    assert_batch_is_its_examples(method_of(case, case.layers[0]), case, target=number)


def test_tokens_and_features() -> None:
    case = FAMILIES["bert"].case
    method = method_of(case, case.layers[1], normalize=False)
    whole = method.attribute(case.inputs, number)
    assert_same(method.attribute(case.inputs, number, token=[2, 0, 1]), whole[[0, 1, 2], [2, 0, 1]])
    mask = torch.tensor([[0, 0, 1, 1, 2, 2, 3]])
    pooled = torch.zeros(3, 7, 4, dtype=torch.float64).index_add(2, mask[0], whole)
    there = case.mask(case.family.mask, 7)
    assert_same(method.attribute(case.inputs, number, feature_mask=mask), pooled[:, :, mask[0]] * there[:, None, :])


def test_target_and_foil_are_indices_of_the_output() -> None:
    case = FAMILIES["bert"].case
    method = method_of(case, normalize=False)
    for target, foil, same in [
        ((2, 3), None, lambda found: found[:, 2, 3]),
        ((2, 3), (1, 4), lambda found: found[:, 2, 3] - found[:, 1, 4]),
        ([(0, 1), (2, 0), (1, 1)], None, lambda found: torch.stack([found[0, 0, 1], found[1, 2, 0], found[2, 1, 1]])),
    ]:
        expected = method.attribute(case.inputs, lambda output, same=same: same(output.last_hidden_state))
        assert_same(method.attribute(case.inputs, target, foil=foil), expected)
        assert_same(method.attribute(case.inputs, target, foil=foil, token=1), [one[:, 1] for one in expected])
    alone = LayerAttentionGradient(lambda **given: number(case.model(**given)), case.layers, normalize=False)
    assert_same(alone.attribute(case.inputs), method.attribute(case.inputs, number))
    with pytest.raises(ArgumentError, match=r"picks \(3, 32\)"):
        method.attribute(case.inputs, 2)
    with pytest.raises(ArgumentError, match="function, so foil"):
        method.attribute(case.inputs, number, foil=1)


def test_relevance_of_a_stack() -> None:
    case = FAMILIES["bert"].build(attn_implementation="eager")
    relevance = torch.diag_embed(case.mask(case.family.mask, 7).double())
    for one in naive(case, normalize=False):
        relevance = relevance + one @ relevance
    rollout = Rollout(method_of(case, normalize=False), residual="add")
    assert_same(rollout.attribute(case.inputs, number), relevance)
    assert_same(rollout.attribute(case.inputs, number, token=2), relevance[:, 2])


def test_an_error_leaves_no_hooks() -> None:
    case = FAMILIES["bert"].build()
    before = footprint(case.model)
    for wrong, error, message in [
        (lambda output: 1 / 0, ZeroDivisionError, ""),
        (lambda output: output.last_hidden_state, ArgumentError, r"target gave \(3, 7"),
        (lambda output: 1.0, ArgumentError, "target gave float"),
        (lambda output: number(output) / 0, RefusedError, "not finite"),
        (lambda output: number(output).detach(), UnsupportedLayerError, "on the attention"),
    ]:
        with pytest.raises(error, match=message):
            method_of(case).attribute(case.inputs, wrong)
        assert footprint(case.model) == before


def test_layers_without_weights_or_gradients() -> None:
    with torch.inference_mode(), pytest.raises(ArgumentError, match="inference_mode"):
        maps_of(FAMILIES["bert"].case)
    with pytest.raises(ArgumentError, match="not index an output"):
        LayerAttentionGradient(nn.Identity(), nn.Identity()).attribute(torch.ones(1, 2), "logits")
    inline = BloomModel(BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(UnsupportedLayerError, match="its family computes"):
        LayerAttentionGradient(inline, inline.h).attribute(torch.tensor([[1, 2, 3]]), number)
    case = FAMILIES["bert"].case
    with pytest.raises(UnsupportedLayerError, match="on the attention we"):
        LayerAttentionGradient(torch.no_grad()(case.model), case.layers).attribute(case.inputs, number)
