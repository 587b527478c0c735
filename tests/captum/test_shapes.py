"""What comes back: one number a token, a list for a list of layers, a tuple for a tuple of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import HiddenTokenAttribution, ValueZeroing, ValueZeroingRollout
from tests.captum.configurations import CONFIGURATIONS, Configuration, each_method, tensors
from tests.reference.case import Case


def positions(case: Case) -> int:
    """How many tokens a map of this case has."""
    return 5 if "pixel_values" in case.inputs else case.inputs["input_ids"].shape[1]  # four patches and [CLS]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda one: one.name)
def test_rows_sum_to_one(configuration: Configuration) -> None:
    if configuration.options.get("normalize") is False:
        configuration = Configuration(configuration.method, configuration.family, configuration.inputs)
    real = configuration.case.mask(configuration.case.family.mask, positions(configuration.case))
    if "feature_mask" in configuration.attribute:
        groups = configuration.attribute["feature_mask"][0]
        first = torch.tensor([int(group) not in groups[:place].tolist() for place, group in enumerate(groups)])
    else:
        first = torch.ones_like(real[0])
    batch, tokens = real.shape
    for one in configuration.maps():
        assert one.shape == (batch, tokens, tokens)
        assert (one >= 0).all()
        # The tokens of a group all carry its score, so that a row adds up over groups.
        torch.testing.assert_close(one[..., first].sum(-1), real.to(one.dtype), rtol=1e-10, atol=1e-12)
        assert (one[~real] == 0).all()
        assert (one.mT[~real] == 0).all()


@each_method
def test_results_carry_no_gradient(method: Any) -> None:
    configuration = Configuration(method)
    for target in (None, 1, [2, 0, 1]):
        for one in configuration.maps(token=target):
            assert one.is_contiguous()
            assert not one.requires_grad
            assert one.dtype == torch.float64


LISTS: dict[str, Callable[[list[nn.Module]], Any]] = {"list": list, "tuple": tuple, "ModuleList": nn.ModuleList}


@pytest.mark.parametrize("inputs", ["tensor", "tuple", "mapping", "embeddings"])
def test_a_list_for_a_list(inputs: str) -> None:
    """Of maps. Each form of the inputs gives the same numbers."""
    configuration = Configuration(ValueZeroing, inputs=inputs)
    layers, expected = configuration.case.layers, Configuration(ValueZeroing).run()
    for form in LISTS.values():
        answer = ValueZeroing(configuration.forward_func, form(layers)).attribute(**configuration.arguments)
        assert isinstance(answer, list)
        torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-14)
    for layer in ([layers[1]], layers[1]):
        answer = ValueZeroing(configuration.forward_func, layer).attribute(**configuration.arguments)
        assert isinstance(answer, list if isinstance(layer, list) else Tensor)
        torch.testing.assert_close(tensors(answer)[0], expected[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inputs", ["tensor", "tuple", "mapping", "embeddings"])
def test_a_tuple_for_a_tuple(inputs: str) -> None:
    """Of rollouts, which answer one map for any list of layers."""
    configuration = Configuration(ValueZeroingRollout, inputs=inputs)
    expected = Configuration(ValueZeroingRollout).run()
    for form in (*LISTS.values(), lambda layers: layers[0]):
        layers = form(configuration.case.layers)
        answer = ValueZeroingRollout(configuration.forward_func, layers).attribute(**configuration.arguments)
        assert isinstance(answer, tuple if inputs == "tuple" else Tensor)
        assert all(isinstance(one, Tensor) for one in tensors(answer))
        assert inputs != "tuple" or len(answer) == len(configuration.arguments["inputs"])
        if not isinstance(layers, nn.Module) or isinstance(layers, nn.ModuleList):
            first = answer[0] if inputs == "tuple" else answer
            torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inputs", ["tensor", "tuple"])
def test_all_layers_are_shorter_stacks(inputs: str) -> None:
    configuration = Configuration(ValueZeroingRollout, inputs=inputs)
    steps = configuration.run(all_layers=True, token=1)
    assert isinstance(steps, list)
    assert len(steps) == len(configuration.case.layers)
    for depth, step in enumerate(steps, start=1):
        shorter = ValueZeroingRollout(configuration.forward_func, configuration.layer[:depth])
        expected = shorter.attribute(**configuration.arguments, token=1)
        assert type(step) is type(expected)
        torch.testing.assert_close(tensors(step), tensors(expected), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("per_eval", [1, 2, 7, 100])
@pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingRollout, HiddenTokenAttribution])
def test_perturbations_per_eval(method: Any, per_eval: int) -> None:
    for target in (None, [2, 0, 1]):
        expected = Configuration(method).maps(token=target)
        found = Configuration(method).maps(perturbations_per_eval=per_eval, token=target)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
