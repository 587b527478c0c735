"""One pass over the finished text equals one pass for each step."""

from functools import partial
from typing import Any

import pytest
import torch
from captum.attr import FeatureAblation, InputXGradient, Saliency
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM

import captum_vz as vz
from captum_vz._engine import AttentionSite
from captum_vz.attr import Wanted
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.methods.kinds import GateMethod
from tests.generation import models

# Models with rotary positions compute the angles in float32, of one token and of many tokens by different code.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def rows(found: GenerationAttribution) -> Tensor:
    return torch.cat([found.scores, found.prefix], dim=1)


@pytest.mark.parametrize("name", [*models.CAUSAL, *models.ENCODER_DECODER])
def test_maps_equal_growing_texts(name: str) -> None:
    found = models.found_by(vz.ValueZeroing, name)
    start = len(found.prompt.ids) - len(models.PROMPT)
    assert start == (name in models.ENCODER_DECODER)
    assert found.scores.shape == (4, 5 + start, 3)
    assert found.prefix.shape == (4, 4, 3)
    for step, expected in enumerate(models.naive_rows(name, models.PROMPT, models.NEW)):
        torch.testing.assert_close(found.scores[step, :5], expected[:5], **CLOSE)
        torch.testing.assert_close(found.prefix[step, : len(expected) - 5], expected[5:], **CLOSE)
        assert not found.prefix[step, step:].any()


LENGTHS = {"dynamic": {}, "longrope": {"short_factor": [1.0, 1.0], "long_factor": [4.0, 8.0]}}


@pytest.mark.parametrize("method", [vz.ValueZeroing, vz.ValueZeroingRollout, vz.LayerAttention, vz.ALTILogit])
@pytest.mark.parametrize("kind", LENGTHS)
def test_positions_that_depend_on_the_length(kind: str, method: Any) -> None:
    """Up to seven tokens have the usual positions. The finished text has more, without its last token nine."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 7, **LENGTHS[kind]}
    config = LlamaConfig(num_hidden_layers=2, max_position_embeddings=7, rope_scaling=rope, **sizes)
    model, new = LlamaForCausalLM(config).eval(), [*models.NEW, 6]
    found = rows(attribute_generation((model, None), models.PROMPT, method, generated=new))[..., -1]
    of = method(model, vz.find_layers(model))
    for step, token in enumerate(new):
        ids = torch.tensor([models.PROMPT + new[:step]])
        if method is vz.ALTILogit:
            expected = of.attribute(ids, target=(ids.shape[1] - 1, token))[0]
        else:
            expected = of.attribute(ids, token=-1)
            expected = (expected[-1] if isinstance(expected, list) else expected)[0]
        torch.testing.assert_close(found[step, : len(expected)], expected, rtol=1e-4, atol=1e-5)
        assert not found[step, len(expected) :].any()


METHODS: dict[str, Any] = {
    "attention": vz.LayerAttention,
    "attention-rollout": vz.AttentionRollout,
    "attention-norm": vz.LayerAttentionNorm,
    "norm-rollout": lambda model, layers: vz.Rollout(vz.LayerAttentionNorm(model, layers), residual=0.5),
    "per-receptive-field": partial(vz.AttentionRollout, per_receptive_field=True),
    "attention-flow": vz.AttentionFlow,
    "alti": vz.ALTI,
    "alti-layer": vz.LayerALTI,
    "alti-logit": vz.ALTILogit,
    "hidden": vz.HiddenTokenAttribution,
    "effect": vz.ValueZeroingEffect,
    "attention-gradient": vz.LayerAttentionGradient,
    "saliency": Saliency,
    "input-x-gradient": partial(vz.TokenAttribution, method=InputXGradient, reduce="l2"),
    "position": vz.PositionAttribution,
}


@pytest.mark.parametrize("method", METHODS)
def test_any_method_equals_growing_texts(method: str) -> None:
    whole = rows(models.found_by(METHODS[method], "llama"))
    for step in range(1, len(models.NEW) + 1):
        until = models.found_by(METHODS[method], "llama", new=models.NEW[:step])
        torch.testing.assert_close(rows(until)[-1, : 4 + step], whole[step - 1, : 4 + step], **CLOSE)


@pytest.mark.parametrize("name", ["gpt2", next(iter(models.ENCODER_DECODER))])
def test_gates(name: str) -> None:
    """Ablation of gates is the effect, also of joint words. Shapley values sum to what all values change."""
    found, effect = (
        models.found_by(GateMethod("gates", FeatureAblation), name),
        models.found_by(vz.ValueZeroingEffect, name),
    )
    torch.testing.assert_close(rows(found), rows(effect), **CLOSE)
    groups = [(0, 2), (2, 3)]
    torch.testing.assert_close(found.grouped(groups).scores, effect.grouped(groups).scores, **CLOSE)
    model, cross = models.case_of(name).model, name in models.ENCODER_DECODER
    gated = vz.ValueGates(
        model, vz.find_layers(model, "decoder" if cross else None), attention="cross" if cross else "self"
    )
    for method, options in (("value-zeroing-shapley", {"n_samples": 2}), ("value-zeroing-integrated", {})):
        whole = attribute_generation(
            (model, models.tokenizer_of_words()), models.PROMPT, method, generated=models.NEW, method_options=options
        )
        assert whole.layers == ("output",)
        for step, token in enumerate(models.NEW):
            inputs = models.inputs_of(name, models.PROMPT, models.NEW[:step])
            gates = torch.ones(inputs["input_ids"].shape)
            change = gated(gates, inputs)[0, -1, token] - gated(0 * gates, inputs)[0, -1, token]
            torch.testing.assert_close(rows(whole)[step, :, 0].sum().to(change), change, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", models.ENCODER_DECODER)
def test_alti_plus_has_source_and_prefix(name: str) -> None:
    found = models.found_by(vz.ALTIPlus, name)
    model = models.case_of(name).model
    layers = [*vz.find_layers(model, "encoder"), *vz.find_layers(model, "decoder")]
    torch.testing.assert_close(rows(found).sum(1), torch.ones_like(found.prompt_share))
    for step in range(len(models.NEW)):
        expected = vz.ALTIPlus(model, layers).attribute(
            models.inputs_of(name, models.PROMPT, models.NEW[:step]), token=-1
        )[0]
        torch.testing.assert_close(rows(found)[step, : 6 + step, -1], expected, **CLOSE)


WITHOUT_PROMPT: dict[str, Any] = {
    "self": lambda model, decoder: vz.ValueZeroing(model, decoder),
    "self, by a function": lambda model, decoder: lambda model, layers: vz.ValueZeroing(model, layers),
    "self, gradient": lambda model, decoder: partial(vz.LayerAttentionGradient, attention="self"),
    "self, by its modules": lambda model, decoder: vz.LayerAttention(
        model, decoder, attention=self_attentions(decoder)
    ),
    "effect": lambda model, decoder: vz.ValueZeroingEffect(model, decoder),
    "hidden": lambda model, decoder: vz.HiddenTokenAttribution(model, decoder),
    "rollout": lambda model, decoder: vz.ValueZeroingRollout(model, decoder),
    "rollout of the encoder": lambda model, decoder: vz.AttentionRollout(model, vz.find_layers(model, "encoder")),
    "flow": lambda model, decoder: vz.AttentionFlow(model, decoder),
    "random": lambda model, decoder: vz.RandomAttribution,
}


def self_attentions(decoder: Any) -> list[Any]:
    return [layer.layer[0].SelfAttention if hasattr(layer, "layer") else layer.self_attn for layer in decoder]


@pytest.mark.parametrize("form", WITHOUT_PROMPT)
@pytest.mark.parametrize("name", models.ENCODER_DECODER)
def test_sources_outside_the_prompt_are_refused(name: str, form: str) -> None:
    model = models.case_of(name).model
    method = WITHOUT_PROMPT[form](model, vz.find_layers(model, "decoder"))
    with pytest.raises(vz.ArgumentError, match=r"an enc|of the dec"):
        models.found_by(method, name, new=[*models.NEW, 30])  # then the decoder is as long as the prompt


def test_what_is_computed() -> None:
    computed = []

    class Counted(vz.ValueZeroing):
        def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
            assert wanted.rows is not None
            computed.append((wanted.rows.tolist(), site.shape.out))
            return super().layer_scores(site, wanted)

    models.found_by(Counted, "gpt2")
    # m + n - 1 = 8 tokens run once. The rows are those of the positions m - 1 to m + n - 2.
    assert computed == [([[4, 5, 6, 7]], 8)] * 3
    case = models.case_of("llama")
    lengths = []
    with case.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    ):
        models.found_by(vz.ValueZeroingRollout, "llama")
    assert lengths == [len(models.PROMPT) + len(models.NEW) - 1]


@pytest.mark.parametrize(
    ("method", "name", "message"),
    [
        (3, "gpt2", "is of type int"),
        ("value-zeroin", "gpt2", "did you mean value"),
        (lambda model, layers: layers, "gpt2", "returned a list"),
        (vz.ValueZeroingRollout, "t5", "pass ALTIPlus"),
        (vz.GlobEnc, "gpt2", "pre-norm"),
        (partial(vz.ValueZeroing, reduce_heads=None), "gpt2", "reduce_heads of"),
    ],
)
def test_wrong_method_is_refused(method: Any, name: str, message: str) -> None:
    with pytest.raises(vz.RefusedError, match=message):
        models.found_by(method, name)


def test_default_and_models_that_are_not_causal() -> None:
    found = attribute_generation(
        (models.case_of("gpt2").model, models.tokenizer_of_words()), models.PROMPT, generated=models.NEW
    )
    assert torch.equal(found.scores, models.found_by(partial(vz.ValueZeroingRollout, residual=0.5), "gpt2").scores)
    last = attribute_generation(
        (models.case_of("gpt2").model, None), models.PROMPT, "value-zeroing", generated=models.NEW, layer=-1
    )
    assert last.layers == ("layer 2",)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertLMHeadModel(BertConfig(vocab_size=60, **size)).eval()
    with pytest.raises(vz.UnsupportedLayerError, match="is not causal"):
        attribute_generation((model, models.tokenizer_of_words()), models.PROMPT, vz.ValueZeroing, generated=models.NEW)
