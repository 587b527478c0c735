"""Images and sounds that people pass, and what is wrong with others."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig, pipeline

import captum_vz
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.methods import METHODS
from tests.explaining import models

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
SAMPLES = np.sin(np.arange(3000, dtype=np.float32))


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (Image.fromarray(PIXELS[..., 0]), Image.fromarray(PIXELS[..., :1].repeat(3, -1))),
        (PIXELS[..., 0], PIXELS[..., :1].repeat(3, -1)),
        (Image.fromarray(PIXELS).convert("RGBA"), Image.fromarray(PIXELS)),
        (PIXELS / 255, PIXELS),
        (torch.tensor(PIXELS / 255), PIXELS),
        (torch.tensor(PIXELS / 255, dtype=torch.float32, requires_grad=True), PIXELS),
        (torch.tensor(PIXELS).permute(2, 0, 1)[None], PIXELS),
        (torch.tensor(PIXELS[..., :1]).permute(2, 0, 1), PIXELS[..., 0]),
        (PIXELS[..., :1], PIXELS[..., 0]),
    ],
)
def test_images_of_other_kinds_are_the_same_image(given: Any, same: Any) -> None:
    model, processor = models.image_classifier()
    found, expected = (captum_vz.explain(model, one, tokenizer=processor) for one in (given, same))
    torch.testing.assert_close(found.scores, expected.scores)


def test_output_of_a_processor_and_fractions() -> None:
    model, processor = models.image_classifier()
    made = processor(images=Image.fromarray(PIXELS), return_tensors="pt")
    expected = captum_vz.explain(model, PIXELS, tokenizer=processor).scores
    for given in (made, dict(made)):
        torch.testing.assert_close(captum_vz.explain(model, given, tokenizer=processor).scores, expected)
    whole = captum_vz.explain(model, PIXELS, tokenizer=processor)
    processor.do_rescale = False
    found = captum_vz.explain(model, PIXELS.astype(np.float32) / 255, tokenizer=processor)
    torch.testing.assert_close(found.scores, whole.scores)


@pytest.mark.parametrize(
    ("make", "given", "told"),
    [
        (models.image_classifier, [Image.new("RGB", (8, 8))] * 2, "a list of 2 is no"),
        (models.image_classifier, torch.rand(2, 3, 8, 8), r"\(2, 3, 8, 8\)"),
        (models.image_classifier, np.zeros((0, 0, 3)), r"\(0, 0, 3\)"),
        (models.image_classifier, {"pixel_values": torch.rand(2, 3, 8, 8)}, "what the processor"),
        (models.image_classifier, {"image": torch.rand(1, 3, 8, 8)}, "no dict like this"),
        (models.image_classifier, torch.randn(1, 3, 8, 8), "negative numbers"),
        (partial(models.sound_model, models.SOUND), np.stack([SAMPLES] * 2), r"\(2, 3000\)"),
        (partial(models.sound_model, models.SOUND), SAMPLES[:0], r"shape \(0,\)"),
        (partial(models.sound_model, models.SOUND), {"array": SAMPLES, "sampling_rate": 8000}, "8000 samples a"),
        (partial(models.sound_model, models.SOUND), {"path": "a"}, r"shape \(\)"),
        (partial(models.sound_model, models.SOUND), [["a"]], "sound is of type"),
    ],
)
def test_what_is_no_image_or_sound_is_named(make: Any, given: Any, told: str) -> None:
    model, processor = make()
    with pytest.raises(ArgumentError, match=told):
        captum_vz.explain(model, given, tokenizer=processor)


@pytest.mark.parametrize("method", ["saliency", "integrated-gradients", "random", "position"])
def test_methods_of_words_say_that_there_are_none(method: str) -> None:
    model, processor = models.image_classifier()
    told = f"{METHODS[method].title} scores the tokens of a text, .* such as value-zeroing-effect"
    with pytest.raises(RefusedError, match=told):
        captum_vz.explain(model, PIXELS, tokenizer=processor, method=method)


@pytest.mark.parametrize(
    ("count", "changed", "told"),
    [
        (0, lambda data: data, "holds 0 bytes"),
        (10, lambda data: data, "pass a longer sound"),
        (3000, lambda data: data[:400], "and says 6000"),
        (3000, lambda data: b"hello", "it ends too early"),
    ],
)
def test_broken_sound_files_are_named(count: int, changed: Any, told: str, tmp_path: Path) -> None:
    model, extractor = models.sound_model(models.SOUND)
    path = models.write_sound(tmp_path / "sound.wav", (9000 * SAMPLES)[:count])
    path.write_bytes(changed(path.read_bytes()))
    with pytest.raises(ArgumentError, match=told):
        captum_vz.explain(model, path, tokenizer=extractor)


def test_letters_of_speech_have_targets() -> None:
    model, extractor = models.sound_model(models.SPEECH)
    inputs = extractor(SAMPLES, sampling_rate=16000, return_tensors="pt")
    frame = captum_vz.explain(model, SAMPLES, tokenizer=extractor).rows[0].token
    assert frame is not None
    found = captum_vz.explain(model, SAMPLES, tokenizer=extractor, token=frame, target=2, foil="3")
    assert [row.name for row in found.rows] == [f"frame {frame}: 2 rather than 3"]
    effect = captum_vz.ValueZeroingEffect(model)
    expected = effect.attribute(inputs["input_values"], target=(frame, 2), foil=(frame, 3))
    torch.testing.assert_close(found.scores, expected[0])
    with pytest.raises(ArgumentError, match="99 is out of range"):
        captum_vz.explain(model, SAMPLES, tokenizer=extractor, token=99)
    with pytest.raises(ArgumentError, match="which is no label"):
        captum_vz.explain(model, SAMPLES, tokenizer=extractor, target="x")


def test_pipelines_of_labels_in_words() -> None:
    make: Any = pipeline
    made = make(
        "zero-shot-classification", model=models.classifier(label2id={"entailment": 1}), tokenizer=models.tokenizer()
    )
    for given in (models.SENTENCE, [models.SENTENCE, "a b"]):
        with pytest.raises(ArgumentError, match="for each label"):
            captum_vz.explain(made, given)
    size = {name: models.SIZE[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    marks = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    texts = CLIPTextConfig(vocab_size=len(models.tokenizer()), **marks, **size)
    pixels_of = CLIPVisionConfig(image_size=8, patch_size=4, **size)
    config = CLIPConfig(text_config=texts.to_dict(), vision_config=pixels_of.to_dict())
    model, processor = CLIPModel(config).eval(), models.image_classifier()[1]
    made = make("zero-shot-image-classification", model=model, tokenizer=models.tokenizer(), image_processor=processor)
    for one, given in ((made, Image.new("RGB", (8, 8))), ((model, models.tokenizer()), models.SENTENCE)):
        with pytest.raises(ArgumentError, match="images or sound"):
            captum_vz.explain(one, given)
