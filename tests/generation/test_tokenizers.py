"""Tokenizers that are less than those of transformers, and what a context does to generated tokens."""

from typing import Any

import pytest
import torch
from captum.attr import TextTemplateInput, TextTokenInput
from torch import Tensor
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.generation import LLMTokenMaps, attribute_generation, context_reliance, gated_input
from captum_vz.testbed import load_model
from tests.generation.models import case_of, tokenizer_of_words

MODEL = case_of("gpt2").model
FAST = tokenizer_of_words()
TEXT, TARGET = "the woman likes anna", "has upset"
TEMPLATE = TextTemplateInput("the {} likes {}", ["woman", "anna"])


class Least:
    """`encode` of a text and `decode` of ids, over the words of another tokenizer, and no more."""

    def encode(self, text: str) -> Any:
        return FAST.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Tensor) -> str:
        return " ".join(FAST.convert_ids_to_tokens(index) for index in token_ids.tolist())


class Minimal(Least):
    """Captum's `TokenizerLike`."""

    def encode(self, text: str, add_special_tokens: Any = None, return_tensors: Any = None) -> Any:
        ids = super().encode(text)
        return torch.tensor([ids]) if return_tensors else ids

    def convert_ids_to_tokens(self, token_ids: Any) -> Any:
        return FAST.convert_ids_to_tokens(token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return FAST.convert_tokens_to_ids(tokens)


@pytest.mark.parametrize("form", ["tokens", "template"])
def test_minimal_tokenizer_equals_the_whole_one(form: str) -> None:
    method, results = ValueZeroingRollout(MODEL), []
    for tokenizer in (Minimal(), FAST):
        inp = TEMPLATE if form == "template" else TextTokenInput(TEXT, tokenizer)
        results.append(LLMTokenMaps(method, tokenizer).attribute(inp, target=TARGET))
        assert gated_input(inp, tokenizer).to_model_input(torch.ones(1, inp.n_itp_features))["gates"].shape == (1, 4)
    found, expected = results
    torch.testing.assert_close(found.token_attr, expected.token_attr)
    assert found.output_tokens == expected.output_tokens


def test_text_of_lesser_tokenizers() -> None:
    found, expected = (
        attribute_generation((MODEL, one), TEXT, ValueZeroing, generated=" " + TARGET) for one in (Minimal(), FAST)
    )
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.prompt.labels == expected.prompt.labels
    torch.testing.assert_close(found.grouped("words").scores, expected.grouped("words").scores)
    with pytest.raises(ArgumentError, match="no chat template"):
        attribute_generation((MODEL, Minimal()), [{"role": "user", "content": TEXT}], ValueZeroing)
    inp = TextTokenInput(TEXT, FAST)
    found, expected = (
        LLMTokenMaps(ValueZeroingRollout(MODEL), one).attribute(inp, target=TARGET, skip_tokens=["upset"])
        for one in (Least(), FAST)
    )
    torch.testing.assert_close(found.token_attr, expected.token_attr)
    assert len(found.token_attr) == 1
    with pytest.raises(ArgumentError, match="2 tokens of Least"):
        LLMTokenMaps(ValueZeroingRollout(MODEL), Least()).attribute(inp, target=TARGET, skip_tokens=[TARGET])


def test_ids_without_a_tokenizer() -> None:
    ids, new = FAST.encode(TEXT, add_special_tokens=False), [41, 12]
    found = attribute_generation((MODEL, None), ids, ValueZeroing, generated=new)
    expected = attribute_generation((MODEL, FAST), ids, ValueZeroing, generated=new)
    torch.testing.assert_close(found.scores, expected.scores)
    assert list(found.prompt.labels) == [str(index) for index in ids] and found.text == "41 12"
    assert found.plot() and found.view().html()
    maps = LLMTokenMaps(ValueZeroing(MODEL, find_layers(MODEL)), None)
    assert maps.attribute(TextTokenInput(TEXT, Minimal()), target=torch.tensor(new)).token_attr.shape == (2, len(ids))
    generated = attribute_generation((MODEL, None), ids, ValueZeroing, max_new_tokens=2)
    assert len(generated.generated.ids) == 2
    with pytest.raises(ArgumentError, match="is None, but 'the"):
        attribute_generation((MODEL, None), TEXT, ValueZeroing)


def test_template_of_a_tokenizer_of_bytes_and_tokens_that_do_not_spell() -> None:
    """ByT5's tokenizer is written in Python. Each value has the bytes that spell it, "日" three of them."""
    tokenizer = ByT5Tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    template = TextTemplateInput("a {} is {}", ["日b", "cd"])
    found = LLMTokenMaps(ValueZeroing(model, find_layers(model)), tokenizer).attribute(template, target="xy")
    ids = tokenizer("a 日b is cd")["input_ids"]
    groups = [0, 1, *[2] * 4, *range(3, 7), *[7] * 2, 8]
    assert len(groups) == len(ids)
    new = tokenizer("xy", add_special_tokens=False)["input_ids"]
    joint = attribute_generation((model, tokenizer), ids, ValueZeroing, generated=new).grouped(groups)
    torch.testing.assert_close(found.token_attr, joint.scores[:, [2, 7], -1])

    class Other(Minimal):
        def decode(self, token_ids: Tensor) -> str:
            return "?".join(str(index) for index in token_ids.tolist())

    with pytest.raises(ArgumentError, match="Pass a fast"):
        LLMTokenMaps(ValueZeroingRollout(MODEL), Other()).attribute(TEMPLATE, target=TARGET)
    with pytest.raises(ArgumentError, match="of type dict"):
        attribute_generation((MODEL, {}), TEXT, ValueZeroing)


# Contexts


BEFORE, SHORT = "the pictures of ", "some hat"


def test_divergence_equals_growing_texts() -> None:
    model, words = load_model("causal")
    found = context_reliance((model, words), BEFORE, SHORT, max_new_tokens=4)
    prompts = [words(one)["input_ids"] for one in (BEFORE + SHORT, SHORT)]
    written = model.generate(torch.tensor([prompts[0]]), max_new_tokens=4)[0, len(prompts[0]) :].tolist()
    for step, number in enumerate(written):
        logs = [model(torch.tensor([ids + written[:step]])).logits[0, -1].double().log_softmax(-1) for ids in prompts]
        probability = torch.tensor([one[number].exp() for one in logs], dtype=torch.float64)
        torch.testing.assert_close(found.probability[step], probability, rtol=1e-4, atol=1e-6)
        entropy = torch.stack([-(one.exp() * one).sum() for one in logs])
        torch.testing.assert_close(found.entropy[step], entropy, rtol=1e-4, atol=1e-6)
        moved = (logs[0].exp() * (logs[0] - logs[1])).sum()
        torch.testing.assert_close(found.divergence[step], moved, rtol=1e-4, atol=1e-6)
        assert found.instead[step] == words.decode([int(logs[1].argmax())])
    least = found.divergence.mean() + found.divergence.std(correction=0)
    assert found.sensitive == tuple(step for step in range(4) if found.divergence[step] >= least) != ()


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("method", ["attn-lrp", "value-zeroing-effect"])
def test_cues_are_of_the_context(name: str, method: str) -> None:
    """The scores explain the written token rather than the one without the context, whose tokens they leave out."""
    model, words = case_of(name, torch.float32).model, tokenizer_of_words()
    found = context_reliance(model, "a woman ", "anna likes", method, 4, tokenizer=words, deviations=0.0)
    ids = words("a woman anna likes")["input_ids"]
    step, places = found.sensitive[0], found.cues[0]
    instead = words.convert_tokens_to_ids(found.instead[step])
    new = words.convert_tokens_to_ids(list(found.tokens))
    foils = [instead if place == step and instead != new[step] else None for place in range(len(new))]
    expected: Any = attribute_generation((model, words), ids, method, generated=new, foil=foils)
    row = expected.all_scores[step, ids.index(words("a")["input_ids"][0]) :, -1][: len(found.context)]
    torch.testing.assert_close(found.scores[0], row)
    assert list(places) == [place for place, one in enumerate(row) if one >= row.mean() and one > 0]
    assert len(found.context) == 2
    assert str(found).startswith(f"{step} {found.tokens[step]}: ")
    assert found.to_pandas()["token"].tolist() == list(found.tokens)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((one, "adds no tokens") for one in (("", SHORT), (" ", SHORT), (BEFORE, ""))),
        ((5, SHORT), "context is of type"),
        ((BEFORE, None), "of type NoneType"),
        ((BEFORE, SHORT, "value-zeroing"), "explains no output"),
    ],
)
def test_wrong_arguments(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        context_reliance("causal", *given)
    # The texts would be compared without the image.
    with pytest.raises(ArgumentError, match="compares two texts"):
        context_reliance("causal", BEFORE, SHORT, pixel_values=torch.zeros(1, 3, 8, 8))
