"""Text that an offloaded, a quantised and a half-precision model generates: rows are those of the model itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingRollout
from captum_vz.generation import GenerationAttribution, attribute_generation
from tests.engine.test_surroundings import Int8Linear
from tests.generation.models import NEW, PROMPT, case_of, tokenizer_of_words

METHODS = [ValueZeroing, ValueZeroingRollout, LayerAttention]


def found_by(method: Any, model: nn.Module, **options: Any) -> GenerationAttribution:
    found: GenerationAttribution = attribute_generation((model, tokenizer_of_words()), PROMPT, method, **options)
    return found


def assert_same(found: GenerationAttribution, expected: GenerationAttribution) -> None:
    assert found.generated == expected.generated
    for one, other in ((found.scores, expected.scores), (found.prefix, expected.prefix)):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_offloaded(method: Any) -> None:
    model = case_of("llama", torch.float32).model
    offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert_same(found_by(method, offloaded, max_new_tokens=3), found_by(method, model, max_new_tokens=3))


@pytest.mark.parametrize("method", METHODS)
def test_quantised(method: Any) -> None:
    quantised, rounded = (copy.deepcopy(case_of("llama", torch.float32).model) for _ in range(2))
    for layer, other in zip(quantised.model.layers, rounded.model.layers, strict=True):
        layer.self_attn.v_proj = Int8Linear(layer.self_attn.v_proj)
        other.self_attn.v_proj.weight.data = layer.self_attn.v_proj.dequantized(torch.float32)
    assert_same(found_by(method, quantised, max_new_tokens=3), found_by(method, rounded, max_new_tokens=3))


def test_bfloat16() -> None:
    """Rows are those of the maps of the finished text in bfloat16, and within its rounding those in float32."""
    case = case_of("llama", torch.bfloat16)
    found = found_by(ValueZeroing, case.model, generated=NEW)
    maps = ValueZeroing(case.model, case.layers).attribute(torch.tensor([PROMPT + NEW[:-1]]))
    expected = torch.stack([one[0, len(PROMPT) - 1 :, : len(PROMPT)] for one in maps], dim=-1)
    torch.testing.assert_close(torch.as_tensor(found.scores), expected, rtol=1e-4, atol=1e-5)
    plain = found_by(ValueZeroing, case_of("llama", torch.float32).model, generated=NEW)
    torch.testing.assert_close(torch.as_tensor(found.scores), torch.as_tensor(plain.scores), rtol=0, atol=0.03)
