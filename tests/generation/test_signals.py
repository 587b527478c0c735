"""Prompts with images and sound: the tensors reach `generate` and the one pass unchanged."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BertConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.generation import attribute_generation

IMAGE = 59  # the token that stands for a part of an image
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT: dict[str, Any] = {**VISION, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 60}


def llava() -> tuple[Any, dict[str, Any]]:
    seen = CLIPVisionConfig(**VISION, image_size=8, patch_size=4)
    config = LlavaConfig(vision_config=seen, text_config=LlamaConfig(**TEXT), image_token_id=IMAGE)
    ids = torch.tensor([[2, *[IMAGE] * 4, 7, 8]])
    return LlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values": torch.rand(1, 3, 8, 8)}


def qwen() -> tuple[Any, dict[str, Any]]:
    text = {**TEXT, "num_key_value_heads": 1, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    seen = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    marks = {"image_token_id": IMAGE, "vision_start_token_id": 58, "vision_end_token_id": 57, "video_token_id": 56}
    config = Qwen2VLConfig(text_config=text, vision_config=seen, **marks)
    ids = torch.tensor([[2, 58, *[IMAGE] * 4, 57, 7, 8]])
    grid, pixels = torch.tensor([[1, 4, 4]]), torch.rand(16, 3 * 2 * 4 * 4)
    given = {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    return Qwen2VLForConditionalGeneration(config), given


def whisper() -> tuple[Any, dict[str, Any]]:
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 70, "num_mel_bins": 8}
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    marks: dict[str, Any] = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    silent: dict[str, Any] = {"suppress_tokens": [], "begin_suppress_tokens": [], "max_source_positions": 10}
    model = WhisperForConditionalGeneration(
        WhisperConfig(**sizes, **layers, **marks, **silent, max_target_positions=30)
    )
    return model, {"input_features": torch.randn(1, 8, 20)}


def captions() -> tuple[Any, dict[str, Any]]:
    parts = ViTConfig(**VISION, image_size=8, patch_size=4), BertConfig(**TEXT)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts, decoder_start_token_id=1, pad_token_id=0)
    return VisionEncoderDecoderModel(config), {"pixel_values": torch.rand(1, 3, 8, 8)}


@pytest.mark.parametrize("make", [llava, qwen, whisper, captions])
def test_rows_equal_growing_texts(make: Any) -> None:
    """Each row is that of the text up to its token, with the same tensors, and the text is that of `generate`."""
    model, given = make()
    model = model.eval()
    steps, options = 3, {"suppress_tokens": [IMAGE], "eos_token_id": None}
    written = (
        model.generate(**given, max_new_tokens=steps, return_dict_in_generate=True, **options).sequences[0].tolist()
    )
    found = attribute_generation((model, None), given, ValueZeroing, steps, **options)
    assert list(found.generated.ids) == written[-steps:]
    reads_ids = "input_ids" in given
    layers = find_layers(model.get_decoder() if reads_ids else model, None if reads_ids else "decoder")
    method = ValueZeroing(model, layers, attention="self" if reads_ids else "cross")
    for step in range(steps):
        before = torch.tensor([written[: len(written) - steps + step]])
        grown = {**given, "input_ids" if reads_ids else "decoder_input_ids": before}
        if "mm_token_type_ids" in given:
            grown["mm_token_type_ids"] = (before == IMAGE).int()
        rows = torch.stack(method.attribute(grown), -1)[0, -1]
        torch.testing.assert_close(found.all_scores[step, : len(rows)], rows, rtol=1e-4, atol=1e-5)
        assert not found.all_scores[step, len(rows) :].any() or not reads_ids
    if not reads_ids:
        first = "frame 0" if make is whisper else "[CLS]"
        assert found.prompt.labels[0] == first
        assert len(found.prompt.labels) == found.scores.shape[1]


@pytest.mark.parametrize("method", ["value-zeroing-effect", "attn-lrp", "alti-logit", "attention-rollout"])
def test_methods_of_a_prompt_with_an_image(method: str) -> None:
    """The rows of one new token do not depend on those after it."""
    model, given = llava()
    options = {"suppress_tokens": [IMAGE], "eos_token_id": None}
    one, three = (attribute_generation((model.eval(), None), given, method, n, **options) for n in (1, 3))
    torch.testing.assert_close(three.scores[:1], one.scores, rtol=1e-4, atol=1e-5)
    moved = {**given, "pixel_values": given["pixel_values"] + 1}
    assert not torch.allclose(attribute_generation((model, None), moved, method, 1, **options).scores, one.scores)


def test_placeholder_that_the_model_writes() -> None:
    """It stands for no image. The text is written again without it, and the tensors are an argument as well."""
    model, given = llava()
    model.lm_head.weight.data[IMAGE] = model.lm_head.weight.data.sum(0) * 0
    with torch.no_grad():
        model.lm_head.weight[IMAGE] = 100 * model(**given, output_hidden_states=True).hidden_states[-1][0, -1]
    pixels = given.pop("pixel_values")
    with pytest.warns(UserWarning, match="writes again, with suppress_tokens=\\[59\\]"):
        found = attribute_generation((model.eval(), None), given["input_ids"], ValueZeroing, 2, pixel_values=pixels)
    assert IMAGE not in found.generated.ids
    with pytest.raises(ArgumentError, match="takes no pixel_values: leave it out"):
        attribute_generation("causal", "the hat", ValueZeroing, 2, pixel_values=pixels)
    with pytest.raises(ArgumentError, match="prompt has pixel_values, but no input_ids"):
        attribute_generation((model, None), {"pixel_values": pixels}, ValueZeroing, 2)
    several = given["input_ids"].repeat(2, 1)
    with pytest.raises(ArgumentError, match="pixel_values need a call for each prompt, but there are 2"):
        attribute_generation((model, None), several, ValueZeroing, 2, pixel_values=pixels)


@pytest.mark.parametrize(
    ("strings", "text"), [(["not"], "were not"), ("were", "were"), (["no such", "re n"], "were not")]
)
def test_strings_that_stop(strings: Any, text: str) -> None:
    found = attribute_generation("causal", "the pictures of some hat", ValueZeroing, 4, stop_strings=strings)
    assert found.text == text


@pytest.mark.parametrize(("make", "extra"), [(llava, 0), (qwen, 0), (captions, 1)])
def test_patches_are_drawn_over_the_image(make: Any, extra: int) -> None:
    """A panel for each new token after that of the image, with the scores of the patches in their places."""
    model, given = make()
    options = {"suppress_tokens": [IMAGE], "eos_token_id": None}
    found = attribute_generation((model.eval(), None), given, ValueZeroing, 2, **options)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    start = found.prompt.ids.index(IMAGE) if IMAGE in found.prompt.ids else extra
    for picture, layer in ((image, -1), (np.asarray(image), 0), (torch.rand(3, 16, 16), 1)):
        panels = found.plot(layer, over=picture).axes
        assert [panel.get_title() for panel in panels[:3]] == ["image", *(row.name for row in found.rows)]
        for row, panel in zip(found.scores[..., layer], panels[1:3], strict=True):
            drawn = torch.tensor(np.asarray(panel.images[1].get_array()))
            torch.testing.assert_close(drawn, row[start : start + 4].view(2, 2).double())
    assert [panel.get_title() for panel in found.plot(over=image, step=-1).axes[:2]][1] == found.rows[1].name
    with pytest.raises(ArgumentError, match="the name of a file"):
        found.plot(over="cat.png")


def test_frames_are_drawn_below_the_sound() -> None:
    model, given = whisper()
    found = attribute_generation((model.eval(), None), given, ValueZeroing, 2, eos_token_id=None)
    panel = found.plot(over=torch.randn(3200), step=1, sampling_rate=16000).axes[0]
    bars = torch.tensor([one.get_height() for one in panel.patches][:10]).float()
    torch.testing.assert_close(bars, found.scores[1, :10, -1] / found.scores[1, :10, -1].max(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="pass step="):
        found.plot(over=torch.randn(3200))
    found = attribute_generation("causal", "the pictures of some hat", max_new_tokens=1)
    with pytest.raises(ArgumentError, match="the prompt has no tokens of an image or a sound"):
        found.plot(over=torch.rand(3, 8, 8))
