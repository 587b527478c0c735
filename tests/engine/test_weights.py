"""The weights of an attention are the factors of its values, whatever its function returns as weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from captum_vz._engine.taps.handler import AttentionCall

BATCH, HEADS, OUT, SOURCES, WIDTH = 2, 4, 3, 7, 3


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


WEIGHTS = noise(BATCH, HEADS, OUT, SOURCES).softmax(-1)
SCALE = noise(BATCH, HEADS, OUT, 1).sigmoid()
SHARED_VALUES = noise(BATCH, HEADS // 2, SOURCES, WIDTH)


def attend(values: Tensor, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Attention that scales its context, but not the weights that it returns."""
    spread = values.repeat_interleave(2, dim=1)
    return (WEIGHTS @ spread * scale).transpose(1, 2), WEIGHTS


def used_by(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    context, weights = function(SHARED_VALUES)
    call = AttentionCall(None, SHARED_VALUES, function)
    return call.weights_used(nn.Identity(), context, weights)


def test_returned_weights_are_used() -> None:
    assert used_by(attend) is WEIGHTS


def test_scaled_context_shows_scaled_weights() -> None:
    torch.testing.assert_close(used_by(lambda values: attend(values, SCALE)), WEIGHTS * SCALE)


def test_merged_heads() -> None:
    def merged(values: Tensor) -> tuple[Tensor, Tensor]:
        context, weights = attend(values, SCALE)
        return context.flatten(2), weights

    torch.testing.assert_close(used_by(merged), WEIGHTS * SCALE)


def test_nonlinear_attention_is_refused() -> None:
    def squashed(values: Tensor) -> tuple[Tensor, Tensor]:
        context, weights = attend(values)
        return context.tanh(), weights

    with pytest.raises(AssertionError, match="attention function of Identity returns no sums of its values"):
        used_by(squashed)
