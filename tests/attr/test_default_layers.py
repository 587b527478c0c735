"""Without `layer`, a method explains the layers that `find_layers` returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartModel

from captum_vz import ALTIPlus, GlobEnc, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from tests.captum.configurations import LAYER_METHODS, METHODS
from tests.engine.compare import assert_same
from tests.reference.families import FAMILIES


def first_token(output: Any) -> Tensor:
    found: Tensor = output.last_hidden_state[:, 0].sum(-1)
    return found


@pytest.mark.filterwarnings("ignore:.*no source changes:UserWarning")
@pytest.mark.parametrize("method", [*METHODS, GlobEnc, ValueZeroingEffect])
def test_model_alone_is_enough(method: Any) -> None:
    case = FAMILIES["bert"].case
    options = {"target": first_token} if method is ValueZeroingEffect else {}
    expected = method(case.model, find_layers(case.model)).attribute(case.inputs, **options)
    found = method(case.model).attribute(case.inputs, **options)
    assert isinstance(found, list) == (method in LAYER_METHODS)
    assert_same(found, expected)


def test_both_stacks_of_alti_plus() -> None:
    size = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartModel(BartConfig(vocab_size=30, **size, **heads)).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "decoder_input_ids": torch.tensor([[2, 9, 10]])}
    both = [*find_layers(model, "encoder"), *find_layers(model, "decoder")]
    assert torch.equal(ALTIPlus(model).attribute(inputs), ALTIPlus(model, both).attribute(inputs))


def test_layers_that_cannot_be_found() -> None:
    for forward_func, error, message in (
        (len, ArgumentError, "is a function"),
        ("bert", ArgumentError, "is 'bert': pass"),
        (nn.Linear(2, 2), UnsupportedLayerError, "Linear has no stack"),
        (nn.Transformer(8, 2, 1, 1), ArgumentError, "has several stacks"),
    ):
        for method in (ValueZeroing, ValueZeroingRollout, ValueZeroingEffect):
            with pytest.raises(error, match=message):
                method(forward_func)
