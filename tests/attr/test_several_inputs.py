"""Several inputs in a tuple: one tensor for each input, as Captum's input methods return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ViltConfig,
    ViltForQuestionAnswering,
)

from captum_vz import ALTIPlus, ValueZeroingEffect, ValueZeroingRollout, find_layers
from captum_vz.attr._base.several_inputs import by_input
from captum_vz.errors import ArgumentError

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}


def with_image() -> tuple[Any, tuple[Tensor, Tensor]]:
    """A question of 5 tokens and an image of 4 patches. The sequence is the text, an image [CLS], and the patches."""
    torch.manual_seed(0)
    config = ViltConfig(vocab_size=60, image_size=16, patch_size=8, num_labels=3, **SIZES)
    model = ViltForQuestionAnswering(config).eval()
    return model, (torch.randint(5, 60, (2, 5)), torch.randn(2, 3, 16, 16))


def answers(model: Any) -> Callable[..., Tensor]:
    def forward(ids: Tensor, pixels: Tensor) -> Tensor:
        torch.manual_seed(0)  # ViLT shuffles the patches
        return model(input_ids=ids, pixel_values=pixels).logits

    return forward


def rerun(model: Any, layers: list[Any], forward: Callable[[], Tensor], source: int) -> Tensor:
    """A twin: the output with the value of one token set to zero in all layers."""

    def zero(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.index_fill(1, torch.tensor([source]), 0.0)

    hooks = [layer.attention.attention.value.register_forward_hook(zero) for layer in layers]
    try:
        with torch.no_grad():
            return forward()
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.filterwarnings("ignore:.*random numbers.*")
def test_text_and_image() -> None:
    model, (ids, pixels) = with_image()
    forward, layers = answers(model), find_layers(model)
    text, image = ValueZeroingEffect(forward, layers).attribute((ids, pixels), target=1)
    assert text.shape == (2, 5) and image.shape == (2, 5)
    with torch.no_grad():
        clean = forward(ids, pixels)
    twin = torch.stack([clean - rerun(model, layers, lambda: forward(ids, pixels), j) for j in range(10)], 1)[..., 1]
    torch.testing.assert_close(torch.cat([text, image], 1), twin, atol=1e-5, rtol=1e-4)
    other = ValueZeroingEffect(lambda pixels, ids: forward(ids, pixels), layers).attribute((pixels, ids), target=1)
    assert torch.equal(other[0], image) and torch.equal(other[1], text)


@pytest.mark.filterwarnings("ignore:.*random numbers.*")
def test_rollout_of_text_and_image() -> None:
    model, (ids, pixels) = with_image()
    torch.manual_seed(0)
    method = ValueZeroingRollout(answers(model), find_layers(model))
    joint = method.attribute({"ids": ids, "pixels": pixels})
    text, image = method.attribute((ids, pixels), token=0)
    torch.testing.assert_close(torch.cat([text, image], 1), joint[:, 0])
    for text, image in method.attribute((ids, pixels), all_layers=True):
        assert text.shape == image.shape == (2, 10, 5)


@pytest.mark.filterwarnings("ignore:.*random numbers.*")
def test_layers_after_the_first() -> None:
    """The tokens of a later layer depend on both inputs, so the first layer of the stack shows where they come from."""
    model, (ids, pixels) = with_image()
    last = find_layers(model)[-1]
    text, image = ValueZeroingEffect(answers(model), last).attribute((ids, pixels), target=1)
    joint = ValueZeroingEffect(answers(model), last).attribute({"ids": ids, "pixels": pixels}, target=1)
    torch.testing.assert_close(torch.cat([text, image], 1), joint)


def test_image_inside_a_text() -> None:
    """Placeholders in the ids become patches. Ids keep their axis, and the patches' scores are those of the image."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(image_size=16, patch_size=8, **SIZES)
    text = LlamaConfig(vocab_size=60, num_key_value_heads=4, **SIZES)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=59, vision_feature_layer=-1)
    model = LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, 6, 59, 59, 59, 59, 7, 8], [9, 59, 59, 59, 59, 7, 8, 10]])
    pixels = torch.randn(2, 3, 16, 16)
    layers = find_layers(model, "language_model")

    def forward(ids: Tensor, pixels: Tensor) -> Tensor:
        return model(input_ids=ids, pixel_values=pixels).logits[:, -1]

    found, image = ValueZeroingEffect(forward, layers).attribute((ids, pixels), target=1)
    joint = ValueZeroingEffect(forward, layers).attribute(ids, target=1, additional_forward_args=pixels)
    torch.testing.assert_close(found, joint.masked_fill(ids == 59, 0))
    torch.testing.assert_close(image, joint[ids == 59].reshape(2, 4))


def test_mask_has_no_tokens_of_its_own() -> None:
    torch.manual_seed(0)
    bart, ids = BartModel(small_bart()).eval(), torch.randint(5, 60, (2, 5))
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    encoder = find_layers(bart, "encoder")
    method = ValueZeroingEffect(lambda ids, mask: bart.encoder(ids, mask).last_hidden_state[:, 0, 0], encoder)
    joint = method.attribute(ids, additional_forward_args=mask)
    scores, rest = method.attribute((ids, mask))
    torch.testing.assert_close(scores, joint)
    assert torch.equal(rest, torch.zeros(2, 5))


def small_bart() -> BartConfig:
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return BartConfig(vocab_size=60, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, **layers, **heads)


def test_encoder_and_decoder() -> None:
    """The encoder's tokens come from the first input, the decoder's from the second."""
    torch.manual_seed(0)
    model = BartModel(small_bart()).eval()
    source, target = torch.randint(5, 60, (2, 6)), torch.randint(5, 60, (2, 4))

    def forward(ids: Tensor, decoder_ids: Tensor) -> Tensor:
        return model(input_ids=ids, decoder_input_ids=decoder_ids).last_hidden_state

    decoder, encoder = find_layers(model, "decoder"), find_layers(model, "encoder")
    number = (slice(None), -1, 0)

    def score(output: Tensor) -> Tensor:
        return output[number]

    shapes = {}
    for name, layers, attention in (("e", encoder, "self"), ("d", decoder, "self"), ("c", decoder, "cross")):
        method = ValueZeroingEffect(forward, layers, attention=attention)
        joint = method.attribute(source, score, target)
        found = method.attribute((source, target), score)
        shapes[name] = [tuple(one.shape) for one in found]
        torch.testing.assert_close(torch.cat(found, 1), joint)
    assert shapes == {"e": [(2, 6), (2, 0)], "d": [(2, 0), (2, 4)], "c": [(2, 6), (2, 0)]}
    for layers in ([*encoder, *decoder], decoder):
        joint = ALTIPlus(forward, layers).attribute(source, additional_forward_args=target)
        found = ALTIPlus(forward, layers).attribute((source, target))
        assert [tuple(one.shape) for one in found] == [(2, 4, 6), (2, 4, 4)]
        torch.testing.assert_close(torch.cat(found, 2), joint)


class ByHand(nn.Module):
    """Vectors of ids and of a sound, in a layer of torch. The ids are read in another form than an embedding's."""

    def __init__(self, batch_first: bool = True, one_hot: bool = False) -> None:
        super().__init__()
        self.words, self.sound = nn.Parameter(torch.randn(20, 16)), nn.Linear(3, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first) for _ in range(2))
        self.one_hot = one_hot

    def forward(self, sound: Tensor, ids: Tensor) -> Tensor:
        words = nn.functional.one_hot(ids, 20).float() @ self.words if self.one_hot else self.words[ids]
        x = torch.cat([words[:, :2], self.sound(sound), words[:, 2:]], 1)
        x = x if self.layers[0].self_attn.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return (x if self.layers[0].self_attn.batch_first else x.transpose(0, 1)).mean((1, 2))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_interleaved_inputs(batch_first: bool, one_hot: bool, batch: int) -> None:
    torch.manual_seed(0)
    model = ByHand(batch_first, one_hot).eval()
    sound, ids = torch.randn(batch, 3, 3), torch.randint(0, 20, (batch, 4))
    joint = ValueZeroingEffect(model).attribute({"sound": sound, "ids": ids})
    of_sound, of_ids = ValueZeroingEffect(model).attribute((sound, ids))
    torch.testing.assert_close(of_sound, joint[:, 2:5])
    torch.testing.assert_close(of_ids, joint[:, [0, 1, 5, 6]])


class Joined(nn.Module):
    """Vectors of two inputs one after the other, made in several ways, in layers of torch."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.words, self.sound = form, nn.Embedding(20, 16), nn.Linear(3, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(2))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        if self.form == "masked":
            x = self.words(two) * (1 + one[..., None])
        elif self.form == "joined ids":
            x = self.words(torch.cat([one, two], 1))
        else:
            x, y = (self.sound(x) if x.is_floating_point() else self.words(x) for x in (one, two))
            if self.form == "limits" and max(z.max() for z in (one, two) if z.is_floating_point()) > 1:
                raise ValueError("numbers above 1")
            if self.form == "style":
                y = y + x.mean(1, keepdim=True)
            x = torch.cat([x, y], 1)
        for number, layer in enumerate(self.layers):
            x = layer(x[:, ::2] if number and self.form == "shorter" else x)
        return x.mean((1, 2))


@pytest.mark.parametrize(
    ("one", "two"),
    [([[7]], [[3, 4, 5]]), ([[3, 4, 5]], [[7]]), ([[3, 5, 4]], [[7, 8]]), ([[3, 4], [5, 5]], [[3, 4], [5, 5]])],
)
def test_ids_that_the_model_joins(one: list[list[int]], two: list[list[int]]) -> None:
    torch.manual_seed(0)
    model, ids = Joined("joined ids").eval(), (torch.tensor(one), torch.tensor(two))
    joint = ValueZeroingEffect(model).attribute({"one": ids[0], "two": ids[1]})
    found = ValueZeroingEffect(model).attribute(ids)
    assert [x.shape for x in found] == [x.shape for x in ids]
    torch.testing.assert_close(torch.cat(found, 1), joint)


def test_mask_before_the_ids_owns_no_token() -> None:
    torch.manual_seed(0)
    model, mask, ids = (
        Joined("masked").eval(),
        torch.tensor([[1, 1, 1], [1, 1, 0]]),
        torch.tensor([[3, 4, 5], [6, 7, 8]]),
    )
    joint = ValueZeroingEffect(model).attribute({"one": mask, "two": ids})
    rest, scores = ValueZeroingEffect(model).attribute((mask, ids))
    assert torch.equal(rest, torch.zeros(2, 3))
    torch.testing.assert_close(scores, joint)


@pytest.mark.parametrize("form", ["limits", "style", "same ids", "shorter"])
def test_unclear_tokens_are_refused(form: str) -> None:
    """A model that fails with noise, a sound in the vectors of words, equal ids, and a layer with fewer tokens."""
    torch.manual_seed(0)
    model, ids, sound = Joined(form).eval(), torch.tensor([[3, 4]]), torch.rand(1, 4, 3)
    inputs = {"limits": (ids, sound), "style": (sound, ids), "same ids": (ids, ids.clone()), "shorter": (sound, ids)}
    with pytest.raises(ArgumentError, match=r"unknown which tokens .* as a mapping"):
        ValueZeroingEffect(model, model.layers[-1]).attribute(inputs[form])
    ValueZeroingEffect(model, model.layers[-1]).attribute(dict(zip(("one", "two"), inputs[form], strict=True)))


def test_nothing_outlives_the_call() -> None:
    torch.manual_seed(0)
    model = ByHand().eval()
    inputs = torch.randn(2, 3, 3), torch.randint(0, 20, (2, 4))
    state = torch.get_rng_state()
    ValueZeroingEffect(model).attribute(inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_unknown_tokens_are_refused() -> None:
    x = torch.randn(2, 3, 16)
    with pytest.raises(ArgumentError, match=r"inputs holds 2 tensors, but it is unknown .* as a mapping"):
        by_input([torch.ones(2, 3)], lambda x, y: x + y, (x, x), None, [(nn.Linear(16, 16), None)])
