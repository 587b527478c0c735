"""HiddenTokenAttribution against one backward pass for each number, finite differences and closed forms."""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from captum_vz import HiddenTokenAttribution
from tests.captum.configurations import embed
from tests.captum.footprint import footprint
from tests.engine.compare import assert_same
from tests.reference import FAMILIES, Case
from tests.reference.jacobian import naive_jacobian_norms, stepped_jacobian_norm

each_family = pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "llama", "t5-encoder"])
also_of_no_ids = ["albert-two-in-turn", "vit", "wav2vec2", "t5-decoder", "bart-decoder"]


@pytest.mark.parametrize("name", [*each_family.args[1], *also_of_no_ids])
def test_every_layer_of_every_family(name: str) -> None:
    case = FAMILIES[name].case
    expected = naive_jacobian_norms(case)[-len(case.layers) :]  # of a layer that runs several times, the last run
    assert_same(HiddenTokenAttribution(case.model, case.layers, normalize=False).attribute(case.inputs), expected)
    shares = [one / one.sum(-1, keepdim=True).where(one.any(-1, keepdim=True), torch.tensor(1.0)) for one in expected]
    rows = HiddenTokenAttribution(case.model, case.layers).attribute(case.inputs, token=1)
    assert_same(rows, [share[:, 1] for share in shares])


def test_small_steps_find_the_same() -> None:
    case = FAMILIES["bert"].case
    maps = HiddenTokenAttribution(case.model, case.layers, normalize=False).attribute(case.inputs)
    for layer, b, i, j in [(0, 0, 3, 2), (2, 1, 2, 0)]:
        assert maps[layer][b, i, j].item() == pytest.approx(stepped_jacobian_norm(case, layer, b, i, j), rel=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_gradient_times_input_of_one_layer(name: str) -> None:
    """The local form: the norm of the layer's Jacobian, each column times the entry of the layer's input."""
    case = FAMILIES[name].case
    kept = []

    def leaf(module: nn.Module, args: Any, output: Any) -> Any:
        states = (output[0] if isinstance(output, tuple) else output).detach().requires_grad_()
        kept.append(states)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    with case.layers[0].register_forward_hook(leaf), case.layers[1].register_forward_hook(keep):
        case.model(**case.inputs)
    before, after = kept
    expected = torch.zeros(*before.shape[:2], before.shape[1], dtype=before.dtype)
    for i in range(after.shape[1]):
        for d in range(after.shape[2]):
            (gradient,) = torch.autograd.grad(after[:, i, d].sum(), before, retain_graph=True)
            expected[:, i] += (gradient * before.detach()).square().sum(-1)
    if "attention_mask" in case.inputs:
        mask = case.inputs["attention_mask"].bool()
        expected = expected * mask[:, :, None] * mask[:, None]
    local = HiddenTokenAttribution(
        case.model, case.layers[1], embeddings=case.layers[0], multiply_by_inputs=True, normalize=False
    )
    assert_same(local.attribute(case.inputs), expected.sqrt())


@pytest.mark.parametrize("name", ["bert", "albert-two-in-turn", "t5-decoder", "wav2vec2"])
def test_later_layer_of_a_function(name: str) -> None:
    case = FAMILIES[name].case
    whole = HiddenTokenAttribution(case.model, case.layers, probes=2).attribute(case.inputs)
    for forward in (case.model, lambda **inputs: case.model(**inputs)):
        alone = HiddenTokenAttribution(forward, case.layers[-1], probes=2).attribute(case.inputs)
        assert torch.equal(alone, whole[-1])


def test_layer_called_by_keyword() -> None:
    case = FAMILIES["bert"].case

    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(case.layers)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(hidden_states=x)
            return x

    model, vectors = ByKeyword(), embed(case)[:1]
    once = HiddenTokenAttribution(model, case.layers[1], probes=2).attribute(vectors)
    embeddings = nn.Identity()
    given = HiddenTokenAttribution(lambda x: model(embeddings(x)), case.layers[1], embeddings=embeddings, probes=2)
    assert torch.equal(once, given.attribute(vectors))


def test_decoder_layers_with_encoder_tokens() -> None:
    case = FAMILIES["bart-decoder"].case
    embeddings = case.model.encoder.embed_tokens
    method = HiddenTokenAttribution(case.model, case.layers[:1], embeddings=embeddings)
    (found,) = method.attribute(case.inputs)
    assert found.shape == (3, 5, 7)
    expected = naive_jacobian_norms(case, embeddings, 1)[0]
    assert_same(found.sum(-1), case.inputs["decoder_attention_mask"].double())
    assert_same(found * expected.sum(-1, keepdim=True), expected)
    assert not found.mT[case.inputs["attention_mask"] == 0].any()
    with pytest.raises(AssertionError, match="has 5 tokens"):
        method.attribute(case.inputs, feature_mask=torch.arange(5)[None])


def test_vectors_that_a_module_returns() -> None:
    case = FAMILIES["bert"].case.example(2)
    module = case.model.embeddings.word_embeddings
    method = HiddenTokenAttribution(case.model, case.layers[:2], embeddings=module, normalize=False)
    assert_same(method.attribute(case.inputs), naive_jacobian_norms(case, module)[:2])


def passing_on(case: Case) -> Case:
    """GPT-2 with blocks that return their input."""
    with torch.no_grad():
        for block in case.layers:
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                projection.weight.zero_()
                projection.bias.zero_()
    return case


@pytest.mark.parametrize("probes", [None, 5])
def test_layers_that_return_their_input(probes: int | None) -> None:
    case = passing_on(FAMILIES["gpt2"].build())
    real = case.inputs["attention_mask"].double()
    method = HiddenTokenAttribution(case.model, case.layers, probes=probes, normalize=False)
    for one in method.attribute(case.inputs):
        size = one[0, 0, 0]  # of the identity, or of what the probes take it for
        assert_same(one, torch.diag_embed(real) * size)
        if probes is None:
            assert size.item() == pytest.approx(sqrt(32))
        else:
            assert abs(size.item() ** 2 / 32 - 1) < 3 * sqrt(2 / (32 * probes))


def test_probes_are_unbiased() -> None:
    """The error of the mean over n seeds is smaller than the error of one seed by the square root of n."""
    case = FAMILIES["bert"].case
    layer, seeds = case.layers[1], 30
    exact = HiddenTokenAttribution(case.model, layer, normalize=False).attribute(case.inputs, token=1)
    one = partial(HiddenTokenAttribution, case.model, layer, probes=1, normalize=False)
    estimates = torch.stack([one(seed=seed).attribute(case.inputs, token=1) for seed in range(seeds)])
    there = exact > 0
    relative = estimates.square().mean(0)[there] / exact[there].square() - 1
    assert relative.abs().max() < 4 * sqrt(2 / seeds)


def test_a_seed_is_an_estimate() -> None:
    case = FAMILIES["bert"].case
    one, same, other = (
        HiddenTokenAttribution(case.model, case.layers[1], probes=2, seed=seed).attribute(case.inputs)
        for seed in (1, 1, 2)
    )
    state = torch.random.get_rng_state()
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(("probes", "a_row"), [(None, 32), (3, 3)])
def test_a_row_costs_a_row(probes: int | None, a_row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, passes = FAMILIES["bert"].case, []
    gradients, functorch = torch.autograd.grad, torch._C._functorch

    def count(outputs: Tensor, inputs: Tensor, seed: Tensor, **options: Any) -> Any:
        passes.append(len(functorch.get_unwrapped(seed)) if functorch.is_batchedtensor(seed) else 1)
        return gradients(outputs, inputs, seed, **options)

    monkeypatch.setattr(torch.autograd, "grad", count)
    inputs = {"inputs_embeds": embed(case), "attention_mask": case.inputs["attention_mask"]}
    method = HiddenTokenAttribution(case.model, case.layers[1], probes=probes)
    whole = method.attribute(inputs)
    assert sum(passes) == 7 * a_row
    passes.clear()
    assert_same(method.attribute(inputs, token=[4, 0, 2]), whole[[0, 1, 2], [4, 0, 2]])
    assert sum(passes) == a_row
    passes.clear()
    method.attribute(inputs, token=1, perturbations_per_eval=2)
    assert max(passes) <= 2
    assert sum(passes) == a_row


def test_a_group_is_one_variable() -> None:
    case = FAMILIES["bert"].case
    mask = torch.tensor([[0, 0, 1, 1, 1, 2, 3]])
    method = HiddenTokenAttribution(case.model, case.layers[1], normalize=False)
    alone, together = method.attribute(case.inputs), method.attribute(case.inputs, feature_mask=mask)
    for tokens in ([0, 1], [2, 3, 4], [5], [6]):
        expected = alone[..., tokens].square().sum(-1).sqrt()
        for token in tokens:
            there = case.inputs["attention_mask"][:, token, None] > 0
            assert_same(together[..., token], expected * there)


def test_vectors_in_place_of_ids() -> None:
    case = FAMILIES["gpt2"].case
    expected = HiddenTokenAttribution(case.model, case.layers, probes=2).attribute(case.inputs)
    vectors, mask = embed(case), case.inputs["attention_mask"]
    named = {"inputs_embeds": vectors, "attention_mask": mask}
    assert_same(HiddenTokenAttribution(case.model, case.layers, probes=2).attribute(named), expected)

    def forward(vectors: Tensor, mask: Tensor) -> Any:
        return case.model(inputs_embeds=vectors, attention_mask=mask)

    method = HiddenTokenAttribution(forward, case.layers, probes=2)
    assert_same(method.attribute(vectors, additional_forward_args=mask), expected)
    assert_same(method.attribute((vectors, mask)), expected)
    assert not vectors.requires_grad


def test_layer_that_writes_into_its_input() -> None:
    case = FAMILIES["llama"].build()
    method = HiddenTokenAttribution(case.model, case.layers, probes=2)
    expected = method.attribute(case.inputs)
    with case.layers[0].register_forward_pre_hook(lambda layer, args: (args[0].mul_(1.0), *args[1:])):
        assert_same(method.attribute(case.inputs), expected)


def test_torch_layers_with_tokens_first() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True), 2).double().eval()
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    settings: list[dict[str, Any]] = [{}, {"token": [3, 0, 1]}, {"feature_mask": torch.tensor([[0, 1, 1, 2]])}]
    method = HiddenTokenAttribution(model, model.layers)
    expected = [method.attribute(x, **one) for one in settings]
    for layer in model.layers:
        layer.self_attn.batch_first = False
    for one, maps in zip(settings, expected, strict=True):
        assert_same(method.attribute(x.transpose(0, 1), **one), maps)


def test_bad_arguments() -> None:
    case = FAMILIES["bert"].case
    ids = case.inputs["input_ids"]
    for probes in (0, -1, 2.0, True):
        with pytest.raises(AssertionError, match=f"is {probes!r}"):
            HiddenTokenAttribution(case.model, case.layers, probes=probes)  # type: ignore[arg-type]  # wrong on purpose
    method = HiddenTokenAttribution(case.model, case.layers)
    with torch.inference_mode(), pytest.raises(AssertionError, match=r"mode\(\) is active"):
        method.attribute(case.inputs)
    with pytest.raises(AssertionError, match="in the same thread"):
        HiddenTokenAttribution(case.model, case.layers, embeddings=nn.Identity()).attribute(ids)
    words = nn.Sequential(case.model.embeddings.word_embeddings, nn.Unflatten(2, (-1, 1)))
    method = HiddenTokenAttribution(
        lambda ids: case.model(inputs_embeds=words(ids)[..., 0]), case.layers, embeddings=words
    )
    with pytest.raises(AssertionError, match="embeddings returned"):
        method.attribute(ids)
    with pytest.raises(AssertionError, match="does not depend"):
        HiddenTokenAttribution(torch.no_grad()(case.model.forward), case.layers).attribute(case.inputs)


def test_stacks_without_a_visible_first_layer() -> None:
    case = FAMILIES["bert"].case
    layers, vectors = case.layers, embed(case)
    before = footprint(case.model)

    def refused(forward: Any, layer: Any, match: str) -> None:
        with pytest.raises(AssertionError, match=match + ".* pass the module that returns the vectors as `embeddings`"):
            HiddenTokenAttribution(forward, layer).attribute(vectors)
        assert footprint(case.model) == before
        assert not torch_modules._global_forward_pre_hooks

    by_hand = "no other BertLayer"
    unclear = "does not show which"
    refused(nn.Sequential(nn.Linear(32, 32).double(), *layers), layers, unclear)
    refused(nn.Sequential(nn.Sequential(nn.Identity(), layers[0]), layers[1]), layers[1], unclear)
    refused(lambda x: layers[1](layers[0](x)), layers[1], by_hand)
    halves = nn.Sequential(layers[0]), nn.Sequential(*layers[1:])
    refused(lambda x: halves[1](halves[0](x)), layers[1:], by_hand)
    other = FAMILIES["bert"].build().layers[0]
    refused(lambda x: nn.Sequential(*layers)(other(x)), layers, by_hand)

    class Named(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            for index in range(count):
                self.add_module(f"layer_{index}", layers[index])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.children():
                x = layer(x)
            return x

    refused(Named(2), layers[1], "does not show which")
    alone = HiddenTokenAttribution(Named(1), layers[0], probes=2).attribute(vectors)
    assert torch.equal(alone, HiddenTokenAttribution(nn.Sequential(*layers), layers[0], probes=2).attribute(vectors))

    layer = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 24, 0.0, batch_first=True)).double().eval()
    with pytest.raises(AssertionError, match="was given torch"):
        HiddenTokenAttribution(layer, layer[0]).attribute(vectors[0])
    both = FAMILIES["t5-encoder"].case
    with pytest.raises(AssertionError, match="lists layers of"):
        HiddenTokenAttribution(both.model, [both.layers[0], both.model.decoder.block[0]]).attribute(both.inputs)
