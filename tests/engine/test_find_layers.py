"""find_layers: the layers of every family, and the errors for models without exactly one stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from tests.engine.blocks import Block, SelfAttention, sequences
from tests.reference import FAMILIES, SEQUENCE_TO_SEQUENCE
from tests.reference.families import ENCODER_SIZE, IMAGE_SIZE
from tests.sweep.models import small_models

ONE_STACK = [name for name in FAMILIES if name not in SEQUENCE_TO_SEQUENCE]


@pytest.mark.parametrize("name", ONE_STACK)
def test_layers_of_every_family(name: str) -> None:
    case = FAMILIES[name].case
    assert find_layers(case.model) == case.layers


@pytest.mark.parametrize("name", SEQUENCE_TO_SEQUENCE)
def test_stacks_of_encoder_and_decoder(name: str) -> None:
    case = FAMILIES[name].case
    stack = name.split("-")[1]
    assert find_layers(case.model, stack=stack) == case.layers
    assert find_layers(case.model.get_submodule(stack)) == case.layers
    with pytest.raises(AssertionError, match="stack='encoder'"):
        find_layers(case.model)


HEADED = {
    "BertForMaskedLM": "bert.encoder.layer",
    "GPT2LMHeadModel": "transformer.h",
    "AlbertForMaskedLM": "albert.encoder.albert_layer_groups.0.albert_layers",
    "ViTForImageClassification": "vit.layers",
    "OPTForCausalLM": "model.decoder.layers",
}


@pytest.mark.parametrize("name", HEADED)
def test_model_with_a_head(name: str) -> None:
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**ENCODER_SIZE | IMAGE_SIZE))
    assert find_layers(model) == list(model.get_submodule(HEADED[name]))


def test_stages_are_joined() -> None:
    size = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1, 2], "num_heads": [1, 2, 4]}
    model = transformers.SwinModel(transformers.SwinConfig(**size, window_size=2))
    layers = find_layers(model)
    assert [type(layer).__name__ for layer in layers] == ["SwinLayer"] * 5
    assert layers == [module for module in model.modules() if type(module).__name__ == "SwinLayer"]


def test_torchs_own_encoder_and_decoder() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert find_layers(encoder) == list(encoder.layers)
    both = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    assert find_layers(both, stack="encoder") == list(both.encoder.layers)
    assert find_layers(both, stack="decoder") == list(both.decoder.layers)
    with pytest.raises(AssertionError, match="several stacks"):
        find_layers(both)


@pytest.mark.parametrize("container", [lambda blocks: nn.Sequential(*blocks), nn.ModuleList])
def test_a_home_made_model(container: type[nn.Module]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.blocks = container([Block() for _ in range(3)])
            self.heads = nn.ModuleList([nn.Linear(4, 4)])

    model = Model()
    assert find_layers(model) == list(model.blocks)
    assert find_layers(model.blocks) == list(model.blocks)


def test_two_towers() -> None:
    config = transformers.CLIPConfig(text_config=ENCODER_SIZE, vision_config=ENCODER_SIZE | IMAGE_SIZE)
    model = transformers.CLIPModel(config)
    choices = "stack='text_model' or stack='vision_model'"
    for stack in (None, "encoder"):
        with pytest.raises(AssertionError, match=f"Pass {choices}"):
            find_layers(model, stack=stack)
    for tower in (model.text_model, model.vision_model):
        assert find_layers(tower) == list(tower.encoder.layers)
    for name in ("vision_model", "vision", "vision_model.encoder.layers"):
        assert find_layers(model, stack=name) == list(model.vision_model.encoder.layers)
    for name in ("tower", "", "layers_", "ision_model", 1):
        with pytest.raises(AssertionError, match=f"pass {choices}"):
            find_layers(model, stack=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["EncoderDecoder", "VisionEncoderDecoder", "SpeechEncoderDecoder"])
def test_stacks_of_joined_models(kind: str) -> None:
    """The decoder is a BERT, whose own stack is called an encoder."""
    size: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8}
    first = {"EncoderDecoder": "Bert", "VisionEncoderDecoder": "ViT", "SpeechEncoderDecoder": "Wav2Vec2"}[kind]
    encoder = getattr(transformers, f"{first}Config")(num_hidden_layers=2, **size)
    decoder = transformers.BertConfig(num_hidden_layers=3, is_decoder=True, add_cross_attention=True, **size)
    config = getattr(transformers, f"{kind}Config").from_encoder_decoder_configs(encoder, decoder)
    model: Any = getattr(transformers, f"{kind}Model")(config=config)
    assert len(find_layers(model, "encoder")) == 2
    assert find_layers(model, "decoder") == list(model.decoder.bert.encoder.layer)
    with pytest.raises(ArgumentError, match="stack='encoder'"):
        find_layers(model)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_missing_stack(stack: str) -> None:
    other = "decoder" if stack == "encoder" else "encoder"
    whole = FAMILIES[f"bart-{stack}"].case.model
    with pytest.raises(AssertionError, match=f"no {other} stack"):
        find_layers(whole.get_submodule(stack), stack=other)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("bert-base-uncased", "of type str"),
        (None, "of type NoneType"),
        ([nn.Linear(2, 2)], "of type list"),
        (nn.Linear, "the class Linear"),
    ],
)
def test_model_of_wrong_type(model: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        find_layers(model)


@pytest.mark.parametrize("make", [torch.jit.script, torch.fx.symbolic_trace])
def test_traced_models_are_named(make: Any) -> None:
    with pytest.raises(UnsupportedLayerError, match=r"torch\.fx made it"):
        find_layers(make(nn.Sequential(nn.Linear(2, 2))))


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.LSTM(2, 2, 3)])
def test_a_model_without_attention(model: nn.Module) -> None:
    with pytest.raises(AssertionError, match="has no stack"):
        find_layers(model)


@pytest.mark.parametrize("model_type", ["glm5_next_text", "kimi_linear", "qwen4_exp_text"])
def test_layers_named_after_attention(model_type: str) -> None:
    """In these models a linear mixer, and the module that mixes streams, are named after attention."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    model = next(small_models(model_type))
    attending = [
        layer
        for layer in model.layers
        if any(type(part).__name__.endswith(("TextAttention", "KimiLinearAttention")) for part in layer.children())
    ]
    assert 0 < len(attending) < len(model.layers)
    assert find_layers(model) == attending


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("bert", "attention"),
        ("bert", "attention.self"),
        ("bart-decoder", "encoder_attn"),
        ("t5-decoder", "layer.0.SelfAttention"),
    ],
)
def test_attention_module_is_no_layer(family: str, part: str) -> None:
    case = FAMILIES[family].case
    layer = case.layers[1].get_submodule(part)
    message = f"attention module of a {type(case.layers[1]).__name__}"
    for forward in (case.model, lambda **inputs: case.model(**inputs)):
        for method in (ValueZeroing, ValueZeroingRollout):
            with pytest.raises(UnsupportedLayerError, match=message):
                method(forward, layer).attribute(case.inputs)


def test_attention_module_of_a_block_that_is_refused() -> None:
    """Such blocks call attention three times, as SAM's decoder layers do."""
    three = Block(after=nn.Sequential(SelfAttention(), SelfAttention()).double())
    model, x = nn.Sequential(Block(), three, Block()), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="attention 3 times") as raised:
        ValueZeroing(model, three).attribute(x)
    assert "where name is 'attention', 'after.0' or" in str(raised.value)
    assert "not a stack" not in str(raised.value)
    for attention in (model[0].attention, three.attention):
        with pytest.raises(UnsupportedLayerError, match="module of a Block"):
            ValueZeroing(model, attention).attribute(x)
