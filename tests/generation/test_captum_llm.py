"""Captum's own LLMAttribution: over gates of values, and over a method of this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import (
    FeatureAblation,
    LLMAttribution,
    TextTemplateInput,
    TextTokenInput,
)

from captum_vz import ALTILogit, ValueGates, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.generation import LLMTokenMaps, gated_input, to_captum_llm
from tests.captum.footprint import footprint
from tests.generation.models import case_of, tokenizer_of_words
from tests.generation.test_llm import TEMPLATES, TEXT

MODEL, TOKENS = case_of("gpt2").model, tokenizer_of_words()
LAYERS = find_layers(MODEL)
INPUTS = {
    "tokens": TextTokenInput(TEXT, TOKENS),
    "skipped": TextTokenInput(TEXT, TOKENS, skip_tokens=["the", "of"]),
    "template": TEMPLATES["dict"],
    "masked": TextTemplateInput("{} of {} has {}", ["pictures", "woman", "anna"], mask=[7, 3, 7]),
}
TARGET = "has upset anna"


@pytest.mark.parametrize("options", [{}, {"use_cached_outputs": False}, {"forward_in_tokens": False}], ids=str)
@pytest.mark.parametrize("form", INPUTS)
def test_ablation_over_gates_is_the_effect(form: str, options: dict[str, Any]) -> None:
    """Captum explains log-probabilities. Its whole text has the sum of them."""
    before = footprint(MODEL)
    llm = LLMAttribution(FeatureAblation(ValueGates(MODEL, LAYERS)), TOKENS)
    found = llm.attribute(gated_input(INPUTS[form], TOKENS), target=TARGET, **options)
    effect = LLMTokenMaps(ValueZeroingEffect(MODEL, LAYERS), TOKENS, attr_target="log_prob")
    expected = effect.attribute(INPUTS[form], target=TARGET)
    assert expected.token_attr.abs().max() > 1e-2
    torch.testing.assert_close(found.token_attr.double(), expected.token_attr.double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.seq_attr.double(), expected.seq_attr.double(), rtol=0, atol=3e-5)
    assert found.input_tokens == expected.input_tokens
    assert footprint(MODEL) == before


@pytest.mark.parametrize("form", INPUTS)
@pytest.mark.parametrize("kind", [ValueZeroing, ValueZeroingRollout, ALTILogit])
def test_methods_in_captums_class(kind: Any, form: str) -> None:
    method = kind(MODEL, LAYERS)
    found = LLMAttribution(to_captum_llm(method), TOKENS).attribute(INPUTS[form], target=TARGET)
    expected = LLMTokenMaps(method, TOKENS).attribute(INPUTS[form], target=TARGET)
    torch.testing.assert_close(found.token_attr, expected.token_attr.float())
    torch.testing.assert_close(found.seq_attr, expected.seq_attr.float())
    assert found.input_tokens == expected.input_tokens


def test_skip_tokens_of_captums_scripts() -> None:
    """The tutorial on Llama 2 passes it in each call."""
    llm = LLMAttribution(to_captum_llm(ValueZeroingRollout(MODEL, LAYERS)), TOKENS)
    plain = llm.attribute(INPUTS["tokens"], target=TARGET)
    found = llm.attribute(INPUTS["tokens"], target=TARGET, skip_tokens=[0])
    torch.testing.assert_close(found.token_attr, plain.token_attr)


@pytest.mark.parametrize("attr_target", ["log_prob", "prob"])
def test_effect_in_captums_class(attr_target: str) -> None:
    method = ValueZeroingEffect(MODEL, LAYERS)
    llm = LLMAttribution(to_captum_llm(method), TOKENS, attr_target=attr_target)
    found = llm.attribute(INPUTS["tokens"], target=TARGET)
    expected = LLMTokenMaps(method, TOKENS, attr_target).attribute(INPUTS["tokens"], target=TARGET)
    torch.testing.assert_close(found.token_attr, expected.token_attr.float())
    assert method.forward_func is MODEL


def test_wrong_arguments() -> None:
    effect = ValueZeroingEffect(MODEL, LAYERS)
    with pytest.raises(ArgumentError, match="attr_target is 'logit': pass 'log_prob', 'prob' or None"):
        LLMTokenMaps(effect, TOKENS, attr_target="logit")
    with pytest.raises(ArgumentError, match="ValueZeroing explains no probability"):
        LLMTokenMaps(ValueZeroing(MODEL, LAYERS), TOKENS, attr_target="prob")
    with pytest.raises(ArgumentError, match="attr_method is of type type"):
        to_captum_llm(ValueZeroing)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="inp is of type str"):
        gated_input(TEXT, TOKENS)  # type: ignore[arg-type]
