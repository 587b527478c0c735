"""ValueZeroingEffect equals a loop that runs the whole model once for each zeroed token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import FeatureAblation
from torch import Tensor, nn

from captum_vz import ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.testbed import load_model
from tests.engine.blocks import WIDTH as BLOCK_WIDTH
from tests.engine.blocks import Block, SelfAttention
from tests.engine.compare import assert_same
from tests.engine.odd import zeroed_value
from tests.reference import FAMILIES, Case
from tests.reference.effects import INLINE, NAMES, PAIRED, WORDS, case_of, naive_edges, naive_effect, read

CHOICES: list[Any] = [0, -1, slice(-2, None), slice(None)]


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


@pytest.mark.parametrize("groups", [WORDS, torch.tensor([[0] * 7, [1, 0, 1, 0, 2, 2, 2], [7, 8, 9, 9, 9, 9, 9]])])
@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neo"])
def test_feature_tokens_are_zeroed_together(name: str, groups: Tensor) -> None:
    case = case_of(name)
    assert_same(effect(case, feature_mask=groups), naive_effect(case, groups=groups))


@pytest.mark.parametrize("heads", [[1], [0, 3]], ids=str)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_heads(name: str, heads: list[int]) -> None:
    case = case_of(name)
    assert_same(effect(case, 1, heads=heads), naive_edges(case, 1, read, heads, slice(None)))


# torch.nn's layers, and forward functions of other forms.


@pytest.mark.parametrize("batch", [1, 3, 5])  # five tokens: an axis may be taken for the other
@pytest.mark.parametrize("batch_first", [True, False])
def test_layers_of_torch(batch_first: bool, batch: int) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=batch_first, dtype=torch.float64)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(batch, 5, 16, dtype=torch.float64)

    @torch.no_grad()
    def forward(x: Tensor) -> Tensor:
        y = stack(x if batch_first else x.transpose(0, 1))
        return y if batch_first else y.transpose(0, 1)

    expected = []
    for token in range(5):
        with zeroed_value(token):
            expected.append(forward(x)[:, 4, 2])
    expected = forward(x)[:, 4, 2][:, None] - torch.stack(expected, 1)
    assert_same(ValueZeroingEffect(forward, list(stack.layers)).attribute(x, target=(4, 2)), expected)
    upper = ValueZeroingEffect(forward, stack.layers[1]).attribute(x, target=(4, 2))
    assert (upper - expected).abs().max() > 1e-4


def test_targets_have_captums_meaning() -> None:
    model, tokenizer = load_model()
    texts = ["the hats [MASK] here.", "the picture of some hats [MASK] here."]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
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
    for target, examples in (([are, is_], 2), (torch.tensor([are, is_]), 2), (are, 1), ((are,), 1)):
        found = apart.attribute(inputs["input_ids"], target, additional_forward_args=further)
        torch.testing.assert_close(found[:examples], expected[:examples])
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
    with pytest.raises(AssertionError, match="are not finite"):
        ValueZeroingEffect(masked, block).attribute(x, target=2)


def test_tolerance_for_differences_of_large_numbers() -> None:
    block, x = Block(), torch.randn(2, 5, BLOCK_WIDTH, dtype=torch.float64)

    def difference(x: Tensor) -> Tensor:
        rounding = 1e-12 * len(x)  # another one for each number of copies
        return 1e-6 * block(x)[:, 0, 0] + rounding

    plain = ValueZeroingEffect(lambda x: 1e-6 * block(x)[:, 0, 0], block).attribute(x)
    assert_same(ValueZeroingEffect(difference, block).attribute(x), plain, tolerance=1e-15)


# Identities.


PARTS = [("bert", "attention"), ("bert", "attention.self"), ("gpt2", "attn"), ("bart-decoder", "encoder_attn")]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_attention_module_as_layer(name: str, part: str) -> None:
    """The values of a block are those of its attention module, and the explained output is that of the model."""
    case, attention = case_of(name), "cross" if part == "encoder_attn" else "self"
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
