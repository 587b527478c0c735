"""The form of Captum's LLMAttribution: a script changes one line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from captum.attr import (
    FeatureAblation,
    LLMAttribution,
    LLMAttributionResult,
    TextTemplateInput,
    TextTokenInput,
)

from captum_vz import ArgumentError, ValueZeroing, ValueZeroingRollout, find_layers
from captum_vz.generation import LLMTokenMaps, attribute_generation
from tests.generation.models import case_of, tokenizer_of_words

TEXT = "the pictures of some hat"
MODEL, TOKENS = case_of("gpt2").model, tokenizer_of_words()


def maps(kind: Any = ValueZeroing, name: str = "gpt2") -> LLMTokenMaps:
    model = case_of(name).model
    layers = find_layers(model) if name == "gpt2" else find_layers(model, "decoder")
    options = {} if name == "gpt2" else {"attention": "cross"}
    return LLMTokenMaps(kind(model, layers, **options), TOKENS)


def test_one_line_differs_from_captums_script() -> None:
    results = []
    for make in (lambda: LLMAttribution(FeatureAblation(MODEL), TOKENS), maps):
        method = make()
        inp = TextTokenInput(TEXT, TOKENS)
        results.append(method.attribute(inp, target="has upset anna", num_trials=1, use_cached_outputs=False))
        results.append(method.attribute(inp, gen_args={"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}))
    for captums, ours in zip(results[:2], results[2:], strict=True):
        assert type(ours) is type(captums) is LLMAttributionResult
        assert ours.token_attr.shape == captums.token_attr.shape
        assert ours.seq_attr.shape == captums.seq_attr.shape
        assert ours.input_tokens == captums.input_tokens
        assert len(ours.output_tokens) == len(captums.output_tokens)
        assert ours.inp is captums.inp or ours.inp.values == captums.inp.values


def test_arguments_have_captums_names() -> None:
    captums = list(inspect.signature(LLMAttribution.attribute).parameters)
    assert list(inspect.signature(LLMTokenMaps.attribute).parameters)[: len(captums) - 1] == captums[:-1]
    assert list(inspect.signature(LLMTokenMaps.__init__).parameters)[:3] == ["self", "attr_method", "tokenizer"]


@pytest.mark.parametrize("layer", [-1, 0])
def test_scores_are_those_of_the_function(layer: int) -> None:
    target = torch.tensor([17, 18])
    result = maps(ValueZeroingRollout).attribute(TextTokenInput(TEXT, TOKENS), target=target, layer=layer)
    found = attribute_generation((MODEL, TOKENS), TEXT, ValueZeroingRollout, generated=[17, 18])
    torch.testing.assert_close(result.token_attr, found.scores[..., layer])
    torch.testing.assert_close(result.seq_attr, found.scores[..., layer].sum(0))


def test_skipped_tokens_have_no_column() -> None:
    inp = TextTokenInput(TEXT, TOKENS, skip_tokens=["the", "of"])
    result = maps().attribute(inp, target="has upset")
    whole = maps().attribute(TextTokenInput(TEXT, TOKENS), target="has upset")
    assert result.input_tokens == ["pictures", "some", "hat"]
    torch.testing.assert_close(result.token_attr, whole.token_attr[:, [1, 3, 4]])


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_columns_of_an_encoder(name: str) -> None:
    result = maps(ValueZeroing, name).attribute(TextTokenInput(TEXT, TOKENS), target="has upset")
    assert result.token_attr.shape == (2, 5)
    torch.testing.assert_close(result.token_attr.sum(1), torch.ones(2, dtype=torch.float64))


TEMPLATES = {
    "list": TextTemplateInput("the {} of some {} has", ["pictures", "woman 's theater"]),
    "dict": TextTemplateInput("the {b} of some {a} has", {"b": "pictures", "a": "woman 's theater"}),
    "function": TextTemplateInput(lambda b, a: f"the {b} of some {a} has", ["pictures", "woman 's theater"]),
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_values_of_a_template_are_zeroed_together(form: str) -> None:
    result = maps().attribute(TEMPLATES[form], target="upset marcus")
    found = attribute_generation(
        (MODEL, TOKENS), "the pictures of some woman 's theater has", ValueZeroing, generated="upset marcus"
    )
    joint = found.grouped([(4, 7)]).scores[..., -1]
    assert result.input_tokens == ["pictures", "woman 's theater"]
    torch.testing.assert_close(result.token_attr, joint[:, [1, 4]])
    assert (result.token_attr[:, 1] - found.scores[:, 4:7, -1].sum(1)).abs().max() > 1e-4


def test_masked_values_are_one_feature() -> None:
    inp = TextTemplateInput("{} of {} has {}", ["pictures", "woman", "anna"], mask=[7, 3, 7])
    result = maps().attribute(inp, target="upset marcus")
    assert result.token_attr.shape == (2, 3)
    assert torch.equal(result.token_attr[:, 0], result.token_attr[:, 2])
    found = attribute_generation((MODEL, TOKENS), "pictures of woman has anna", ValueZeroing, generated="upset marcus")
    joint = found.grouped([0, 1, 2, 3, 0]).scores[..., -1]
    torch.testing.assert_close(result.token_attr[:, :2], joint[:, [0, 2]])


def test_empty_value_has_no_score() -> None:
    result = maps().attribute(TextTemplateInput("the {} {} hat", ["", "pictures"]), target="upset")
    assert result.token_attr[0, 0] == 0
    assert result.token_attr[0, 1] > 0


@pytest.mark.parametrize(
    ("inp", "options", "message"),
    [
        (TextTokenInput(TEXT, TOKENS), {"target": "anna", "gen_args": {"max_new_tokens": 3}}, "Pass one"),
        (TextTokenInput(TEXT, TOKENS), {"target": "anna", "_inspect_forward": print}, "Pass None"),
        (TextTokenInput(TEXT, TOKENS), {"target": "anna", "layer": 3}, "layer 3 is out of range"),
        (
            TextTokenInput(TEXT, TOKENS),
            {"gen_args": {"max_new_tokens": 3, "num_beams": 2, "num_return_sequences": 2}},
            "returned 2 texts",
        ),
        (TEXT, {"target": "anna"}, "inp is of type str"),
        (TextTemplateInput(lambda a: a.upper(), ["anna"]), {"target": "anna"}, "changes or leaves out"),
        (TextTemplateInput("the hat", ["anna"]), {"target": "anna"}, "changes or leaves out"),
    ],
)
def test_wrong_input_is_refused(inp: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        maps().attribute(inp, **options)


@pytest.mark.parametrize("given", ["value-zeroing-rollout-paper", ValueZeroingRollout])
def test_names_and_classes_with_a_model(given: Any) -> None:
    inp = TextTokenInput(TEXT, TOKENS)
    expected = LLMTokenMaps(ValueZeroingRollout(MODEL), TOKENS).attribute(inp, target=torch.tensor([17, 18]))
    found = LLMTokenMaps(given, TOKENS, model=MODEL).attribute(inp, target=torch.tensor([17, 18]))
    assert torch.equal(found.token_attr, expected.token_attr)
    with pytest.raises(ArgumentError, match="did you mean value-zeroing"):
        LLMTokenMaps("value-zeroin", TOKENS, model=MODEL).attribute(inp, target=torch.tensor([17, 18]))
