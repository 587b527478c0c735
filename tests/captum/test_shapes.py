"""What comes back: one number a token, a list for a list of layers, a tuple for a tuple of inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import HiddenTokenAttribution, ValueZeroing, ValueZeroingRollout
from tests.captum.configurations import (
    CONFIGURATIONS,
    METHODS,
    Configuration,
    tensors,
)
from tests.reference.case import Case

each_method = pytest.mark.parametrize("method", METHODS)
of_maps = pytest.mark.parametrize("method", [ValueZeroing])
of_rollouts = pytest.mark.parametrize("method", [ValueZeroingRollout])
each_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda one: one.name)


def positions(case: Case) -> int:
    """How many tokens a map of this case has."""
    return 5 if "pixel_values" in case.inputs else case.inputs["input_ids"].shape[1]  # four patches and [CLS]


@each_configuration
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


def layer_forms(layers: list[nn.Module]) -> dict[str, tuple[Any, int | None]]:
    """`layer` in every form, with how many maps a list must hold (None: no list)."""
    return {
        "module": (layers[1], None),
        "list": (layers, len(layers)),
        "list of one": ([layers[1]], 1),
        "tuple": (tuple(layers), len(layers)),
        "ModuleList": (nn.ModuleList(layers), len(layers)),
    }


@pytest.mark.parametrize("form", ["module", "list", "list of one", "tuple", "ModuleList"])
@pytest.mark.parametrize("inputs", ["tensor", "tuple", "mapping"])
@of_maps
def test_a_list_for_a_list(method: Any, inputs: str, form: str) -> None:
    configuration = Configuration(method, inputs=inputs)
    layer, count = layer_forms(configuration.case.layers)[form]
    answer = method(configuration.forward_func, layer).attribute(**configuration.arguments)
    if count is None:
        assert isinstance(answer, Tensor)
    else:
        assert isinstance(answer, list)
        assert len(answer) == count


@of_maps
def test_a_list_is_its_layers(method: Any) -> None:
    together = Configuration(method).run()
    for index, one in enumerate(together):
        torch.testing.assert_close(one, Configuration(method, layers=index).run(), rtol=1e-12, atol=1e-14)


@of_maps
def test_maps_keep_the_given_order(method: Any) -> None:
    configuration = Configuration(method)
    backwards = method(configuration.forward_func, configuration.layer[::-1]).attribute(**configuration.arguments)
    for one, other in zip(backwards[::-1], configuration.run(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", ["module", "list", "tuple", "ModuleList"])
@pytest.mark.parametrize("inputs", ["tensor", "tuple", "mapping"])
@of_rollouts
def test_a_tuple_for_a_tuple(method: Any, inputs: str, form: str) -> None:
    configuration = Configuration(method, inputs=inputs)
    layer, _ = layer_forms(configuration.case.layers)[form]
    answer = method(configuration.forward_func, layer).attribute(**configuration.arguments)
    if inputs == "tuple":
        assert isinstance(answer, tuple)
        assert len(answer) == len(configuration.arguments["inputs"])
    else:
        assert isinstance(answer, Tensor)
    assert all(isinstance(one, Tensor) for one in tensors(answer))


@pytest.mark.parametrize("inputs", ["tensor", "tuple"])
@of_rollouts
def test_all_layers_are_shorter_stacks(method: Any, inputs: str) -> None:
    configuration = Configuration(method, inputs=inputs)
    steps = configuration.run(all_layers=True, token=1)
    assert isinstance(steps, list)
    assert len(steps) == len(configuration.case.layers)
    for depth, step in enumerate(steps, start=1):
        shorter = method(configuration.forward_func, configuration.layer[:depth])
        expected = shorter.attribute(**configuration.arguments, token=1)
        assert type(step) is type(expected)
        for one, other in zip(tensors(step), tensors(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inputs", ["tuple", "mapping", "embeddings"])
@pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingRollout])
def test_forms_of_inputs_agree(method: Any, inputs: str) -> None:
    expected = Configuration(method).maps()
    for one, other in zip(Configuration(method, inputs=inputs).maps(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@of_maps
def test_one_further_argument(method: Any) -> None:
    configuration = Configuration(method)
    ids, mask = configuration.case.inputs.values()
    answer = configuration.build().attribute(ids, additional_forward_args=mask)
    for one, other in zip(tensors(answer), configuration.maps(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("per_eval", [1, 2, 7, 100])
@pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingRollout, HiddenTokenAttribution])
def test_perturbations_per_eval(method: Any, per_eval: int) -> None:
    for target in (None, [2, 0, 1]):
        expected = Configuration(method).maps(token=target)
        for one, other in zip(
            Configuration(method).maps(perturbations_per_eval=per_eval, token=target), expected, strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
