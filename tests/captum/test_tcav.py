"""TCAV sets the attribute `layer` of a method and calls the unlogged `attribute` with keywords."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum._utils.common import _get_module_from_name

from tests.captum.configurations import LAYER_METHODS, STACK_METHODS, Configuration


@pytest.mark.parametrize("method", LAYER_METHODS)
def test_layer_replaced_between_calls(method: Any) -> None:
    configuration = Configuration(method, layers=0)
    attribution = configuration.build()
    for index, name in enumerate(["encoder.layer.0", "encoder.layer.1", "encoder.layer.2"]):
        attribution.layer = _get_module_from_name(configuration.case.model, name)
        answer = attribution.attribute.__wrapped__(
            attribution,
            configuration.arguments["inputs"],
            token=2,
            additional_forward_args=configuration.arguments["additional_forward_args"],
            attribute_to_layer_input=False,
        )
        assert torch.equal(answer, Configuration(method, layers=index).run(token=2))


@pytest.mark.parametrize("method", LAYER_METHODS)
def test_layer_replaced_by_a_list(method: Any) -> None:
    configuration = Configuration(method, layers=0)
    attribution = configuration.build()
    attribution.layer = configuration.case.layers
    answers = attribution.attribute(**configuration.arguments)
    for answer, expected in zip(answers, Configuration(method).run(), strict=True):
        assert torch.equal(answer, expected)


@pytest.mark.parametrize("method", STACK_METHODS)
def test_stack_of_a_rollout_replaced(method: Any) -> None:
    configuration = Configuration(method)
    attribution = configuration.build()
    for depth in (1, 2, 3):
        attribution.layer = configuration.case.layers[:depth]
        answer = attribution.attribute.__wrapped__(attribution, **configuration.arguments, token=2)
        shorter = method(configuration.forward_func, configuration.case.layers[:depth])
        assert torch.equal(answer, shorter.attribute(**configuration.arguments, token=2))
