"""AttnLRP against rules of relevance written out by hand, conservation, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from captum.attr import LLMGradientAttribution, TextTokenInput
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from captum_vz import AttnLRP, token_scores
from captum_vz._private import function_modes
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.testbed import load_model
from tests.captum.footprint import footprint
from tests.engine.compare import assert_same

WIDTH, HEADS, VALUE_HEADS, WORDS = 12, 4, 2, 20
IDS = torch.tensor([[3, 7, 1, 9, 4], [5, 2, 8, 6, 11]])


class WrittenGelu(nn.Module):
    """In several operations, as in transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Grouped queries, and a feed-forward network with or without a gate."""

    def __init__(self, gated: bool, rms: bool, sdpa: bool, bias: bool) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=bias)
        self.norms = nn.ModuleList(Rms() if rms else nn.LayerNorm(WIDTH) for _ in range(2))
        size = WIDTH // HEADS * VALUE_HEADS
        self.q, self.k, self.v, self.o = (linear(WIDTH, out) for out in (WIDTH, size, size, WIDTH))
        self.gate, self.up, self.down = linear(WIDTH, 16), linear(WIDTH, 16), linear(16, WIDTH)
        self.act = nn.SiLU() if gated else WrittenGelu()
        self.gated, self.sdpa = gated, sdpa

    def heads(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        return x.repeat_interleave(HEADS // x.shape[1], 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (self.heads(part(y)) for part in (self.q, self.k, self.v))
        if self.sdpa:
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            logits = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(future, -torch.inf)
            context = logits.softmax(-1) @ v
        x = x + self.o(context.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(self.act(self.gate(y)) * self.up(y) if self.gated else self.act(self.gate(y)))


class Model(nn.Module):
    def __init__(self, gated: bool = True, rms: bool = True, sdpa: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(gated, rms, sdpa, bias) for _ in range(2)))
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.double().eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(ids)))


# The rules, as functions whose backward pass is given the relevance of the output and returns that of the inputs.
class Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Callable[..., Any], value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.share, ctx.inputs, ctx.value = share, inputs, value
        return value.clone()

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.share(relevance, ctx.value, *ctx.inputs)


def ruled(share: Callable[..., Any], compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        value = compute(*inputs)
    apply: Any = Rule.apply
    return apply(share, value, *inputs)


def linear(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Epsilon rule: each term of a sum has a share of the relevance. Biases keep theirs."""

    def share(relevance: Tensor, z: Tensor, x: Tensor) -> tuple[Tensor]:
        origin = layer(torch.zeros_like(x))
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(layer(x) - origin.detach(), x, relevance / z)
        return (x.detach() * found,)

    return ruled(share, layer, x)


def added(a: Tensor, b: Tensor) -> Tensor:
    return ruled(lambda r, z, a, b: (r * a / z, r * b / z), torch.add, a, b)


def gated(a: Tensor, b: Tensor) -> Tensor:
    return ruled(lambda r, z, a, b: (r / 2, r / 2), torch.mul, a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    def share(r: Tensor, z: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        terms = a[..., :, :, None] * b[..., None, :, :] * torch.where(z == 0, 0, r / z)[..., :, None, :]
        return terms.sum(-1) / 2, terms.sum(-3) / 2

    return ruled(share, torch.matmul, a, b)


def softmax(x: Tensor) -> Tensor:
    def share(r: Tensor, s: Tensor, x: Tensor) -> tuple[Tensor]:
        return (torch.where(x.isinf(), 0, x) * (r - s * r.sum(-1, keepdim=True)),)

    return ruled(share, lambda x: x.softmax(-1), x)


def passed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return ruled(lambda r, z, x: (r,), function, x)


def by_rules(model: Model, vectors: Tensor) -> Tensor:
    """The output of the model, with relevance for gradients."""
    x = vectors
    for block in model.blocks:
        assert isinstance(block, Block)
        y = by_norm(block.norms[0], x)
        q, k, v = (block.heads(linear(part, y)) for part in (block.q, block.k, block.v))
        scaled = passed(lambda x: x / (WIDTH // HEADS) ** 0.5, product(q, k.mT))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        context = product(softmax(scaled.masked_fill(future, -torch.inf)), v)
        x = added(x, linear(block.o, context.transpose(1, 2).flatten(2)))
        y = by_norm(block.norms[1], x)
        inner = passed(block.act, linear(block.gate, y))
        x = added(x, linear(block.down, gated(inner, linear(block.up, y)) if block.gated else inner))
    return linear(model.head, x)


def by_norm(norm: Any, x: Tensor) -> Tensor:
    """Linear, with a constant scale."""
    centred = x if isinstance(norm, Rms) else x - x.mean(-1, keepdim=True)
    scale = (centred.detach().square().mean(-1, keepdim=True) + (1e-6 if isinstance(norm, Rms) else 1e-5)).rsqrt()

    def constant(x: Tensor) -> Tensor:
        x = x if isinstance(norm, Rms) else x - x.mean(-1, keepdim=True)
        return x * scale * norm.weight + getattr(norm, "bias", torch.zeros(()))

    return linear(constant, x)


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


def test_each_layer_conserves_relevance() -> None:
    model = Model(bias=False)
    found = AttnLRP(model, list(model.blocks), cp_lrp=True).attribute(IDS, target=(-1, 3), foil=(-1, 4))
    lead = model(IDS)[:, -1, 3] - model(IDS)[:, -1, 4]
    assert all(torch.allclose(one.sum((1, 2)), lead) for one in found)


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


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "LLaMA", "T5", "ViT"])
@pytest.mark.parametrize("cp_lrp", [False, True])
def test_attention_functions_agree(name: str, cp_lrp: bool) -> None:
    expected, found = (
        AttnLRP(built(name, kind), cp_lrp=cp_lrp).attribute(inputs_of(name), target=target_of(name))
        for kind in ("eager", "sdpa")
    )
    assert_same(found, expected, NEAR)


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


def test_bfloat16_is_near_float64() -> None:
    whole, half = built("LLaMA"), built("LLaMA", dtype=torch.bfloat16)
    half.load_state_dict(whole.state_dict())
    expected, found = (token_scores(AttnLRP(one).attribute(IDS, target=(-1, 3))) for one in (whole, half))
    assert found.dtype == torch.float32
    assert_same(found.double(), expected, 0.1)


def test_torchs_own_layers() -> None:
    """nn.MultiheadAttention is one function for a function mode, and many nodes for the graph."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", bias=False, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    layer.eval()
    found = AttnLRP(lambda x: layer(x)[:, 0, 1], cp_lrp=True).attribute(x)
    assert_same(found.sum((1, 2)), layer(x)[:, 0, 1], 1e-9)


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


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "in place": lambda x: F.elu(x * 1, inplace=True),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "power": lambda x: x**3,
    "exp": torch.exp,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nonlinear_functions_pass_relevance_on(name: str) -> None:
    """Except that of f(0), which is a bias."""
    x, function = torch.tensor([[-2.0, -0.3, 0.0, 0.7]], dtype=torch.float64), FUNCTIONS[name]
    found = AttnLRP(lambda x: function(x).sum(1)).attribute(x)
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
    with pytest.raises(UnsupportedLayerError, match="no rule for NativeBatchNorm"):
        AttnLRP(lambda x: F.batch_norm(x, None, None, training=True).sum((1, 2))).attribute(x)


WITHOUT_RULE: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1).sum(1),
    "log": lambda x: x.log().sum(1),
    "cdist": lambda x: torch.cdist(x[None], x[None] + 1)[0].sum(1),
}


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_operations_without_rule_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=f"(?i)no rule for {name}.* Pass a layer above it"):
        AttnLRP(WITHOUT_RULE[name]).attribute(torch.rand(3, 4))


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_functions_of_users_are_refused() -> None:
    def hidden(x: Any, apply: Any = Hidden.apply) -> Any:
        return apply(x).sum(1)

    with pytest.raises(UnsupportedLayerError, match="no rule for Hidden"):
        AttnLRP(hidden).attribute(torch.rand(3, 4))


def test_wrong_calls_are_refused() -> None:
    model = Model()
    with pytest.raises(ArgumentError, match="did not run Linear"):
        AttnLRP(model, nn.Linear(2, 2)).attribute(IDS, target=(-1, 3))
    with pytest.raises(ArgumentError, match="did not embed the token ids"):
        AttnLRP(lambda ids: model(ids.flip(1))).attribute(IDS, target=(-1, 3))
    with pytest.raises(UnsupportedLayerError, match="does not depend on the word embeddings by any gradient"):
        AttnLRP(torch.no_grad()(model.forward)).attribute(IDS, target=(-1, 3))
    with pytest.raises(ArgumentError, match="layer is None"):
        AttnLRP(model).attribute(IDS, target=(-1, 3), attribute_to_layer_input=True)
    with pytest.raises(ArgumentError, match="layer is of type str"):
        AttnLRP(model, "words").attribute(IDS, target=(-1, 3))
    with pytest.raises(ArgumentError, match="train mode"):
        AttnLRP(Model().train()).attribute(IDS, target=(-1, 3))
    with torch.inference_mode(), pytest.raises(ArgumentError, match="inference_mode"):
        AttnLRP(model).attribute(IDS, target=(-1, 3))
    steps: Any = {"n_steps": 3}
    with pytest.raises(RefusedError, match="takes no n_steps"):
        AttnLRP(model).attribute(IDS, **steps)


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
