"""A text longer than the model is refused with both lengths, whatever the model itself raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from captum.attr import Saliency
from torch import Tensor, nn

from captum_vz import LayerAttention, TokenAttribution, ValueZeroing, ValueZeroingEffect, find_layers, verify
from captum_vz.errors import ArgumentError
from tests.reference.case import built
from tests.reference.families import ENCODER_SIZE, SEQ2SEQ_SIZE

POSITIONS = 10
SHORT = {"max_position_embeddings": POSITIONS}
BERT = {**ENCODER_SIZE, **SHORT}
# The model, its config, and how many tokens it takes.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "bert": ("BertModel", BERT, POSITIONS),
    "gpt2": ("GPT2Model", BERT, POSITIONS),
    "mpt": ("MptModel", {"vocab_size": 30, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 10}, 10),
    "bart": ("BartModel", {**SEQ2SEQ_SIZE, **SHORT}, POSITIONS),
}


def model_of(name: str) -> tuple[Any, int]:
    kind, config, allowed = MODELS[name]
    return built(kind, dtype=torch.float32, **config), allowed


def ids(count: int) -> Tensor:
    return torch.randint(4, 30, (2, count), generator=torch.Generator().manual_seed(1))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return find_layers(model, "encoder" if isinstance(model, transformers.BartModel) else None)


@pytest.mark.parametrize("by_name", [False, True], ids=["tensor", "mapping"])
@pytest.mark.parametrize("name", MODELS)
def test_both_lengths_are_named(name: str, by_name: bool) -> None:
    model, allowed = model_of(name)
    method = ValueZeroing(model, layers_of(model)[0])

    def inputs(count: int) -> Any:
        return {"input_ids": ids(count), "attention_mask": torch.ones(2, count).long()} if by_name else ids(count)

    assert method.attribute(inputs(allowed)).shape == (2, allowed, allowed)
    for count in (allowed + 1, 3 * POSITIONS):
        with pytest.raises(ArgumentError, match=rf"{count} tokens, but") as error:
            method.attribute(inputs(count))
        assert isinstance(error.value.__cause__, (RuntimeError, IndexError, ValueError))


def test_all_entry_points() -> None:
    sound = {"num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": POSITIONS}
    whisper = transformers.WhisperModel(transformers.WhisperConfig(**{**SEQ2SEQ_SIZE, **sound})).eval()
    spoken = {"input_features": torch.randn(2, 4, 12), "decoder_input_ids": ids(25)}
    model, _ = model_of("bert")
    layers, message = find_layers(model), "25 tokens, but .* 10 positions"
    calls = {
        "effect": lambda: ValueZeroingEffect(model, layers).attribute(ids(25), target=(0, 1)),
        "captum": lambda: TokenAttribution(model, Saliency, None).attribute(ids(25), target=(0, 1), baselines="zero"),
        "verify": lambda: verify(model, ids(25)),
        "decoder": lambda: ValueZeroing(whisper, find_layers(whisper, "decoder")[0]).attribute(spoken),
        "function": lambda: LayerAttention(lambda x: model(x)[0], layers).attribute(ids(25)),
        "embeddings": lambda: LayerAttention(model, layers).attribute({"inputs_embeds": torch.randn(2, 25, 32)}),
    }
    for call in calls.values():
        with pytest.raises(ArgumentError, match=message):
            call()


def test_other_errors_are_not_blamed_on_the_length() -> None:
    model, _ = model_of("gpt2")
    layer = find_layers(model)[0]
    with pytest.raises(ArgumentError, match="ids from 55 to 63"):
        ValueZeroing(model, layer).attribute(torch.arange(55, 64)[None])

    def fails(x: Tensor) -> Any:
        model(x)
        raise ValueError("no 30 of 10")

    with pytest.raises(ValueError, match="no 30 of 10"):
        ValueZeroing(fails, layer).attribute(ids(8))


def test_choices_that_are_too_long() -> None:
    model = transformers.BertForMultipleChoice(transformers.BertConfig(**BERT)).eval()
    method = ValueZeroing(model, find_layers(model)[0])
    assert method.attribute(ids(POSITIONS)[None]).shape == (2, POSITIONS, POSITIONS)
    with pytest.raises(ArgumentError, match="25 tokens, but"):
        method.attribute(ids(25)[None])
    with pytest.raises(ValueError, match="input batch_size"):
        ValueZeroing(lambda x: model(x, labels=torch.zeros(2).long()), find_layers(model)[0]).attribute(ids(8)[None])


def test_sound_and_errors_of_a_function_have_no_wrong_axes() -> None:
    config = {"conv_dim": (8,), "conv_kernel": (10,), "conv_stride": (5,), "num_conv_pos_embeddings": 8}
    config |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config |= {"num_conv_pos_embedding_groups": 2}
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**config)).eval()
    layer = find_layers(model)[0]
    assert ValueZeroing(model, layer).attribute(torch.randn(2, 40)).shape == (2, 7, 7)
    with pytest.raises(RuntimeError, match="Kernel size can't"):
        ValueZeroing(model, layer).attribute(torch.randn(2, 8))

    def fails(x: Tensor) -> Any:
        raise ValueError("no such sound")

    with pytest.raises(ValueError, match="no such sound"):
        ValueZeroing(fails, layer).attribute(torch.randn(2, 40))
