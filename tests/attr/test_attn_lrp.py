"""AttnLRP against rules of relevance written out by hand, its authors' numbers, conservation, and what it refuses."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from captum.attr import LLMGradientAttribution, TextTokenInput
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

from captum_vz import AttnLRP, token_scores
from captum_vz._private import function_modes
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.testbed import load_model
from tests.captum.footprint import footprint
from tests.engine.compare import assert_same
from tests.reference.attn_lrp import IDS, WORDS, Model, by_rules

FORMS = [(gate, rms, sdpa) for gate in (True, False) for rms in (True, False) for sdpa in (True, False)]


@pytest.mark.parametrize(("gate", "rms", "sdpa"), FORMS)
def test_relevance_is_that_of_the_rules(gate: bool, rms: bool, sdpa: bool) -> None:
    model = Model(gate, rms, sdpa)
    vectors = model.words(IDS).detach().requires_grad_()
    (expected,) = torch.autograd.grad(by_rules(model, vectors)[:, -1, 3], vectors, model(IDS)[:, -1, 3])
    assert_same(AttnLRP(model).attribute(IDS, target=(-1, 3)), expected, 1e-9)


TINY = {"vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
TINY |= {"intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
NEAR = 1e-5  # models of transformers compute some steps in float32
IMAGES = {"image_size": 8, "patch_size": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertForMaskedLM", TINY),
    "GPT-2": ("GPT2LMHeadModel", {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4}),
    "LLaMA": ("LlamaForCausalLM", TINY | {"num_key_value_heads": 2}),
    "Gemma": ("Gemma2ForCausalLM", TINY | {"num_key_value_heads": 2, "head_dim": 4, "final_logit_softcapping": None}),
    "Mixtral": ("MixtralForCausalLM", TINY | EXPERTS),
    "T5": ("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
    "ViT": ("ViTForImageClassification", TINY | IMAGES),
    "BLOOM": ("BloomForCausalLM", {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
}


def built(name: str, attention: str = "eager", dtype: torch.dtype = torch.float64) -> Any:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    config = made.config_class(**settings)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # others compute no float64
    model = made(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs_of(name: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :3]} if name == "T5" else {})


def target_of(name: str) -> Any:
    return 1 if name == "ViT" else (-1, 3)


@pytest.mark.parametrize("name", ["LLaMA", "Gemma", "Mixtral", "T5"])
def test_constant_weights_conserve_relevance(name: str) -> None:
    """These models have no biases, so the relevance of all vectors sums to the logit."""
    model, inputs = built(name), inputs_of(name)
    layers = [one for key, one in model.named_modules() if key.endswith("embed_tokens")]
    found = AttnLRP(model, layers, cp_lrp=True).attribute(inputs, target=(-1, 3))
    total = sum((one.flatten(1).sum(1) for one in found), torch.zeros(()))
    assert_same(total, model(**inputs).logits[:, -1, 3], NEAR)
    alone = AttnLRP(model, layers).attribute(inputs, target=(-1, 3))
    assert not torch.allclose(alone[0], found[0])


@pytest.mark.parametrize("name", MODELS)
def test_batch_is_its_examples(name: str) -> None:
    model, inputs = built(name), inputs_of(name)
    found = AttnLRP(model).attribute(inputs, target=target_of(name))
    assert found.dtype == torch.float64 and found.abs().sum() > 0
    for b in range(2):
        one = {key: x[b : b + 1] for key, x in inputs.items()}
        assert_same(AttnLRP(model).attribute(one, target=target_of(name)), found[b : b + 1], NEAR)


@pytest.mark.parametrize(
    ("name", "side"),
    [*((name, "right") for name in ("BERT", "GPT-2", "LLaMA", "Mixtral")), ("BERT", "left"), ("LLaMA", "left")],
)
def test_padding_has_no_relevance(name: str, side: str) -> None:
    model = built(name, dtype=torch.float32)
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    place = slice(3, None) if side == "left" else slice(None, 5)
    ids[:, place], mask[:, place] = IDS, 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    found = AttnLRP(model).attribute(inputs, target=(-1 if side == "left" else 4, 3))
    assert_same(found[:, place], AttnLRP(model).attribute(IDS, target=(-1, 3)), 10 * NEAR)
    assert not found[mask == 0].any()


@pytest.mark.parametrize("constant", [False, True])
def test_every_backend_of_sdpa_has_the_same_rule(constant: bool) -> None:
    """torch's plain code has a softmax of its own, which older versions take for masks."""
    model, tokenizer = load_model("causal")
    model.set_attn_implementation("sdpa")
    inputs, method = tokenizer("the pictures of some hat", return_tensors="pt"), AttnLRP(model, cp_lrp=constant)
    expected = method.attribute(inputs, target=(4, 7))
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(method.attribute(inputs, target=(4, 7)), expected, atol=1e-5, rtol=1e-4)


def test_flex_attention_has_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses its gradients on a CPU, where they are not compiled."""
    torch.manual_seed(0)
    q, k, v = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def by(attention: Callable[..., Tensor], x: Tensor) -> Tensor:
        return attention(*(one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in (q, k, v))).sum((1, 2, 3))

    x = torch.randn(2, 5, 8, dtype=torch.float64)
    # torch's own refusal. The rule itself is tested below with this check taken out.
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        AttnLRP(partial(by, flex.flex_attention)).attribute(x)
    monkeypatch.setattr(flex, "_validate_device", lambda *given: None)
    for cp_lrp in (False, True):
        found = AttnLRP(partial(by, flex.flex_attention), cp_lrp=cp_lrp).attribute(x)
        expected = AttnLRP(partial(by, F.scaled_dot_product_attention), cp_lrp=cp_lrp).attribute(x)
        assert_same(found, expected, 1e-9)


def test_decisions_are_differentiated_as_they_are() -> None:
    model, method = Model(), AttnLRP(Model())
    each = torch.stack([method.attribute(IDS, target=(-1, word)) for word in range(WORDS)])
    chances = model(IDS)[:, -1].softmax(-1).detach()
    expected = each[3] - torch.einsum("wbtd,bw->btd", each, chances)
    assert_same(method.attribute(IDS, lambda logits: logits[:, -1].log_softmax(-1)[:, 3]), expected, 1e-9)
    by_model = AttnLRP(lambda ids: model(ids)[:, -1].log_softmax(-1))
    assert_same(by_model.attribute(IDS, target=3), expected, 1e-9)
    assert_same(method.attribute(IDS, target=(-1, 3), foil=[(-1, 4), (-1, 5)])[1], (each[3] - each[5])[1], 1e-9)


def test_layers_and_inputs() -> None:
    model = Model()
    first, second = model.blocks
    expected = AttnLRP(model).attribute(IDS, target=(-1, 3))
    vectors = model.words(IDS).detach()
    assert_same(AttnLRP(lambda x: model.head(model.blocks(x))).attribute(vectors, target=(-1, 3)), expected, 1e-12)
    below, above = AttnLRP(model, [first, second]).attribute(IDS, target=(-1, 3))
    assert_same(AttnLRP(model, second).attribute(IDS, (-1, 3), attribute_to_layer_input=True), below, 1e-12)
    assert_same(AttnLRP(model, second).attribute(IDS, target=(-1, 3)), above, 1e-12)
    gradients = AttnLRP(model, multiply_by_inputs=False).attribute(IDS, target=(-1, 3))
    assert_same(gradients * vectors, expected, 1e-12)
    with torch.no_grad():
        assert_same(AttnLRP(model).attribute((IDS,), target=(-1, 3)), expected, 1e-12)


def test_nonlinear_functions_pass_relevance_on() -> None:
    """Except that of f(0), which is a bias."""
    x = torch.tensor([[-2.0, -0.3, 0.0, 0.7]], dtype=torch.float64)
    clamp, in_place = lambda x: x.clamp(-0.5, 0.5), lambda x: F.elu(x * 1, inplace=True)
    for function in (torch.sigmoid, torch.exp, clamp, in_place, lambda x: x**3):
        found = AttnLRP(lambda x, function=function: function(x).sum(1)).attribute(x)
        assert_same(found, function(x) - function(torch.zeros_like(x)), 1e-12)


def test_writing_to_a_part_of_a_tensor() -> None:
    def written(x: Tensor) -> Tensor:
        y = x * 1
        y[:, :2] *= x[:, 2:]
        y[:, 2:].sigmoid_()
        return y.sum(1)

    def plain(x: Tensor) -> Tensor:
        return (x[:, :2] * x[:, 2:]).sum(1) + x[:, 2:].sigmoid().sum(1)

    x = torch.randn(3, 4, dtype=torch.float64)
    assert_same(AttnLRP(written).attribute(x), AttnLRP(plain).attribute(x), 1e-12)


def test_group_norm_and_batch_norm() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    norm = nn.GroupNorm(2, 4, dtype=torch.float64)
    assert_same(AttnLRP(lambda x: norm(x)[:, 0, 1]).attribute(x).sum((1, 2)), norm(x)[:, 0, 1], 1e-9)
    with pytest.raises(UnsupportedLayerError, match="NativeBatchNorm"):
        AttnLRP(lambda x: F.batch_norm(x, None, None, training=True).sum((1, 2))).attribute(x)


WITHOUT_RULE: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1).sum(1),
    "log": lambda x: x.log().sum(1),
    "cdist": lambda x: torch.cdist(x[None], x[None] + 1)[0].sum(1),
}


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_operations_without_rule_are_refused() -> None:
    def hidden(x: Any, apply: Any = Hidden.apply) -> Any:
        return apply(x).sum(1)

    for name, function in {**WITHOUT_RULE, "Hidden": hidden}.items():
        with pytest.raises(UnsupportedLayerError, match=f"(?i)rule for {name}"):
            AttnLRP(function).attribute(torch.rand(3, 4))


def test_wrong_calls_are_refused() -> None:
    model = Model()
    for wrong, message in (
        ((model, nn.Linear(2, 2)), "did not run Linear"),
        ((lambda ids: model(ids.flip(1)),), "did not embed"),
        ((torch.no_grad()(model.forward),), "by any gradient"),
        ((model, "words"), "of type str"),
        ((Model().train(),), "train mode"),
    ):
        with pytest.raises(RefusedError, match=message):
            AttnLRP(*wrong).attribute(IDS, target=(-1, 3))
    with pytest.raises(ArgumentError, match="layer is None"):
        AttnLRP(model).attribute(IDS, target=(-1, 3), attribute_to_layer_input=True)
    with torch.inference_mode(), pytest.raises(ArgumentError, match="inference_mode"):
        AttnLRP(model).attribute(IDS, target=(-1, 3))


@pytest.mark.parametrize("name", ["BERT", "Mixtral"])
def test_model_is_left_as_it_was(name: str) -> None:
    model = built(name)
    before, logits = footprint(model), model(IDS).logits
    seen: list[Tensor] = []

    def target(output: Any) -> Tensor:
        seen.append(output.logits)
        return output.logits[:, -1, 3]

    def fails(output: Any) -> Tensor:
        raise KeyError("target")

    AttnLRP(model).attribute(IDS, target)
    for wrong, error in ((fails, KeyError), (lambda output: output.logits[:, -1].prod(1) * torch.nan, RefusedError)):
        with pytest.raises(error):
            AttnLRP(model).attribute(IDS, wrong)
    with pytest.raises(ArgumentError):
        AttnLRP(model).attribute(IDS + WORDS, target)
    assert footprint(model) == before and not function_modes()
    assert torch.equal(seen[0], logits)  # the rules change gradients only


def test_captums_wrapper_for_language_models() -> None:
    model, tokenizer = load_model("causal")
    text = TextTokenInput("the pictures of some hat", tokenizer)
    method = AttnLRP(model, model.get_input_embeddings())
    found = LLMGradientAttribution(method, tokenizer).attribute(text, target="are small")
    ids = tokenizer("the pictures of some hat", return_tensors="pt")["input_ids"]
    word = tokenizer.convert_tokens_to_ids("are")
    by_hand = method.attribute(ids, lambda output: output.logits[:, -1].log_softmax(-1)[:, word])
    assert_same(found.token_attr[0].cpu(), token_scores(by_hand)[0], 1e-4)


# The relevances of its authors' package, lxt 2.1, kept in a file. The package needs transformers 4 (here 4.53.3), and
# cannot run here. It patched the classes of each architecture (monkey_patch with its map attnLRP, or cp_LRP), which
# ran with the weights and the ids below. Kept is the sum of gradient times input of the word embeddings, for the lead
# of RIGHT over WRONG after the last token.

KEPT = json.loads((Path(__file__).parent / "attn_lrp_authors.json").read_text("utf-8"))
TEXTS = torch.tensor([[3, 7, 1, 9, 4, 22, 17, 5], [5, 2, 38, 6, 11, 30, 12, 8]])
RIGHT, WRONG = 6, 9
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**SMALL, **ENDS, "num_key_value_heads": 2, "tie_word_embeddings": False}
GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 8}
KEPT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "Gemma3Text": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, **GEMMA}),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 40, "n_embd": 32, "n_layer": 3, "n_head": 4, **ENDS}),
    "Bert": ("BertForMaskedLM", SMALL),
}


def filled(name: str, attention: str) -> Any:
    """A model whose weights depend on their names alone."""
    head, config = KEPT_MODELS[name]
    made = getattr(transformers, f"{name}Config")(**config)
    made._attn_implementation = attention
    model = getattr(transformers, head)(made).eval()
    with torch.no_grad():
        for parameter, weights in model.named_parameters():
            draw = torch.Generator().manual_seed(zlib.crc32(parameter.encode()))
            is_scale = weights.ndim == 1 and "bias" not in parameter and name != "Gemma3Text"
            weights.copy_(torch.randn(weights.shape, generator=draw) * 0.2 + is_scale)
    return model


@pytest.mark.all_cases
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kept", KEPT)
def test_relevance_is_that_of_the_authors(kept: str, attention: str) -> None:
    name, rules = kept.split()
    model = filled(name, attention)
    method = AttnLRP(model, model.get_input_embeddings(), cp_lrp=rules == "cp_LRP")
    found = token_scores(method.attribute({"input_ids": TEXTS}, target=(7, RIGHT), foil=(7, WRONG))).double()
    wanted = torch.tensor(KEPT[kept], dtype=torch.float64)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
