"""Images and speech from end to end: patches of a digit, frames of a word."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
import torch
from captum.attr import LayerAttribution, visualization
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from captum_vz import LayerAttention, ValueZeroing, find_layers
from captum_vz.functional import pool_groups
from tests.reference import FAMILIES, naive_value_zeroing

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 8 by 8 digits, (image, 1, 8, 8) between 0 and 1, shuffled, and what they are."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    images = torch.tensor(data.images[order], dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(data.target[order])


@pytest.fixture(scope="module")
def reader(digits: tuple[Tensor, Tensor]) -> nn.Module:
    """A small ViT that has learnt to read the first 1500 of them, in patches of 2 by 2."""
    images, labels = digits[0][:1500], digits[1][:1500]
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViTForImageClassification(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(20):
            for batch in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                model(pixel_values=images[batch], labels=labels[batch]).loss.backward()
                optimizer.step()
    return model.eval()


def test_picture_of_the_cls_row(digits: tuple[Tensor, Tensor], reader: nn.Module) -> None:
    images, labels = digits[0][1500:], digits[1][1500:]
    with torch.no_grad():
        assert (reader(images).logits.argmax(-1) == labels).float().mean() > 0.8  # 0.87 to 0.94, by how a machine sums
    row = ValueZeroing(reader, find_layers(reader)[-1]).attribute(images[:4], token=0)  # 0 is CLS
    assert row.shape == (4, 17)
    torch.testing.assert_close(row.sum(-1), torch.ones(4))
    patches = row[:, 1:].reshape(4, 1, 4, 4)
    picture = LayerAttribution.interpolate(patches, (8, 8))
    assert torch.equal(picture[0, 0, :2, :2], patches[0, 0, 0, 0].expand(2, 2))  # a patch lies where it was cut
    image, scores = (x[0].permute(1, 2, 0).numpy() for x in (images, picture))
    figure, axes = visualization.visualize_image_attr(
        scores, image, method="blended_heat_map", sign="positive", outlier_perc=1e-3, use_pyplot=False
    )
    drawn = axes.get_images()[-1].get_array()
    assert drawn.shape[:2] == (8, 8)
    assert np.unravel_index(drawn.argmax(), (8, 8)) == np.unravel_index(scores[..., 0].argmax(), (8, 8))
    figure.clear()


def test_image_regions_are_zeroed_together(digits: tuple[Tensor, Tensor], reader: nn.Module) -> None:
    quarters = torch.arange(4).reshape(2, 2).repeat_interleave(2, 0).repeat_interleave(2, 1).flatten() + 1
    mask = torch.cat([torch.tensor([0]), quarters])[None]  # CLS, and a quarter of the image each
    layer = find_layers(reader)[0]
    grouped = ValueZeroing(reader, layer).attribute(digits[0][:2], feature_mask=mask, token=0)
    regions = pool_groups(grouped, mask)
    assert regions.shape == (2, 5)
    torch.testing.assert_close(regions.sum(-1), torch.ones(2))
    torch.testing.assert_close(regions.gather(1, mask.expand(2, -1)), grouped)


@pytest.mark.parametrize("name", ["wav2vec2", "whisper-encoder"])
def test_frames_grouped_into_words(name: str) -> None:
    """The frames of a word are zeroed together. The effect differs from the sum over single frames."""
    case = FAMILIES[name].case
    explain = ValueZeroing(case.model, case.layers[0], normalize=False)
    alone = explain.attribute(case.inputs)
    frames = alone.shape[-1]
    words = (torch.arange(frames) // 2)[None]
    together = explain.attribute(case.inputs, feature_mask=words)
    expected = naive_value_zeroing(case, 0, groups=words.expand(case.batch, -1).tolist(), normalize=False)
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-10)
    assert not torch.allclose(pool_groups(together, words), pool_groups(alone, words, shared=False), rtol=1e-2)
    attention = LayerAttention(case.model, case.layers[0]).attribute(case.inputs, feature_mask=words)
    assert pool_groups(attention, words).sum(-1).max() <= 1 + 1e-9
