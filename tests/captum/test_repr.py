"""The `repr` of a method names its model, its layers, and the options that differ from their defaults."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from captum.attr import IntegratedGradients
from torch import nn

from captum_vz import (
    LayerAttentionNorm,
    PositionAttribution,
    RandomAttribution,
    Rollout,
    TokenAttribution,
    ValueGates,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
)
from tests.captum.configurations import METHODS, Configuration
from tests.reference.families import FAMILIES

CASE = FAMILIES["bert"].case
MODEL, LAYERS = CASE.model, CASE.layers


def far(one: Any, other: Any) -> Any:
    return (one - other).norm(dim=-1)


NAMED: list[tuple[Any, str]] = [
    (ValueZeroing(MODEL), "ValueZeroing(BertModel, layer=[encoder.layer.0, encoder.layer.1, encoder.layer.2])"),
    (
        ValueZeroing(MODEL, LAYERS[1], distance=far, heads=[0], normalize=False),
        "ValueZeroing(BertModel, layer=encoder.layer.1, distance=far, heads=[0], normalize=False)",
    ),
    (ValueZeroing(len, LAYERS[:2], [0, 1]), "ValueZeroing(len, layer=[BertLayer, BertLayer], device_ids=[0, 1])"),
    (ValueZeroingRollout(len, LAYERS[0], residual=0.5), "ValueZeroingRollout(len, layer=BertLayer, residual=0.5)"),
    (ValueZeroingEffect(len, nn.ModuleList(LAYERS * 2)), "ValueZeroingEffect(len, layer=[BertLayer, ..., BertLayer])"),
    (
        Rollout(LayerAttentionNorm(MODEL, LAYERS[2], include="encoder"), residual="add"),
        "Rollout(LayerAttentionNorm(BertModel, layer=encoder.layer.2, include='encoder'), residual='add')",
    ),
    (ValueZeroing(len, "encoder", values=torch.ones(2, 3)), "ValueZeroing(len, layer='encoder', values=Tensor(2, 3))"),
    (
        ValueZeroing(len, "encoder", distance=partial(far, other=far)),
        "ValueZeroing(len, layer='encoder', distance=partial(far, other=far))",
    ),
    (ValueGates(MODEL), "ValueGates(BertModel)"),
    (PositionAttribution(), "PositionAttribution()"),
    (RandomAttribution(causal=True), "RandomAttribution(causal=True)"),
    (
        TokenAttribution(MODEL, partial(IntegratedGradients, multiply_by_inputs=False), None, reduce="l2"),
        "TokenAttribution(BertModel, method=partial(IntegratedGradients, multiply_by_inputs=False), "
        "tokenizer=None, reduce='l2')",
    ),
]


def test_repr_names_what_was_passed() -> None:
    for method, expected in NAMED:
        assert repr(method) == expected


def test_repr_of_every_method() -> None:
    for method in METHODS:
        shown = repr(Configuration(method).build())
        assert shown.startswith(f"{method.__name__}(<lambda>, layer=[BertLayer, ")
        assert " at 0x" not in shown
