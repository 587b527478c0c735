"""Sounds with bars, and patches as pixels."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from captum_vz.visualization import describe, draw_audio, draw_image, image_grid

SOUND = torch.sin(torch.arange(32000) / 20)


def bars(figure: Figure) -> list[tuple[float, float, float]]:
    return [(patch.get_x(), patch.get_width(), patch.get_height()) for patch in figure.axes[0].patches]


def test_bars_fill_the_sound() -> None:
    figure = draw_audio(SOUND[None], torch.tensor([[0.1, 0.4, 0.2, 0.3]]), 16000, "share")
    found = bars(figure)
    assert [start for start, _, _ in found] == pytest.approx([0, 0.5, 1, 1.5])
    assert [width for _, width, _ in found] == pytest.approx([0.5] * 4)
    assert [height for _, _, height in found] == pytest.approx([0.25, 1, 0.5, 0.75])
    assert figure.axes[0].get_xlim() == (0, 2)
    assert figure.axes[0].get_ylabel() == "share"


def test_bars_of_words() -> None:
    spans = [(0.1, 0.5), (0.6, 1.9)]
    figure = draw_audio(SOUND, torch.tensor([0.5, -0.25]), 16000, spans=spans, names=["the", "cats"], token=1)
    assert bars(figure) == [pytest.approx((0.1, 0.4, 1)), pytest.approx((0.6, 1.3, -0.5))]
    assert [text.get_text() for text in figure.axes[0].texts] == ["the", "cats"]
    found = describe(figure)
    assert found.rows[1] == (1, 0.6, 1.9, "cats", -0.25)
    assert found.text.startswith("A sound of 1.90 seconds with 2 scores. The largest are the 0.10 to 0.50 s 0.50")


@pytest.mark.parametrize("before", [0, 1, 5])
def test_patches_become_pixels(before: int) -> None:
    patches = torch.rand(6)  # two lines of three
    image = torch.rand(3, 8, 12)
    scores, pixels = image_grid(torch.cat([torch.full((before,), 9.0), patches]), image)
    assert scores.shape == (8, 12, 1)
    for down in range(8):
        for across in range(12):
            assert scores[down, across, 0] == float(patches[down // 4 * 3 + across // 4])
    np.testing.assert_array_equal(pixels, image.permute(1, 2, 0).double())


def test_usual_vision_transformers() -> None:
    for count in (197, 198, 201):  # ViT, DeiT, DINOv2 with registers
        scores, _ = image_grid(torch.rand(1, count), torch.rand(1, 3, 224, 224))
        assert len(np.unique(scores)) == 196


def test_pixels_are_from_0_to_1() -> None:
    normalized = torch.randn(3, 4, 4)
    _, pixels = image_grid(torch.rand(4), normalized)
    assert (pixels.min(), pixels.max()) == (0, 1)
    _, whole = image_grid(torch.rand(4), np.full((4, 4, 3), 255, dtype=np.uint8))
    assert (whole == 1).all()


# A grid of layers over an image


def test_layers_over_an_image() -> None:
    """Each panel has the scores of its layer's patches over the image. Tokens before the patches are left out."""
    rows = torch.rand(3, 2 + 12).softmax(-1)
    figure = draw_image(rows, torch.rand(3, 30, 40), token=3)
    assert [panel.get_title() for panel in figure.axes[:4]] == ["image", "layer 0", "layer 1", "layer 2"]
    for layer in range(3):
        below, scores = figure.axes[layer + 1].images
        np.testing.assert_allclose(scores.get_array(), rows[layer, 2:].view(3, 4).double())
        assert scores.get_extent() == [-0.5, 39.5, 29.5, -0.5] and below.get_array().shape == (30, 40)
        strength = np.asarray(scores.get_alpha())
        assert strength.argmax() == rows[layer, 2:].argmax() and strength.min() >= 0
        (frame,) = figure.axes[layer + 1].patches  # patch 1: the second of the first row
        assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (9.5, -0.5, 10, 10)
    found = describe(figure)
    assert found.columns == ("panel", "row", "column", "share of the row")
    assert found.rows[5] == ("layer 0", 1, 1, rows[0, 7].double().item())


def test_maps_over_an_image() -> None:
    """A row of whole maps is taken. A rollout ends at its own largest score."""
    maps = {"layer 0": torch.eye(17), "rollout": torch.full((1, 17, 17), 1 / 17)}
    figure = draw_image(maps, torch.rand(1, 8, 8), token=2)
    assert figure.axes[1].images[1].get_array()[0, 1] == 1
    assert figure.axes[2].get_title() == "rollout (to 0.059)"
    signed = draw_image([torch.tensor([0.0, 1.0, -1.0, 0.0, 0.5])], torch.rand(3, 4, 4)).axes[1].images[1]
    np.testing.assert_allclose(np.asarray(signed.get_alpha()), [[0.9, 0.9], [0, 0.45]])
    red, _, blue, _ = signed.cmap(signed.norm(-1.0))
    assert red > blue
    assert describe(draw_image(maps, torch.rand(3, 8, 8), token=0, title="A title")).text.startswith("A title.")
