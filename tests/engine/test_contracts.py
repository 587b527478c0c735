"""What parts of the engine refuse or pass on by themselves, without a model around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz._engine.capture import AttentionRecord, AttentionShape
from captum_vz._engine.capture.interventions import FillSlots, Intervene
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_same_attention
from captum_vz._engine.replay import ZERO
from captum_vz._engine.replay.packed import AnswerContext, ModuleAnswer
from captum_vz._engine.taps.handler import AttentionCall
from captum_vz._engine.taps.projection import BERT_LIKE, InlineValues
from tests.reference import FAMILIES

SHAPE = AttentionShape(batch=1, heads=2, out=3, sources=3)


def record(**fields: Any) -> AttentionRecord:
    values = torch.arange(24.0).view(1, 2, 3, 4)
    return AttentionRecord(nn.Identity(), SHAPE, values, None, **fields)


def inline(columns: list[slice]) -> AttentionRecord:
    values = InlineValues(BERT_LIKE, nn.Identity(), None, columns, [0.0] * len(columns))
    return replace(record(), values=torch.ones(1, 3, 8), inline=values)


def call(values: Tensor) -> AttentionCall:
    weights = torch.full((1, 2, 3, 3), 1 / 3)
    return AttentionCall(None, values, lambda values: ((weights @ values).transpose(1, 2), weights), None)


def test_a_context_is_given_once() -> None:
    answer = ModuleAnswer(record())
    answer.context = torch.ones(1, 3, 8)
    with pytest.raises(CannotReplayError, match="never asked for its"):
        answer.check_used()
    assert torch.equal(answer(None), torch.ones(1, 3, 8))
    answer.check_used()
    with pytest.raises(CannotReplayError, match="attention more than"):
        answer(None)


def test_later_calls_are_computed() -> None:
    answer, values = AnswerContext((2, 4)), torch.randn(1, 2, 3, 4)
    answer.context = torch.ones(1, 3, 8)
    assert torch.equal(answer.on_attention(call(values))[0], torch.ones(1, 3, 2, 4))
    expected = values.mean(2)[:, None].expand(1, 3, 2, 4)
    torch.testing.assert_close(answer.on_attention(call(values))[0], expected)


def test_attention_that_is_not_called_again() -> None:
    handler = Intervene(record(), torch.zeros(1, 2, 3, dtype=torch.bool), ZERO)
    with pytest.raises(CannotReplayError, match="asked for 0 times"):
        handler.check_called()
    slots = FillSlots(record(), torch.zeros(1, 3, dtype=torch.bool))
    with pytest.raises(CannotReplayError, match="for other values"):
        slots.check_all_filled()


def test_heads_that_share_values_inline() -> None:
    attention = inline([slice(0, 8), slice(0, 8)])
    one_head = torch.tensor([[[True] * 3, [False] * 3]])
    with pytest.raises(CannotReplayError, match="some heads alone"):
        Intervene(attention, one_head, ZERO).change_values(torch.ones(1, 3, 8))
    slots = FillSlots(attention, torch.ones(1, 3, dtype=torch.bool), heads=torch.tensor([True, False]))
    with pytest.raises(CannotReplayError, match="some heads alone"):
        slots.on_exit(attention.inline.projection, (), torch.ones(1, 3, 8))  # type: ignore[union-attr]  # it has one
    both = torch.ones(1, 3, 8)
    Intervene(attention, one_head | True, ZERO).change_values(both)
    assert not both.any()


def test_results_that_are_another_attention() -> None:
    expected = torch.randn(2, 3)
    assert is_same_attention(expected * (1 + 1e-7), expected)
    assert not is_same_attention(None, expected)
    assert not is_same_attention(expected[:1], expected)
    assert not is_same_attention(torch.where(expected == expected[0, 0], torch.nan, expected), expected)


def test_a_row_of_padding_alone() -> None:
    case = FAMILIES["bert"].build()
    mask = torch.ones_like(case.inputs["input_ids"])
    mask[:, -1] = 0
    inputs = {"input_ids": case.inputs["input_ids"], "attention_mask": mask}
    row = ValueZeroing(case.model, case.layers[0]).attribute(inputs, token=-1)
    assert row.shape == mask.shape and not row.any()


# The weights of an attention are the factors of its values, whatever its function returns as weights.
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

    with pytest.raises(AssertionError, match="sums of its values"):
        used_by(squashed)
