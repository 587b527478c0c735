"""Vision transformers of timm, which call `scaled_dot_product_attention`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingRollout, find_layers
from tests.engine.odd import by_call

try:
    timm: Any = importlib.import_module("timm")
except (ImportError, RuntimeError):  # torchvision of another build raises RuntimeError
    pytest.skip(
        "timm is not installed, or its torchvision is of another build than torch (CUDA's beside CPU's)",
        allow_module_level=True,
    )

# Plain, scaled residuals, rotary positions and gates, position biases, convolutions, pooling.
NAMES = (
    "vit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "eva02_tiny_patch14_224",
    "beit_base_patch16_224",
    "vit_tiny_r_s16_p8_224",
    "vit_base_patch16_siglip_224",
)


@pytest.fixture(params=NAMES)
def images(request: pytest.FixtureRequest) -> tuple[Any, Tensor]:
    """A model of two layers, and two images for it."""
    torch.manual_seed(0)
    size = 56 if "patch14" in request.param else 64
    model = timm.create_model(request.param, depth=2, img_size=size)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.double().eval(), torch.randn(2, 3, size, size, dtype=torch.float64)


def arguments(layer: nn.Module, model: nn.Module, pixels: Tensor) -> list[Any]:
    """The arguments of a layer in a run of its model."""
    seen: list[Any] = []
    with layer.register_forward_hook(lambda *given: seen.extend(given[1:3]), with_kwargs=True), torch.no_grad():
        model(pixels)
    return seen


def test_maps_equal_the_twins(images: tuple[Any, Tensor]) -> None:
    model, pixels = images
    for layer in find_layers(model):
        found = ValueZeroing(model, layer, normalize=False).attribute(pixels)
        assert found.amax(-1).gt(1e-8).all()
        args, kwargs = arguments(layer, model, pixels)
        expected = by_call(layer, *args, sources=found.shape[-1], **kwargs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_the_row_of_the_class_token(images: tuple[Any, Tensor]) -> None:
    model, pixels = images
    layers = find_layers(model)
    rollout = ValueZeroingRollout(model, layers).attribute(pixels)
    ones = torch.ones_like(rollout[..., 0])
    torch.testing.assert_close(rollout.sum(-1), ones)
    torch.testing.assert_close(LayerAttention(model, layers[-1]).attribute(pixels).sum(-1), ones)
    row = ValueZeroing(model, layers[-1]).attribute(pixels, token=0)
    torch.testing.assert_close(row, ValueZeroing(model, layers[-1]).attribute(pixels)[:, 0])
