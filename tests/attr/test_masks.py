"""Feature masks of words and of image regions."""

from typing import Any

import pytest
import torch
from transformers import DeiTConfig, DeiTModel, Dinov2WithRegistersConfig, Dinov2WithRegistersModel, ViTConfig, ViTModel

from captum_vz import (
    AttentionRollout,
    LayerAttention,
    PositionAttribution,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
    find_layers,
    patch_mask,
    word_mask,
)
from captum_vz.errors import ArgumentError
from captum_vz.testbed import load_model

TEXT = "the wug [MASK] some wug"
SMALL: dict[str, Any] = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def by_hand(words: list[int | None]) -> torch.Tensor:
    """Each None gets a number that no other token has."""
    numbers = [1000 + place if word is None else word for place, word in enumerate(words)]
    return torch.tensor([numbers])


@pytest.mark.parametrize(
    "make",
    [
        lambda model, layers: ValueZeroing(model, layers[-1]),
        ValueZeroingRollout,
        lambda model, layers: LayerAttention(model, layers[0]),
        AttentionRollout,
        ValueZeroingEffect,
        lambda model, layers: PositionAttribution(),
    ],
)
def test_word_ids_are_a_feature_mask(make: Any) -> None:
    model, tokenizer = load_model()
    inputs = tokenizer(TEXT, return_tensors="pt")
    words = inputs.word_ids()
    assert None in words
    assert len(set(words)) < len(words) - 1
    place = inputs.tokens().index("[MASK]")
    method = make(model, find_layers(model))
    asked: dict[str, Any] = {"token": place}
    if isinstance(method, ValueZeroingEffect):
        asked = {"target": (place, 7)}
    expected = method.attribute(inputs, feature_mask=by_hand(words), **asked)
    line = torch.tensor([1000 + i if word is None else word for i, word in enumerate(words)])
    for mask in (words, tuple(words), [words], line, word_mask(inputs), word_mask(words), (word_mask(inputs),)):
        torch.testing.assert_close(method.attribute(inputs, feature_mask=mask, **asked), expected)


def test_words_of_two_texts_and_of_a_batch() -> None:
    _, tokenizer = load_model()
    pair = tokenizer("the hat", "the wug", return_tensors="pt")
    assert word_mask(pair).tolist() == [[0, 1, 2, 3, 4, 5, 5, 5, 6]]  # "the" twice: two words
    batch = tokenizer(["the wug", "a hat is"], return_tensors="pt", padding=True)
    assert word_mask(batch).tolist() == [[0, 1, 2, 2, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert word_mask(tokenizer("the wug")).tolist() == [[0, 1, 2, 2, 2, 3]]  # lists, without an axis of texts


def test_wrong_list_is_refused() -> None:
    model, tokenizer = load_model()
    inputs, method = tokenizer("the hat", return_tensors="pt"), ValueZeroing(model, find_layers(model)[0])
    for mask in (["a", "b"], [[0, 1], [0]], [0, 1.5], [True, False]):
        with pytest.raises(ArgumentError, match="no list of words"):
            method.attribute(inputs, feature_mask=mask)
    with pytest.raises(ArgumentError, match=r"mask is \(1, 3\)"):
        method.attribute(inputs, feature_mask=[None, 0, 1])


@pytest.mark.parametrize(
    ("kind", "config", "extra"),
    [(ViTModel, ViTConfig, 1), (DeiTModel, DeiTConfig, 2), (Dinov2WithRegistersModel, Dinov2WithRegistersConfig, 5)],
)
def test_patch_mask_counts_pixels(kind: Any, config: Any, extra: int) -> None:
    model = kind(config(image_size=8, patch_size=2, **SMALL)).eval()
    pixels = torch.randint(3, 6, (8, 8), generator=torch.Generator().manual_seed(0))
    expected = []
    for row in range(0, 8, 2):
        for column in range(0, 8, 2):
            region = pixels[row : row + 2, column : column + 2].flatten().tolist()
            expected.append(max(sorted(set(region)), key=region.count))
    found = patch_mask(pixels, model)
    assert found[0, extra:].tolist() == expected
    assert found[0, :extra].tolist() == list(range(6, 6 + extra))
    assert patch_mask(pixels[None, None], model).equal(found)
    image = torch.rand(1, 3, 8, 8)
    layer = find_layers(model)[0]
    row = ValueZeroing(model, layer).attribute(image, feature_mask=found, token=0)
    assert row.shape == found.shape
    for number in set(expected):
        assert row[found == number].unique().numel() == 1


def test_wrong_pixel_mask_is_refused() -> None:
    model = ViTModel(ViTConfig(image_size=8, patch_size=4, **SMALL))
    for mask, told in (
        (torch.rand(8, 8), "of torch.float32"),
        (None, "of type NoneType"),
        (torch.zeros(2, 8, 8).long(), r"\(2, 8, 8\): pass"),
        (torch.zeros(9, 8).long(), "patch of ViTModel"),
        (torch.zeros(8).long(), r"\(8,\): pass one"),
    ):
        with pytest.raises(ArgumentError, match=told):
            patch_mask(mask, model)
    with pytest.raises(ArgumentError, match="a patch of Bert"):
        patch_mask(torch.zeros(8, 8).long(), load_model()[0])
