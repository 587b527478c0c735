"""Tokenizers that are less than those of transformers: encode and decode only, without offsets, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import TextTemplateInput, TextTokenInput
from torch import Tensor
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.generation import LLMTokenMaps, attribute_generation, gated_input
from tests.generation.models import case_of, tokenizer_of_words

MODEL = case_of("gpt2").model
FAST = tokenizer_of_words()
TEXT, TARGET = "the woman likes anna", "has upset"
TEMPLATE = TextTemplateInput("the {} likes {}", ["woman", "anna"])


class Minimal:
    """Captum's `TokenizerLike`, over the words of another tokenizer."""

    def encode(self, text: str, add_special_tokens: Any = None, return_tensors: Any = None) -> Any:
        ids = FAST.encode(text, add_special_tokens=False)
        return torch.tensor([ids]) if return_tensors else ids

    def decode(self, token_ids: Tensor) -> str:
        return " ".join(FAST.convert_ids_to_tokens(index) for index in token_ids.tolist())

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


def test_text_of_a_minimal_tokenizer() -> None:
    found, expected = (
        attribute_generation((MODEL, one), TEXT, ValueZeroing, generated=" " + TARGET) for one in (Minimal(), FAST)
    )
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.prompt.labels == expected.prompt.labels
    torch.testing.assert_close(found.grouped("words").scores, expected.grouped("words").scores)
    with pytest.raises(ArgumentError, match="no chat template"):
        attribute_generation((MODEL, Minimal()), [{"role": "user", "content": TEXT}], ValueZeroing)


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
    with pytest.raises(ArgumentError, match="tokenizer is None, but 'the woman likes anna' is a text"):
        attribute_generation((MODEL, None), TEXT, ValueZeroing)


def test_template_of_a_tokenizer_of_bytes() -> None:
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


def test_tokens_that_do_not_spell_the_text() -> None:
    class Other(Minimal):
        def decode(self, token_ids: Tensor) -> str:
            return "?".join(str(index) for index in token_ids.tolist())

    with pytest.raises(ArgumentError, match=r"Other has no offsets of its tokens, and they spell .* Pass a fast"):
        LLMTokenMaps(ValueZeroingRollout(MODEL), Other()).attribute(TEMPLATE, target=TARGET)
    with pytest.raises(ArgumentError, match="tokenizer is of type dict"):
        attribute_generation((MODEL, {}), TEXT, ValueZeroing)


class Least:
    """`encode` of a text and `decode` of ids, and no more."""

    def encode(self, text: str) -> list[int]:
        return FAST.encode(text, add_special_tokens=False)

    def decode(self, ids: Tensor) -> str:
        return " ".join(FAST.convert_ids_to_tokens(index) for index in ids.tolist())


def test_least_tokenizer_and_skipped_tokens() -> None:
    inp = TextTokenInput(TEXT, FAST)
    found, expected = (
        LLMTokenMaps(ValueZeroingRollout(MODEL), one).attribute(inp, target=TARGET, skip_tokens=["upset"])
        for one in (Least(), FAST)
    )
    torch.testing.assert_close(found.token_attr, expected.token_attr)
    assert len(found.token_attr) == 1
    with pytest.raises(ArgumentError, match="'has upset' is 2 tokens of Least: pass token ids"):
        LLMTokenMaps(ValueZeroingRollout(MODEL), Least()).attribute(inp, target=TARGET, skip_tokens=[TARGET])
