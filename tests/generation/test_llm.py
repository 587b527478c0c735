"""Captum's LLMAttribution, where a script changes one line, and the result of inseq."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from captum.attr import FeatureAblation, LLMAttribution, LLMAttributionResult, TextTemplateInput, TextTokenInput
from torch import Tensor, nn

import captum_vz as vz
from captum_vz.generation import LLMTokenMaps, attribute_generation, gated_input, to_captum_llm
from captum_vz.testbed import load_model
from tests.captum.footprint import footprint
from tests.engine.compare import assert_same
from tests.generation.models import case_of, tokenizer_of_words
from tests.view.pages import missing

TEXT = "the pictures of some hat"
MODEL, TOKENS = case_of("gpt2").model, tokenizer_of_words()


def maps(kind: Any = vz.ValueZeroing) -> LLMTokenMaps:
    return LLMTokenMaps(kind, TOKENS, model=MODEL)


def test_skipped_and_empty_tokens() -> None:
    inp = TextTokenInput(TEXT, TOKENS, skip_tokens=["the", "of"])
    result = maps().attribute(inp, target="has upset")
    whole = maps().attribute(TextTokenInput(TEXT, TOKENS), target="has upset")
    assert result.input_tokens == ["pictures", "some", "hat"]
    torch.testing.assert_close(result.token_attr, whole.token_attr[:, [1, 3, 4]])
    result = maps().attribute(TextTemplateInput("the {} {} hat", ["", "pictures"]), target="upset")
    assert result.token_attr[0, 0] == 0
    assert result.token_attr[0, 1] > 0


TEMPLATES = {
    "list": TextTemplateInput("the {} of some {} has", ["pictures", "woman 's theater"]),
    "dict": TextTemplateInput("the {b} of some {a} has", {"b": "pictures", "a": "woman 's theater"}),
    "function": TextTemplateInput(lambda b, a: f"the {b} of some {a} has", ["pictures", "woman 's theater"]),
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_values_of_a_template_are_zeroed_together(form: str) -> None:
    result = maps().attribute(TEMPLATES[form], target="upset marcus", layer=0)
    found = attribute_generation(
        (MODEL, TOKENS), "the pictures of some woman 's theater has", vz.ValueZeroing, generated="upset marcus"
    )
    joint = found.grouped([(4, 7)]).scores[..., 0]
    assert result.input_tokens == ["pictures", "woman 's theater"]
    torch.testing.assert_close(result.token_attr, joint[:, [1, 4]])
    assert (result.token_attr[:, 1] - found.scores[:, 4:7, 0].sum(1)).abs().max() > 1e-4


# Captum's own class

LAYERS = vz.find_layers(MODEL)
INPUTS = {
    "tokens": TextTokenInput(TEXT, TOKENS),
    "skipped": TextTokenInput(TEXT, TOKENS, skip_tokens=["the", "of"]),
    "template": TEMPLATES["dict"],
    "masked": TextTemplateInput("{} of {} has {}", ["pictures", "woman", "anna"], mask=[7, 3, 7]),
}
TARGET = "has upset anna"


@pytest.mark.parametrize("options", [{}, {"use_cached_outputs": False}, {"forward_in_tokens": False}], ids=str)
@pytest.mark.parametrize("attr_target", ["log_prob", "prob"])
@pytest.mark.parametrize("form", INPUTS)
def test_ablation_over_gates_is_the_effect(form: str, attr_target: str, options: dict[str, Any]) -> None:
    """The whole text has the sum of log-probabilities, or the product of probabilities."""
    before = footprint(MODEL)
    llm = LLMAttribution(FeatureAblation(vz.ValueGates(MODEL, LAYERS)), TOKENS, attr_target=attr_target)
    found = llm.attribute(gated_input(INPUTS[form], TOKENS), target=TARGET, **options)
    effect = LLMTokenMaps(vz.ValueZeroingEffect(MODEL, LAYERS), TOKENS, attr_target=attr_target)
    expected = effect.attribute(INPUTS[form], target=TARGET)
    assert expected.token_attr.abs().max() > 1e-4
    torch.testing.assert_close(found.token_attr.double(), expected.token_attr.double(), rtol=0, atol=1e-5)
    if attr_target == "log_prob":
        torch.testing.assert_close(found.seq_attr.double(), expected.seq_attr.double(), rtol=0, atol=3e-5)
    assert found.input_tokens == expected.input_tokens
    assert footprint(MODEL) == before


@pytest.mark.parametrize("form", INPUTS)
@pytest.mark.parametrize("kind", [vz.ValueZeroing, vz.ValueZeroingRollout, vz.ValueZeroingEffect, vz.ALTILogit])
def test_methods_in_captums_class(kind: Any, form: str) -> None:
    """The tutorial on Llama 2 passes `skip_tokens` in each call."""
    method = kind(MODEL, LAYERS)
    found = LLMAttribution(to_captum_llm(method), TOKENS).attribute(INPUTS[form], target=TARGET, skip_tokens=[0])
    explained = "log_prob" if kind is vz.ValueZeroingEffect else None
    expected = LLMTokenMaps(method, TOKENS, explained).attribute(INPUTS[form], target=TARGET)
    torch.testing.assert_close(found.token_attr, expected.token_attr.float())
    torch.testing.assert_close(found.seq_attr, expected.seq_attr.float())
    assert type(found) is type(expected) is LLMAttributionResult
    assert (found.input_tokens, len(found.output_tokens)) == (expected.input_tokens, len(expected.output_tokens))
    assert expected.inp is INPUTS[form]
    assert method.forward_func is MODEL


class PlainLLM(nn.Module):
    """The model of Captum's own tests: any module with `generate` and `device`, without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.device = MODEL, torch.device("cpu")

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(input_ids)

    def generate(self, input_ids: Tensor, mode: str = "", **kwargs: Any) -> Tensor:
        found: Tensor = self.inner.generate(input_ids, **kwargs)
        return found[:, : input_ids.shape[1] + 2] if mode == "short" else found


@pytest.mark.parametrize("kind", [vz.ValueZeroing, vz.ValueZeroingRollout, vz.LayerAttention])
def test_models_of_captums_tests(kind: Any) -> None:
    own, inp = kind(PlainLLM(), LAYERS), TextTokenInput(TEXT, TOKENS)
    written = LLMTokenMaps(own, TOKENS).attribute(inp, gen_args={"mode": "short"})
    assert written.token_attr.shape == (2, 5)
    found = LLMTokenMaps(own, TOKENS).attribute(inp, target="have upset").token_attr
    assert_same(found, maps(kind).attribute(inp, target="have upset").token_attr, 1e-6)
    captums = LLMAttribution(to_captum_llm(own), TOKENS).attribute(inp, target="have upset").token_attr
    assert_same(captums, found.float(), 1e-6)


ANNA: dict[str, Any] = {"target": "anna"}
EFFECT = vz.ValueZeroingEffect(MODEL, LAYERS)
TWO = {"max_new_tokens": 3, "num_beams": 2, "num_return_sequences": 2}


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: maps().attribute(INPUTS["tokens"], **ANNA, gen_args={"max_new_tokens": 3}), "Pass one"),
        (lambda: maps().attribute(INPUTS["tokens"], **ANNA, _inspect_forward=print), "Pass None"),
        (lambda: maps().attribute(INPUTS["tokens"], **ANNA, layer=3), "3 is out of range"),
        (lambda: maps().attribute(INPUTS["tokens"], **ANNA, n_samples=3), "but no input is"),
        (lambda: maps().attribute(INPUTS["tokens"], gen_args=TWO), "returned 2 texts"),
        (lambda: maps().attribute(TextTemplateInput(lambda a: a.upper(), ["anna"]), **ANNA), "changes or leaves"),
        (lambda: maps().attribute(TextTemplateInput("the hat", ["anna"]), **ANNA), "changes or leaves"),
        (lambda: LLMTokenMaps(EFFECT, TOKENS, attr_target="logit"), "'prob' or None"),
        (lambda: LLMTokenMaps(vz.ValueZeroing(MODEL, LAYERS), TOKENS, attr_target="prob"), "no probability"),
        (lambda: to_captum_llm(vz.ValueZeroing), "method is of type"),
        (lambda: gated_input(TEXT, TOKENS), "inp is of type str"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(vz.ArgumentError, match=message):
        call()


def test_foil_of_generated_tokens() -> None:
    asked, inp = {"target": TARGET, "foil": ["anna", None, 7]}, INPUTS["tokens"]
    found = LLMTokenMaps("value-zeroing-effect", TOKENS, model=MODEL).attribute(inp, **asked)
    expected = attribute_generation((MODEL, TOKENS), TEXT, "value-zeroing-effect", generated=TARGET, foil=asked["foil"])
    torch.testing.assert_close(found.token_attr, expected.scores[..., 0])
    with pytest.raises(vz.ArgumentError, match="explains no output"):
        maps().attribute(inp, **asked)


# The result of inseq


def of_inseq(name: str) -> Any:
    asked = (case_of(name).model, TOKENS), "<bos> the woman likes", vz.ValueZeroing
    return attribute_generation(*asked, generated=[41, 12, 30])


@pytest.fixture
def inseq() -> Any:
    if find_spec("inseq") is None:
        missing("inseq is not installed: pip install inseq")
    import inseq

    return inseq


def test_scores_of_an_encoder_decoder(inseq: Any) -> None:
    found = of_inseq("bart")
    (one,) = found.to_inseq()
    source = len(one.source)
    assert [token.id for token in [*one.source, *one.target]] == [*found.prompt.ids, *found.generated.ids]
    assert one.attr_pos_start == 1  # the decoder's start
    assert one.target[0].id == case_of("bart").model.config.decoder_start_token_id
    torch.testing.assert_close(one.source_attributions.T, found.scores[:, :source, -1].float())
    torch.testing.assert_close(one.target_attributions[0], found.scores[:, source, -1].float())


def test_equals_inseqs_own_attention(inseq: Any) -> None:
    model, tokenizer = load_model("causal")
    text, new = "the pictures of some hat", " have upset anna"
    found = attribute_generation((model, tokenizer), text, vz.LayerAttention, generated=new)
    model.set_attn_implementation("eager")
    wrapped = inseq.load_model(model, "attention", tokenizer=tokenizer)
    (theirs,) = wrapped.attribute(text, text + new, show_progress=False)
    for layer in range(len(found.layers)):
        (ours,) = found.to_inseq(layer)
        of_layer = theirs.target_attributions[:, :, layer].mean(-1)
        torch.testing.assert_close(ours.target_attributions, of_layer, equal_nan=True, rtol=1e-4, atol=1e-6)
    assert [token.id for token in theirs.source] == [token.id for token in ours.source]
    assert [token.id for token in theirs.target] == [token.id for token in ours.target]
    assert (theirs.attr_pos_start, theirs.attr_pos_end) == (ours.attr_pos_start, ours.attr_pos_end)


def test_without_inseq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inseq.data.attribution", None)
    monkeypatch.setitem(sys.modules, "inseq", None)
    with pytest.raises(ModuleNotFoundError, match="pip install inseq"):
        of_inseq("gpt2").to_inseq()
