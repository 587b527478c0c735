"""ValueZeroingEffect equals a loop that runs the whole model once for each zeroed token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from captum.attr import FeatureAblation, NoiseTunnel
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from captum_vz import ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz._engine.whole_model import cache as cache_of_outputs
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.testbed import load_model
from tests.budget import set_budget
from tests.captum.configurations import embed
from tests.captum.footprint import footprint
from tests.captum.test_threads import together
from tests.engine.blocks import WIDTH as BLOCK_WIDTH
from tests.engine.blocks import Block, SelfAttention
from tests.engine.compare import assert_same
from tests.reference import FAMILIES, Attention, Case, Family
from tests.reference.case import HEAD_WIDTH, HEADS, LAYERS, WIDTH
from tests.reference.inputs import VOCABULARY
from tests.reference.naive import context_by_hand, record, values_of
from tests.sweep.models import small_models, working_inputs

INLINE = {
    "gpt_neo": Family(
        "GPTNeoModel",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "intermediate_size": 48,
            "attention_types": [[["global"], LAYERS]],
        },
        "h",
        Attention("attn.attention.v_proj", "attn.attention.out_proj"),
        causal=True,
    ),
    "bloom": Family(
        "BloomModel",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
        "h",
        Attention(
            "self_attention.query_key_value", "self_attention.dense", offset=2 * HEAD_WIDTH, stride=3 * HEAD_WIDTH
        ),
        causal=True,
    ),
}
# Every kind of stack: encoders, decoders with shared values and with windows, layers that run again, images, sound.
NAMES = ["bert", "gpt2", "llama", "gemma2", "gpt-neox", "albert", "albert-two-in-turn", "modernbert", "vit", "wav2vec2"]
PAIRED = ["bart-encoder", "bart-decoder", "t5-encoder", "t5-decoder", "whisper-decoder"]
CHOICES: list[Any] = [0, -1, slice(None)]
WORDS = torch.tensor([[0, 0, 1, 1, 2, 2, 3]])


@cache
def case_of(name: str) -> Case:
    return (FAMILIES | INLINE)[name].case


def read(output: Any) -> Tensor:
    """A difference of two numbers at token 2, which is not padding in any example."""
    hidden: Tensor = output.last_hidden_state[:, 2]
    return hidden[:, 3] - 0.5 * hidden[:, 5]


@contextmanager
def zeroed_everywhere(layers: Sequence[nn.Module], site: Attention, zeroed: Tensor) -> Iterator[None]:
    """While the block runs, these layers' values are zero where `zeroed (batch, in)` is True."""

    def zero(module: nn.Module, args: tuple[Any, ...], values: Tensor) -> Tensor:
        values = values.clone()
        for b, j in zeroed.nonzero().tolist():
            for head in range(site.value_heads):
                values[b, j, site.columns(head)] = 0.0
        return values

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.get_submodule(site.value).register_forward_hook(zero))
        yield


@torch.no_grad()
def naive_effect(
    case: Case,
    chosen: Any = slice(None),
    attention: str = "self",
    of: Callable[[Any], Tensor] = read,
    groups: Tensor | None = None,
) -> Tensor:
    """The decrease of the output for each group of sources, `(batch, in)`, by one run of the model each."""
    layers = case.layers[chosen] if isinstance(chosen, slice) else [case.layers[chosen]]
    site = case.family.attention if attention == "self" else case.family.cross
    mask = case.family.mask if attention == "self" else case.family.source_mask
    runs, output = record(case)
    length = values_of(next(run for run in runs if run.layer is layers[0]), site).shape[1]
    real = case.mask(mask, length)
    groups = (torch.arange(length) if groups is None else groups).expand(case.batch, -1)
    result = torch.zeros(case.batch, length, dtype=torch.float64)
    for group in groups.unique():
        zeroed = (groups == group) & real
        with zeroed_everywhere(layers, site, zeroed):
            lost = of(output) - of(case.model(**case.inputs))
        result += lost[:, None] * zeroed
    return result


def effect(case: Case, chosen: Any = slice(None), of: Any = read, **options: Any) -> Tensor:
    constructor = {key: options.pop(key) for key in ("attention", "heads") if key in options}
    return ValueZeroingEffect(case.model, case.layers[chosen], **constructor).attribute(case.inputs, of, **options)


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
@pytest.mark.parametrize("name", [*NAMES, *PAIRED, *INLINE])
def test_effect_equals_one_run_per_token(name: str, chosen: Any) -> None:
    case = case_of(name)
    expected = naive_effect(case, chosen)
    assert expected.abs().max() > 1e-3
    assert_same(effect(case, chosen), expected)


def test_some_of_the_layers_together() -> None:
    for name in ("bert", "llama"):
        for chosen in (1, slice(1, 3), slice(0, 3, 2)):
            assert_same(effect(case_of(name), chosen), naive_effect(case_of(name), chosen))


@pytest.mark.parametrize("name", ["bart-decoder", "t5-decoder"])
def test_outputs_of_an_encoder_as_input(name: str) -> None:
    """Tensors inside of an input are repeated as well."""
    case = case_of(name)
    encoder = {key: case.inputs[key] for key in ("input_ids", "attention_mask")}
    encoded = case.model.get_encoder()(**encoder)
    rest = {key: value for key, value in case.inputs.items() if key != "input_ids"}
    method = ValueZeroingEffect(case.model, case.layers, attention="cross")
    for outputs in (encoded, (encoded.last_hidden_state,)):
        assert_same(method.attribute({**rest, "encoder_outputs": outputs}, read), effect(case, attention="cross"))


@pytest.mark.parametrize("name", ["bart-decoder", "t5-decoder", "whisper-decoder"])
@pytest.mark.parametrize("chosen", [1, slice(None)], ids=str)
def test_cross_attention_sources_are_encoder_tokens(name: str, chosen: Any) -> None:
    case = case_of(name)
    found = effect(case, chosen, attention="cross")
    assert found.shape == (3, 7)
    assert_same(found, naive_effect(case, chosen, "cross"))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_every_attention_implementation(name: str, implementation: str) -> None:
    case = FAMILIES[name].build(attn_implementation=implementation)
    # Eager attention may compute its softmax in float32.
    assert_same(effect(case), naive_effect(FAMILIES[name].case), 1e-10 if implementation == "eager" else 1e-6)


@pytest.mark.parametrize("groups", [WORDS, torch.tensor([[0] * 7, [1, 0, 1, 0, 2, 2, 2], [7, 8, 9, 9, 9, 9, 9]])])
@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neo"])
def test_feature_tokens_are_zeroed_together(name: str, groups: Tensor) -> None:
    case = case_of(name)
    assert_same(effect(case, feature_mask=groups), naive_effect(case, groups=groups))


@pytest.mark.parametrize("heads", [1, [0, 3]], ids=str)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_heads(name: str, heads: Any) -> None:
    case, layer = case_of(name), 1
    site = case.family.attention
    run = record(case)[0][layer]
    weights = record(case, output_attentions=True)[1].attentions[layer]
    clean, real, values = read(record(case)[1]), case.mask(case.family.mask, 7), values_of(run, site)
    expected = torch.zeros(3, 7, dtype=torch.float64)
    chosen = [heads] if isinstance(heads, int) else heads
    for j in range(7):
        zeroed = (torch.arange(7) == j) & real

        def give(module: nn.Module, args: tuple[Any, ...], zeroed: Tensor = zeroed) -> tuple[Tensor]:
            return (context_by_hand(args[0], weights, values, site, zeroed.numpy(), chosen),)

        with torch.no_grad(), case.layers[layer].get_submodule(site.output).register_forward_pre_hook(give):
            expected[:, j] = (clean - read(case.model(**case.inputs))) * real[:, j]
    assert_same(effect(case, layer, heads=heads), expected)
    assert_same(effect(case, heads=[[0, 1, 2, 3]] * 3), effect(case))


# torch.nn's layers, and forward functions of other forms.


@contextmanager
def zeroed_value(token: int) -> Iterator[None]:
    """While the block runs, every attention loses the value of one token."""
    torchs = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value = value.clone()
        value[:, :, token] = 0
        return torchs(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = attention
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = torchs
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("batch", [1, 3, 5])  # five tokens: an axis may be taken for the other
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_layers_of_torch(batch_first: bool, causal: bool, batch: int) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=batch_first, dtype=torch.float64)
    stack = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(batch, 5, 16, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64) if causal else None

    @torch.no_grad()
    def forward(x: Tensor) -> Tensor:
        y = stack(x if batch_first else x.transpose(0, 1), mask=mask, is_causal=causal)
        return y if batch_first else y.transpose(0, 1)

    expected = []
    for token in range(5):
        with zeroed_value(token):
            expected.append(forward(x)[:, 4, 2])
    expected = forward(x)[:, 4, 2][:, None] - torch.stack(expected, 1)
    assert_same(ValueZeroingEffect(forward, list(stack.layers)).attribute(x, target=(4, 2)), expected)
    upper = ValueZeroingEffect(forward, stack.layers[1]).attribute(x, target=(4, 2))
    assert (upper - expected).abs().max() > 1e-4


def embedded_model() -> tuple[Any, Any, Any]:
    model, tokenizer = load_model()
    texts = ["the hats [MASK] here.", "the picture of some hats [MASK] here."]
    return model, tokenizer, tokenizer(texts, padding=True, return_tensors="pt")


def test_targets_have_captums_meaning() -> None:
    model, tokenizer, inputs = embedded_model()
    places = [ids.index(tokenizer.mask_token_id) for ids in inputs["input_ids"].tolist()]
    are, is_ = tokenizer.convert_tokens_to_ids(["are", "is"])
    of = ValueZeroingEffect(model, find_layers(model))
    one_each = [(places[0], are), (places[1], is_)]
    expected = of.attribute(
        inputs, lambda out: out.logits.unflatten(0, (-1, 2))[:, [0, 1], places, [are, is_]].flatten()
    )
    torch.testing.assert_close(of.attribute(inputs, one_each), expected)
    assert torch.equal(expected == 0, inputs["attention_mask"] == 0)
    torch.testing.assert_close(of.attribute(inputs, (places[0], are))[0], expected[0])

    def forward(ids: Tensor, mask: Tensor, place: Tensor) -> Tensor:
        """Classes, read at a place of each example's own."""
        return model(input_ids=ids, attention_mask=mask).logits[torch.arange(len(ids)), place]

    apart = ValueZeroingEffect(forward, find_layers(model))
    further = (inputs["attention_mask"], torch.tensor(places))
    for target in ([are, is_], torch.tensor([are, is_])):
        found = apart.attribute(inputs["input_ids"], target, additional_forward_args=further)
        torch.testing.assert_close(found, expected)
    for target in (are, (are,), torch.tensor(are)):
        found = apart.attribute(inputs["input_ids"], target, additional_forward_args=further)
        torch.testing.assert_close(found[0], expected[0])
    in_tuple, *rest = apart.attribute((inputs["input_ids"], *further), [are, is_])
    assert len(rest) == 2 and not any(one.any() for one in rest)
    torch.testing.assert_close(in_tuple, expected)
    scalar = ValueZeroingEffect(lambda *x: forward(*x)[:, are], find_layers(model))
    found = scalar.attribute(inputs["input_ids"], additional_forward_args=further)
    torch.testing.assert_close(found[0], expected[0])


class OnlyAttention(nn.Module):
    """Attention only. The output at a token is a sum over tokens, so effects have a closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(finish=lambda attention, context, x: context)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def test_effect_in_a_sum_of_tokens() -> None:
    block = OnlyAttention()
    x = torch.randn(2, 5, BLOCK_WIDTH, dtype=torch.float64)
    parts = [linear(x).unflatten(-1, (4, -1)) for linear in (block.attention.query, block.attention.key)]
    weights = (torch.einsum("bihd,bjhd->bhij", *parts) / 2).softmax(-1)
    values = block.attention.value(x)
    found = ValueZeroingEffect(block, block).attribute(x, target=(3, 5))  # feature 5 is the second head's
    assert_same(found, weights[:, 1, 3] * values[..., 5])
    assert_same(found.sum(1), block(x)[:, 3, 5])  # complete: without any value nothing is left
    # FeatureAblation has the same sign: of the sum of its inputs it gives each input.
    ablation = FeatureAblation(lambda terms: terms.sum(-1)).attribute(weights[:, 1, 3] * values[..., 5])
    assert_same(found, ablation)


def test_classes_masked_by_infinity() -> None:
    block = Block()

    def masked(x: Tensor) -> Tensor:
        return block(x)[:, 0].index_fill(1, torch.tensor([2]), -torch.inf)

    x = torch.randn(2, 5, BLOCK_WIDTH, dtype=torch.float64)
    plain = ValueZeroingEffect(lambda x: block(x)[:, 0], block).attribute(x, target=0)
    assert_same(ValueZeroingEffect(masked, block).attribute(x, target=0), plain)
    with pytest.raises(AssertionError, match="values that are not finite"):
        ValueZeroingEffect(masked, block).attribute(x, target=2)


def test_tolerance_for_differences_of_large_numbers() -> None:
    block, x = Block(), torch.randn(2, 5, BLOCK_WIDTH, dtype=torch.float64)

    def difference(x: Tensor) -> Tensor:
        rounding = 1e-12 * len(x)  # another one for each number of copies
        return 1e-6 * block(x)[:, 0, 0] + rounding

    plain = ValueZeroingEffect(lambda x: 1e-6 * block(x)[:, 0, 0], block).attribute(x)
    assert_same(ValueZeroingEffect(difference, block).attribute(x), plain, tolerance=1e-15)


# Identities.


@pytest.mark.parametrize(
    ("name", "part", "attention"),
    [
        ("bert", "attention", "self"),
        ("bert", "attention.self", "self"),
        ("gpt2", "attn", "self"),
        ("bart-decoder", "self_attn", "self"),
        ("bart-decoder", "encoder_attn", "cross"),
    ],
)
def test_attention_module_as_layer(name: str, part: str, attention: str) -> None:
    """The values of a block are those of its attention module, and the explained output is that of the model."""
    case = case_of(name)
    for chosen in ([1], [0, 1]):
        blocks = [case.layers[index] for index in chosen]
        parts = [block.get_submodule(part) for block in blocks]
        # A cross-attention is the only attention of its module.
        of_blocks = ValueZeroingEffect(case.model, blocks, attention=attention).attribute(case.inputs, read)
        of_parts = ValueZeroingEffect(case.model, parts).attribute(case.inputs, read)
        assert_same(of_parts, of_blocks)
        assert of_parts.abs().max() > 1e-3


def test_zero_values_have_no_effect() -> None:
    case = FAMILIES["bert"].build()
    value = case.layers[1].attention.self.value
    value.weight.zero_()
    value.bias.zero_()
    assert not effect(case, 1).any()
    assert_same(effect(case, slice(0, 2)), effect(case, 0))


def test_effect_of_the_last_layer() -> None:
    """BERT's output is that of its last layer, which Value Zeroing compares token by token."""
    case = case_of("bert")
    lost = ValueZeroing(
        case.model, case.layers[-1], distance=lambda zeroed, clean: (clean - zeroed)[..., 3], normalize=False
    ).attribute(case.inputs, target=2)
    assert_same(of_hidden_states(case, case.layers[-1]).attribute(case.inputs, target=(2, 3)), lost)


def of_hidden_states(case: Case, layers: Any) -> ValueZeroingEffect:
    return ValueZeroingEffect(lambda **inputs: case.model(**inputs).last_hidden_state, layers)


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neo", "bart-decoder"])
def test_padded_batch_equals_its_examples(name: str) -> None:
    case = case_of(name)
    whole = effect(case)
    for b in range(3):
        single = case.example(b)
        one = effect(single)
        assert_same(whole[b : b + 1, : one.shape[1]], one)
        assert not whole[b, one.shape[1] :].any()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neo"])
def test_later_tokens_in_a_causal_model(name: str) -> None:
    assert not effect(case_of(name))[:, 3:].any()


@pytest.mark.parametrize("at_most", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("name", ["bert", "gpt2", "bloom"])
def test_effects_for_any_perturbations_per_eval(name: str, at_most: int) -> None:
    assert_same(effect(case_of(name), perturbations_per_eval=at_most), effect(case_of(name)), tolerance=1e-12)


def test_noise_tunnel_without_noise() -> None:
    case = case_of("bert")

    def forward(embeddings: Tensor, mask: Tensor) -> Tensor:
        return case.model(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state

    of = ValueZeroingEffect(forward, case.layers)
    rest = {"target": [(2, 3), (1, 5), (0, 7)], "additional_forward_args": case.inputs["attention_mask"]}
    smoothed = NoiseTunnel(of).attribute(embed(case), nt_samples=2, stdevs=0.0, **rest)
    assert_same(smoothed, of.attribute(embed(case), **rest))


# What it costs.


@contextmanager
def counted(case: Case) -> Iterator[list[int]]:
    """The examples of each run of a model."""
    examples: list[int] = []

    def count(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is case.model:
            examples.append(len(output.last_hidden_state))

    count.__module__ = "captum_vz.count"  # a hook of the user's is code from elsewhere
    with register_module_forward_hook(count, with_kwargs=True):
        yield examples


@pytest.mark.parametrize("chosen", [0, -1, slice(None)], ids=str)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gpt_neo", "bart-decoder", "albert"])
def test_sources_run_in_one_batch(name: str, chosen: Any) -> None:
    case = case_of(name)
    of = ValueZeroingEffect(case.model, case.layers[chosen])
    for target in (read, (2, 3)):
        with counted(case) as examples:
            scores = of.attribute(case.inputs, target)
        assert examples == [3, 3 * (scores.shape[1] + 1)]  # and one copy that is left as it is
    with counted(case) as examples:
        of.attribute(case.inputs, read, perturbations_per_eval=2)
    assert max(examples) == 3 * 3


def test_memory_bounds_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("bert")
    expected = effect(case)
    widest = 3 * 7 * 48 * 8  # the feed-forward layer's
    set_budget(monkeypatch, copies_bytes=4 * widest)
    with counted(case) as examples:
        assert_same(effect(case), expected)
    assert examples[:4] == [3, 12, 12, 6]
    set_budget(monkeypatch, copies_bytes=1)
    assert_same(effect(case), expected)


def test_features_of_examples_share_a_run() -> None:
    """Nine features in all, but no example has more than four."""
    case = case_of("bert")
    groups = torch.tensor([[0, 0, 1, 1, 2, 2, 3], [4, 4, 5, 5, 6, 6, 6], [7, 7, 8, 8, 8, 8, 8]])
    with counted(case) as examples:
        found = effect(case, feature_mask=groups)
    assert examples[:2] == [3, 3 * 5]
    assert_same(found, naive_effect(case, groups=groups))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5-decoder", "vit"])
def test_earlier_modules_run_once(name: str) -> None:
    case = FAMILIES[name].build()
    ran: list[nn.Module] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if next(module.children(), None) is None:
            ran.append(module)

    note.__module__ = "captum_vz.note"  # a hook of the user's is code from elsewhere
    with register_module_forward_hook(note):
        case.model(**case.inputs)
        once = Counter(ran)
        ran.clear()
        effect(case, -1)
    twice = {module for module, times in Counter(ran).items() if times >= 2 * once[module]}
    below = {module for layer in case.layers[:-1] for module in layer.modules()}
    assert twice
    assert not twice & below
    assert twice >= {module for module in case.layers[-1].modules() if module in once}


def operations(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neo"])
def test_unchanged_positions_are_skipped_when_causal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, tokens = case_of(name), 24
    inputs = {"input_ids": torch.randint(4, 60, (2, tokens))}
    of = ValueZeroingEffect(case.model, case.layers)
    last = ValueZeroingEffect(case.model, case.layers[-1])
    plain = operations(lambda: case.model(**inputs))
    found, cost = of.attribute(inputs, read), operations(lambda: of.attribute(inputs, read))
    cost_of_last = operations(lambda: last.attribute(inputs, read))
    monkeypatch.setattr(cache_of_outputs, "MOST_CHANGED", -1)  # as if everything had changed
    assert_same(of.attribute(inputs, read), found)
    whole = operations(lambda: of.attribute(inputs, read))
    assert whole > 0.95 * plain * (tokens + 2)  # the clean pass, a copy for each token and one more
    # Attention is computed whole, which weighs much in a model of this size; of all else, half the positions.
    assert cost < 0.7 * whole
    assert cost_of_last < 0.4 * cost


# Models as people run them, and forward functions of their own kind.


def compiled(case: Case) -> Any:
    return torch.compile(case.model, backend="eager")


def with_compiled_layers(case: Case) -> Any:
    for layer in case.layers:
        layer.compile(backend="eager")
    return case.model


def offloaded(case: Case) -> Any:
    return cpu_offload(case.model, execution_device=torch.device("cpu"))


def in_training(case: Case) -> Any:
    return case.model.train()  # LLaMA has no dropout


@pytest.mark.parametrize("prepare", [compiled, with_compiled_layers, offloaded, in_training])
def test_models_as_people_run_them(prepare: Callable[[Case], Any]) -> None:
    case = FAMILIES["llama"].build()
    model = prepare(case)
    before = footprint(case.model)
    for chosen in (slice(1, 2), slice(None)):
        found = ValueZeroingEffect(model, case.layers[chosen]).attribute(case.inputs, read)
        assert_same(found, naive_effect(case_of("llama"), chosen))
    assert footprint(case.model) == before


class Careless(nn.Module):
    """Writes into the outputs of its modules, and runs a scripted module before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH, dtype=torch.float64)
        self.scripted = torch.jit.script(nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH, dtype=torch.float64))
        self.lower, self.upper = Block(), Block()
        self.leave = nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x += 1
        x = self.scripted(x).mul_(2)
        x = self.upper(self.lower(x).add_(0.5)).add_(0.25)
        return self.leave(x).mul_(3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("chosen", [("upper",), ("lower", "upper")])
def test_model_that_writes_into_outputs(chosen: tuple[str, ...]) -> None:
    model = Careless()
    x = torch.randn(2, 4, BLOCK_WIDTH, dtype=torch.float64)
    layers = [getattr(model, name) for name in chosen]
    site = Attention("attention.value", "attention.output", value_heads=1, head_width=BLOCK_WIDTH)
    expected = []
    for j in range(4):
        with torch.no_grad(), zeroed_everywhere(layers, site, (torch.arange(4) == j).expand(2, -1)):
            expected.append(model(x)[:, 2, 3])
    expected = model(x)[:, 2, 3][:, None].detach() - torch.stack(expected, 1)
    assert_same(ValueZeroingEffect(model, layers).attribute(x, target=(2, 3)), expected)


@pytest.mark.parametrize("run", [0, 1, -1])
def test_function_that_runs_the_model_twice(run: int) -> None:
    case = case_of("bert")
    other = {**case.inputs, "input_ids": case.inputs["input_ids"].roll(1, 1)}

    def twice(**inputs: Tensor) -> Tensor:
        """What one sentence gives, less what its words do in another order."""
        rolled = {**inputs, "input_ids": inputs["input_ids"].roll(1, 1)}
        return read(case.model(**inputs)) - 2 * read(case.model(**rolled))

    expected = torch.zeros(3, 7, dtype=torch.float64)
    real, chosen, factor = case.inputs["attention_mask"].bool(), (case.inputs, other)[run], (1, -2)[run]
    for j in range(7):
        zeroed = (torch.arange(7) == j) & real
        with torch.no_grad(), zeroed_everywhere(case.layers[1:], case.family.attention, zeroed):
            lost = read(case.model(**chosen))
        expected[:, j] = factor * (read(case.model(**chosen)) - lost) * real[:, j]
    method = ValueZeroingEffect(twice, case.layers[1:])
    assert_same(method.attribute(case.inputs, run=run), expected)
    with pytest.raises(RefusedError, match="2 times, on inputs that are not related"):
        method.attribute(case.inputs)


# Refusals, and the model left as it was found.


class Chance(nn.Module):
    def __init__(self, own: torch.Generator | None = None) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=self.own)


class Neighbours(nn.Module):
    """Mixes the examples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0)


@pytest.mark.parametrize("odd", [Chance(), Neighbours()])
@pytest.mark.parametrize("place", ["between", "inside", "behind"])
def test_dependent_or_random_examples_are_refused(odd: nn.Module, place: str) -> None:
    blocks = nn.Sequential(Block(), Block(after=odd if place == "inside" else None))
    model = nn.Sequential(blocks[0], *([odd] if place == "between" else []), blocks[1], *([odd] * (place == "behind")))
    x = torch.randn(3, 5, BLOCK_WIDTH, dtype=torch.float64)
    message = "uses no random numbers" if isinstance(odd, Chance) else "examples of a batch affect each other"
    with pytest.raises(AssertionError, match=message):
        ValueZeroingEffect(model, list(blocks)).attribute(x, target=(2, 3))
    if place == "between" and isinstance(odd, Neighbours):  # what it gave is what the last layer gets
        assert ValueZeroingEffect(model, blocks[1]).attribute(x, target=(2, 3)).any()


def test_generator_behind_the_layers_is_refused() -> None:
    block = Block()
    model, x = nn.Sequential(block, Chance(torch.Generator())), torch.randn(1, 5, BLOCK_WIDTH, dtype=torch.float64)
    with pytest.raises(RefusedError, match="the unchanged copy gave another output"):
        ValueZeroingEffect(model, block).attribute(x, target=(2, 3))


def test_dropout_in_the_model_is_refused() -> None:
    case = FAMILIES["bert"].build()
    case.model.embeddings.dropout.train()
    with pytest.raises(AssertionError, match="in train mode and has dropout"):
        effect(case, 1)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"target": None},
            r"forward_func gave \(3, 7, 32\), and target None picks \(3, 7, 32\) for 3 examples",
        ),
        ({"target": 3}, r"target \(3,\) picks \(3, 32\) for 3 examples"),
        ({"target": lambda out: out.sum()}, r"target gave \(\) for 3 examples"),
        ({"target": lambda out: 1.0}, "target gave float for 3 examples"),
        ({"target": lambda out: out[:, 2, 3] / 0}, "target gave values that are not finite"),
        ({"target": (2, 3), "attribute_to_layer_input": True}, "attribute_to_layer_input=True has no meaning here"),
        ({"target": (2, 3), "perturbations_per_eval": 0}, "perturbations_per_eval is 0: pass an integer of at least 1"),
        ({"target": (2, 3), "feature_mask": torch.zeros(1, 3).long()}, r"feature_mask is \(1, 3\), but the layer's"),
    ],
)
def test_unsupported_layers_are_refused(keywords: dict[str, Any], message: str) -> None:
    case = case_of("bert")
    before = footprint(case.model)
    with pytest.raises(AssertionError, match=message):
        of_hidden_states(case, case.layers).attribute(case.inputs, **keywords)
    assert footprint(case.model) == before


def test_further_refusals() -> None:
    case = case_of("bert")
    with pytest.raises(AssertionError, match="without logits"):
        ValueZeroingEffect(lambda **inputs: [case.model(**inputs)], case.layers).attribute(case.inputs, (2, 3))
    with pytest.raises(AssertionError, match="did not run layer 0 of 1"):
        ValueZeroingEffect(case.model, FAMILIES["bert"].build().layers[0]).attribute(case.inputs, read)
    with pytest.raises(AssertionError, match="has no second attention"):
        effect(case, attention="cross")
    pair = case_of("bart-decoder")
    both = [*pair.model.encoder.layers, *pair.layers]
    with pytest.raises(AssertionError, match=r"different sources: \[\(3, 5\), \(3, 7\)\]"):
        ValueZeroingEffect(pair.model, both).attribute(pair.inputs, read)
    with pytest.raises(NotImplementedError, match="attribute_future is not implemented for ValueZeroingEffect"):
        ValueZeroingEffect(case.model, case.layers).attribute_future()
    with pytest.raises(
        ArgumentError,
        match=r"target is \(2, 99\), which is out of range in axis 2",
    ):
        of_hidden_states(case, case.layers).attribute(case.inputs, target=(2, 99))
    with pytest.raises(ArgumentError, match="target is a function, so foil has no meaning"):
        ValueZeroingEffect(case.model, case.layers).attribute(case.inputs, read, foil=3)


def test_a_foil_is_subtracted() -> None:
    case = case_of("bert")
    method = of_hidden_states(case, case.layers[1])
    right, wrong = ([(2, 3), (0, 1), (1, 4)], [(1, 5), (2, 2), (0, 0)])
    both = method.attribute(case.inputs, target=right, foil=wrong)
    assert_same(both, method.attribute(case.inputs, target=right) - method.attribute(case.inputs, target=wrong))
    assert_same(method.attribute(case.inputs, target=(2, 3)), method.attribute(case.inputs, target=[(2, 3)] * 3))


@pytest.mark.parametrize("name", ["bert", "gpt_neo", "t5-decoder"])
def test_model_is_unchanged(name: str) -> None:
    case = case_of(name)
    before = footprint(case.model)
    clean = case.model(**case.inputs).last_hidden_state
    effect(case, 1)
    assert footprint(case.model) == before

    class InterruptionError(Exception):
        pass

    runs: list[int] = []

    def interrupt(module: nn.Module, args: Any, kwargs: Any) -> None:
        runs.append(1)
        if len(runs) == 2:
            raise InterruptionError

    with case.layers[2].register_forward_pre_hook(interrupt, with_kwargs=True), pytest.raises(InterruptionError):
        effect(case, slice(1, 2))
    assert footprint(case.model) == before
    assert not torch_modules._global_forward_hooks
    assert not torch_modules._global_forward_pre_hooks
    assert torch.equal(case.model(**case.inputs).last_hidden_state, clean)


def test_half_precision_warns() -> None:
    case = FAMILIES["bert"].build(torch.bfloat16)
    with pytest.warns(UserWarning, match="runs in half precision: .* Load it in float32"):
        found = effect(case)
    assert found.dtype == torch.float32


def test_threads() -> None:
    case = case_of("bert")
    before = footprint(case.model)
    expected = [effect(case, chosen) for chosen in (0, 1, 2)]
    plain = case.model(**case.inputs).last_hidden_state
    actions = [lambda chosen=chosen: effect(case, chosen) for chosen in (0, 1, 2)]
    for _ in range(3):
        *found, hidden = together(*actions, lambda: case.model(**case.inputs).last_hidden_state)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(hidden, plain)
    assert footprint(case.model) == before


def test_progress_counts_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    effect(case_of("bert"), perturbations_per_eval=3, show_progress=True)
    shown = capsys.readouterr().err
    assert "Value Zeroing Effect attribution" in shown
    assert "3/3" in shown
    effect(case_of("bert"))
    assert capsys.readouterr().err == ""


@torch.no_grad()
def test_module_that_views_its_context() -> None:
    """The attention of AFMoE calls `view` on its context, which fails for a transposed tensor."""
    model = next(small_models("afmoe"))
    inputs, layers = working_inputs(model)[0], list(model.layers)
    scores = ValueZeroingEffect(model, layers).attribute(inputs, read)
    for source in range(3):
        with ExitStack() as stack:
            for layer in layers:

                def zero(module: nn.Module, args: Any, values: Tensor, source: int = source) -> Tensor:
                    return values.index_fill(1, torch.tensor([source]), 0.0)

                stack.enter_context(layer.self_attn.v_proj.register_forward_hook(zero))
            lost = read(model(**inputs))
        assert_same(scores[:, source], read(model(**inputs)) - lost, tolerance=1e-5)
        assert scores[:, source].any()
