"""Layers that multiply the attention's output by a scale before they add it to the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2Attention

from tests.engine.blocks import WIDTH, Block, sequences
from tests.engine_folded.replays import Replays, lengthened
from tests.reference import FAMILIES as REFERENCE
from tests.reference import naive_value_zeroing
from tests.reference.case import Attention, Family
from tests.reference.families import ENCODER_SIZE
from tests.reference.inputs import noise

IMAGES: dict[str, Any] = {**ENCODER_SIZE, "image_size": 16, "patch_size": 4}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": noise(2, 3, 16, 16)}


def vision(model: str, layers: str, attention: Attention, **settings: Any) -> Family:
    return Family(model, IMAGES | settings, layers, attention, inputs=pixels, mask=None)


PATCHES = Attention("attention.v_proj", "attention.o_proj")
OLDER = Attention("attention.attention.value", "attention.output.dense")  # the names of transformers 5.16
IN_DINO = PATCHES if hasattr(Dinov2Attention(Dinov2Config()), "v_proj") else OLDER
FAMILIES = {
    "dinov2": vision("Dinov2Model", "encoder.layer", IN_DINO),
    "dinov2-gated": vision("Dinov2Model", "encoder.layer", IN_DINO, use_swiglu_ffn=True),
    "beit": vision("BeitModel", "layers", PATCHES, layer_scale_init_value=0.1),
    "granite": replace(REFERENCE["granite"], config=REFERENCE["granite"].config | {"residual_multiplier": 0.22}),
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    return Replays(monkeypatch)


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_scale_is_folded(name: str, replays: Replays) -> None:
    case = replace(FAMILIES[name], inputs=lambda: lengthened(FAMILIES[name].inputs())).build()
    replays.check_agree(case.model, case.layers, case.inputs)
    replays.check_agree(case.model, case.layers, case.inputs, heads=[0, 3])
    folded = replays.folded(case.model, case.layers[1:2], case.inputs)
    torch.testing.assert_close(folded[0], naive_value_zeroing(case, 1, normalize=False), rtol=0, atol=1e-10)


class Scaled(Block):
    """Multiplies the attention's output by `scale`, and cuts one feature of it at `limit`."""

    def __init__(self, scale: Tensor | float, limit: float = torch.inf) -> None:
        super().__init__()
        self.scale, self.limit = scale, limit

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(x), mask)
        self.largest = attended[..., 0].amax()  # a number read here would call for the definition
        attended = torch.cat([attended[..., :1].clamp(max=self.limit), attended[..., 1:]], dim=-1)
        x = x + attended * self.scale
        return x + self.feed_forward(self.norm(x))


@pytest.mark.parametrize("scale", [0.1, -2.0, torch.linspace(0, 1, WIDTH, dtype=torch.float64)], ids=str)
def test_scales_of_own_code(scale: Tensor | float, replays: Replays) -> None:
    block = Scaled(scale)
    replays.check_agree(block, [block], sequences(2, length=20))


@pytest.mark.parametrize("scale", [1e-3, 1e-5, 1e-6, 1e-7])
def test_tiny_scales_in_float32(scale: float, replays: Replays) -> None:
    """Folded or not, the error is at most twice that of the packed replay."""
    block, x = Scaled(scale), sequences(2, length=20)
    exact = replays.packed(block, [block], x, distance="euclidean")[0]
    folded = replays.folded(block.float(), [block], x.float(), distance="euclidean")[0]
    packed = replays.packed(block, [block], x.float(), distance="euclidean")[0]
    off, bound = ((maps.double() - exact).abs().max() for maps in (folded, packed))
    assert off <= 2 * bound


def test_limit_before_a_scale(replays: Replays) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        block, x = Scaled(0.1), torch.randn(1, 40, WIDTH, dtype=torch.float64)
        block(x)
        block.limit = float(block.largest) + 1e-6
        folded, packed = (maps(block, [block], x) for maps in (replays.folded, replays.packed))
        torch.testing.assert_close(folded, packed, rtol=0, atol=1e-14)
    assert replays.count == 0


class Switched(nn.Module):
    """A layer scale that differs at tokens whose first feature is large."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.where(x[..., :1] > self.bound, 0.2, 0.1)


def test_scale_that_differs_by_token(replays: Replays) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(1, 40, WIDTH, dtype=torch.float64)
    attended = block.attention(block.attention_norm(x))
    bound = float(attended[..., 0].flatten().sort().values[-3])
    block = Block(finish=lambda attention, context, x: Switched(bound)(attention.output(context)))
    folded = replays.folded(block, [block], x)
    assert replays.count == 0
    assert torch.equal(folded[0], replays.packed(block, [block], x)[0])
