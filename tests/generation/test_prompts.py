"""Prompts in all their forms, with images and sound, and what `generate` does with them."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.testbed import load_model
from tests.engine.parameters import CACHES
from tests.generation.models import ENCODER_DECODER, NEW, PROMPT, case_of, generate, tokenizer_of_words
from tests.reference.families import WHISPER_SIZE

TEXT = "the pictures of some hat"
IDS = [4, 5, 6, 7, 8]
CHAT = [{"role": "system", "content": "that anna likes"}, {"role": "user", "content": "some hat ."}]


def attribute(prompt: Any, *args: Any, name: str = "gpt2", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = case_of(name, dtype).model
    return attribute_generation((model, tokenizer_of_words()), prompt, ValueZeroing, *args, **options)


def assert_same(found: GenerationAttribution, expected: GenerationAttribution, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-11}
    assert found.prompt.ids == expected.prompt.ids
    assert found.generated.ids == expected.generated.ids
    torch.testing.assert_close(found.scores, expected.scores, **tolerance)
    torch.testing.assert_close(found.prefix, expected.prefix, **tolerance)


@pytest.mark.parametrize("name", ["gpt2", "bart"])
@pytest.mark.parametrize(
    "form",
    [
        IDS,
        tuple(IDS),
        torch.tensor(IDS),
        torch.tensor([IDS]),
        np.array(IDS),
        tokenizer_of_words()(TEXT),
        tokenizer_of_words()(TEXT, return_tensors="pt"),
    ],
    ids=["list", "tuple", "tensor", "one-row", "numpy", "lists", "tensors"],
)
def test_forms_of_one_prompt(form: Any, name: str) -> None:
    assert_same(attribute(form, 4, name=name), attribute(TEXT, 4, name=name))


@pytest.mark.parametrize("types", [torch.zeros(1, 5, dtype=torch.long), torch.tensor([[0, 0, 1, 1, 1]])])
def test_types_of_tokens(types: torch.Tensor) -> None:
    """LLaMA has none. BERT reads zeros if it is given none. New tokens would have other types than their prompt."""
    prompt = {"input_ids": IDS, "token_type_ids": types, "offset_mapping": [(0, 1)] * 5, "labels": IDS}
    assert_same(attribute(prompt, 3, name="llama"), attribute(TEXT, 3, name="llama"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    model = transformers.BertLMHeadModel(transformers.BertConfig(num_hidden_layers=1, is_decoder=True, **sizes)).eval()
    given = {"input_ids": torch.tensor([IDS]), "token_type_ids": types}
    if types.any():
        with pytest.raises(ArgumentError, match="would change"):
            attribute_generation((model, None), given, ValueZeroing, 2)
    else:
        found = attribute_generation((model, None), given, ValueZeroing, 2)
        assert_same(found, attribute_generation((model, None), IDS, ValueZeroing, 2))


@pytest.mark.parametrize("argument", ["generated", "max_new_tokens"])
def test_start_of_the_decoder_among_the_entries(argument: str) -> None:
    start = torch.tensor([[0, 5]])
    options = {argument: NEW if argument == "generated" else 3}
    given = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": start}
    assert_same(attribute(given, name="t5", **options), attribute(IDS, name="t5", decoder_input_ids=start, **options))


@pytest.mark.parametrize("name", ["gpt2", "llama", *ENCODER_DECODER])
def test_greedy_text_is_that_of_generate(name: str) -> None:
    sequences = generate(name, IDS, max_new_tokens=6)
    expected, found = sequences[0].tolist(), attribute(TEXT, 6, name=name)
    if name in ENCODER_DECODER:
        assert_same(attribute(IDS, name=name, generated=sequences), found)
    assert list(found.generated.ids) == expected[1 if name in ENCODER_DECODER else 5 :]
    assert found.text == tokenizer_of_words().decode(found.generated.ids, skip_special_tokens=True)
    assert len(attribute(IDS, name=name, eos_token_id=None).generated.ids) == 25  # by default
    assert len(attribute(IDS, name=name, eos_token_id=None, num_beams=2, num_return_sequences=2, max_length=9)) == 2


def test_beams_and_seeds() -> None:
    expected = generate("llama", IDS, max_new_tokens=5, num_beams=3)[0].tolist()
    found = attribute(TEXT, 5, name="llama", num_beams=3)
    assert list(found.generated.ids) == expected[5:]
    assert_same(found, attribute(IDS, name="llama", generated=expected[5:]))
    before = torch.random.get_rng_state()
    options = {"do_sample": True, "temperature": 3.0}
    first, again, other = (attribute(IDS, 8, seed=seed, **options) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.generated.ids == again.generated.ids != other.generated.ids
    torch.manual_seed(1)
    assert attribute(IDS, 8, **options).generated.ids == first.generated.ids


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "t5", "bart"])
def test_batch_equals_single_prompts(name: str) -> None:
    """In float32, because transformers' eager attention returns NaN for padding in a float64 model."""
    prompts = [TEXT, "anna likes", "a woman 's theater"]
    batch = attribute(prompts, 5, name=name, dtype=torch.float32)
    for prompt, found in zip(prompts, batch, strict=True):
        assert_same(found, attribute(prompt, 5, name=name, dtype=torch.float32), rtol=1e-4, atol=1e-5)


def test_batches_of_ids_and_of_outputs() -> None:
    prompts = [IDS, IDS[:2], IDS[1:]]
    free = attribute(prompts, 6, eos_token_id=None)
    stop = free[1].generated.ids[0]
    batch = attribute(prompts, 6, eos_token_id=stop)
    assert batch[1].generated.ids == (stop,)
    for one, whole in zip(batch, free, strict=True):
        ids = whole.generated.ids
        assert one.generated.ids == ids[: ids.index(stop) + 1 if stop in ids else None]
    model, tokenizer = case_of("gpt2").model, tokenizer_of_words()
    inputs = tokenizer([TEXT, "anna likes"], return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
    length = inputs["input_ids"].shape[1]
    found = attribute(output, prompt_length=length, attention_mask=inputs["attention_mask"])
    for one, expected in zip(found, attribute([TEXT, "anna likes"], 4), strict=True):
        assert_same(one, expected)


def test_given_text_that_continues_a_word_is_told(recwarn: pytest.WarningsRecorder) -> None:
    """The embedded tokenizer has pieces of words, as most have."""
    model, tokenizer = load_model("causal")
    prompt = "the pictures of some hat"
    found = attribute_generation((model, tokenizer), prompt, ValueZeroing, generated=" have upset anna.")
    assert found.generated.labels[0] == "have"
    assert not recwarn
    with pytest.warns(UserWarning, match="continues the last"):
        found = attribute_generation((model, tokenizer), prompt, ValueZeroing, generated="have upset anna.")
    assert found.generated.labels[0] == "##h"
    assert attribute_generation((model, tokenizer), prompt, ValueZeroing, generated=".").generated.labels == (".",)
    assert not recwarn


@pytest.mark.parametrize("argument", CACHES)
def test_cache_passed_in(argument: str) -> None:
    model, cache = case_of("llama").model, transformers.DynamicCache()
    with torch.no_grad():
        model(torch.tensor([IDS[:3]]), **{argument: cache}, use_cache=True)
    found = attribute(IDS, 4, name="llama", **{argument: cache})
    assert_same(found, attribute(IDS, 4, name="llama"))


def test_roles_of_a_chat_are_sections() -> None:
    found = attribute(CHAT, 3)
    assert list(found.prompt.labels) == (
        ["system", ":", "that", "anna", "likes", "<eos>", "user", ":", "some", "hat", ".", "<eos>", "assistant", ":"]
    )
    assert found.prompt.sections == (("system", 0, 6), ("user", 6, 12), ("answer", 12, 14))
    assert_same(attribute([CHAT, CHAT], 3)[1], found)
    longer = attribute([CHAT[1], {"role": "assistant", "content": "a hat"}, CHAT[1]], 2)
    assert [name for name, _, _ in longer.prompt.sections] == ["user", "assistant", "user 2", "answer"]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (IDS, {"name": "t5", "prompt_length": 3}, "as generated"),
        ("", {}, "has no tokens"),
        ([], {}, "prompt is \\[\\]"),
        (5, {}, "prompt is 5"),
        ([1.5], {}, "prompt is 1.5"),
        (torch.rand(1, 4), {}, r"tensor \(1, 4\) of"),
        ({"role": "user", "content": "a"}, {}, "prompt is \\{"),
        ([0, 0, *IDS], {}, "with 2 tokens of"),
        ([[*IDS, 0], [*IDS, 5]], {}, "ends with 1 tokens"),
        (IDS, {"prompt_length": 6}, "prompt_length is 6"),
        (IDS, {"prompt_length": 5}, "has no new tokens"),
        (TEXT, {"prompt_length": 2}, "describe token ids"),
        (IDS, {"prompt_length": 3, "generated": NEW}, "Pass one"),
        (IDS, {"generated": []}, "has no new tokens"),
        (IDS, {"generated": NEW, "do_sample": True}, "leave out do_sample"),
        ([IDS, PROMPT], {"generated": "a"}, "1 entries for 2"),
        (torch.tensor([IDS]), {"attention_mask": torch.ones(1, 3)}, r"mask is \(1, 3\)"),
        (torch.tensor([IDS]), {"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "hides tokens inside"),
        (torch.tensor([IDS]), {"attention_mask": torch.zeros(1, 5)}, "hides all tokens"),
        (IDS, {"inputs_embeds": torch.rand(1, 5, 32)}, "embeds would change"),
        (IDS, {"position_ids": torch.arange(5)[None]}, "ids would change"),
        ({"input_ids": IDS, "position_ids": [0, 1, 2, 0, 1]}, {}, "ids would change"),
        ({"input_ids": IDS, "token_type_ids": [0] * 5}, {"generated": NEW}, "ids would change"),
    ],
)
def test_wrong_prompt_is_refused(prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        attribute(prompt, **options)


# Images and sound


IMAGE = 59  # the token that stands for a part of an image
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
LANGUAGE: dict[str, Any] = {**VISION, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 60}


def llava() -> tuple[Any, dict[str, Any]]:
    seen = transformers.CLIPVisionConfig(**VISION, image_size=8, patch_size=4)
    config = transformers.LlavaConfig(
        vision_config=seen, text_config=transformers.LlamaConfig(**LANGUAGE), image_token_id=IMAGE
    )
    ids = torch.tensor([[2, *[IMAGE] * 4, 7, 8]])
    return transformers.LlavaForConditionalGeneration(config), {
        "input_ids": ids,
        "pixel_values": torch.rand(1, 3, 8, 8),
    }


def qwen() -> tuple[Any, dict[str, Any]]:
    text = {**LANGUAGE, "num_key_value_heads": 1, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    seen = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    marks = {"image_token_id": IMAGE, "vision_start_token_id": 58, "vision_end_token_id": 57, "video_token_id": 56}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=seen, **marks)
    ids = torch.tensor([[2, 58, *[IMAGE] * 4, 57, 7, 8]])
    grid, pixels = torch.tensor([[1, 4, 4]]), torch.rand(16, 3 * 2 * 4 * 4)
    given = {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    return transformers.Qwen2VLForConditionalGeneration(config), given


def whisper() -> tuple[Any, dict[str, Any]]:
    sizes: dict[str, Any] = WHISPER_SIZE | {"max_source_positions": 10, "max_target_positions": 30}
    config = transformers.WhisperConfig(**sizes, suppress_tokens=[], begin_suppress_tokens=[])
    return transformers.WhisperForConditionalGeneration(config), {"input_features": torch.randn(1, 8, 20)}


def captions() -> tuple[Any, dict[str, Any]]:
    parts = transformers.ViTConfig(**VISION, image_size=8, patch_size=4), transformers.BertConfig(**LANGUAGE)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        *parts, decoder_start_token_id=1, pad_token_id=0
    )
    return transformers.VisionEncoderDecoderModel(config), {"pixel_values": torch.rand(1, 3, 8, 8)}


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
    with pytest.warns(UserWarning, match=r"_tokens=\[59\]"):
        found = attribute_generation((model.eval(), None), given["input_ids"], ValueZeroing, 2, pixel_values=pixels)
    assert IMAGE not in found.generated.ids
    with pytest.raises(ArgumentError, match="takes no pixel"):
        attribute_generation("causal", "the hat", ValueZeroing, 2, pixel_values=pixels)
    with pytest.raises(ArgumentError, match="but no input_ids"):
        attribute_generation((model, None), {"pixel_values": pixels}, ValueZeroing, 2)
    several = given["input_ids"].repeat(2, 1)
    with pytest.raises(ArgumentError, match="call for each"):
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
    with pytest.raises(ArgumentError, match="tokens of an image"):
        found.plot(over=torch.rand(3, 8, 8))
