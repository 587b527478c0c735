"""Names and their order: a script that uses Captum changes one line."""

from __future__ import annotations

import inspect
import re
from typing import Any

import captum.attr
import pytest

import captum_vz
from tests.captum import configurations
from tests.captum.configurations import POST_NORM_METHODS, AttentionGradient, Configuration, cubes
from tests.engine.parameters import sampled

SHARED = ["self", "forward_func", "layer", "device_ids"]
DEFAULTS = {
    "device_ids": None,
    "distance": "cosine",
    "attention": "self",
    "normalize": True,
    "multiply_by_inputs": False,
    "final_norm": None,
    "values": None,
    "intervention": "zero",
    "other_mixing": "refuse",
    "per_receptive_field": False,
}
ATTRIBUTE = {
    "inputs": inspect.Parameter.empty,
    "target": None,
    "additional_forward_args": None,
    "feature_mask": None,
    "attribute_to_layer_input": False,
    "perturbations_per_eval": None,
    "show_progress": False,
}
NAMES = {"LayerALTI": "Layer ALTI", "ALTIPlus": "ALTI Plus", "ALTILogit": "ALTI Logit"}
RESIDUALS = {"ValueZeroingRollout": None, "AttentionRollout": 0.5, "AttentionFlow": 0.5, "GlobEnc": None, "ALTI": None}

ITSELF = {AttentionGradient: captum_vz.LayerAttentionGradient}
LAYER_METHODS = tuple(ITSELF.get(method, method) for method in configurations.LAYER_METHODS)
STACK_METHODS = (*configurations.STACK_METHODS, *POST_NORM_METHODS)
# The last one's target is a class, so that it is not in the tables of methods that draw maps.
METHODS = (*LAYER_METHODS, *STACK_METHODS, captum_vz.ValueZeroingEffect)
OF_OTHER_MODELS = (captum_vz.ALTIPlus, captum_vz.ALTILogit)  # than those that all the others run on
EXPLAINING_OUTPUTS = (captum_vz.ValueZeroingEffect, captum_vz.ALTILogit, captum_vz.LayerAttentionGradient)
OF_NUMBER = {"target": cubes}
each_method = pytest.mark.parametrize("method", [*METHODS, *OF_OTHER_MODELS])


def configuration_of(method: Any) -> Configuration:
    return Configuration(method, attribute=OF_NUMBER if method is captum_vz.LayerAttentionGradient else {})


@pytest.mark.all_cases
@each_method
def test_constructor_signature(method: Any) -> None:
    parameters = inspect.signature(method.__init__).parameters
    assert list(parameters)[: len(SHARED)] == SHARED
    for name, parameter in parameters.items():
        by_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert by_keyword == (name not in SHARED)
        if name in DEFAULTS:
            assert parameter.default == DEFAULTS[name]
    if method in STACK_METHODS:
        assert parameters["residual"].default == RESIDUALS[method.__name__]


@pytest.mark.all_cases
@each_method
def test_attribute_follows_captums_argument_order(method: Any) -> None:
    parameters = inspect.signature(method.attribute).parameters
    joins = method in (*STACK_METHODS, captum_vz.ALTIPlus)
    own: dict[str, Any] = {"foil": None} if method in EXPLAINING_OUTPUTS else {}
    # ALTILogit names tokens by its target, and reads the terms of one stack of layers.
    logit = method is captum_vz.ALTILogit
    own |= ({} if logit else {"token": None}) | ({"all_layers": False} if joins else {})
    own |= {} if logit else {"run": None}
    assert {name: parameter.default for name, parameter in parameters.items() if name != "self"} == ATTRIBUTE | own
    assert list(parameters) == ["self", *ATTRIBUTE, *own]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in own)


def test_value_zeroing_follows_feature_ablation() -> None:
    ablation = list(inspect.signature(captum.attr.FeatureAblation.attribute).parameters)
    ablation.remove("baselines")  # a value that is zeroed needs none
    shared = ablation[: ablation.index("feature_mask") + 1]
    assert list(inspect.signature(captum_vz.ValueZeroing.attribute).parameters)[: len(shared)] == shared


@each_method
def test_captums_bases_attributes_and_methods(method: Any) -> None:
    assert issubclass(method, captum.attr.PerturbationAttribution)
    assert issubclass(method, captum.attr.LayerAttribution) == (method in LAYER_METHODS)
    # NoiseTunnel and TCAV call it, so that their inner calls are not logged.
    assert inspect.isfunction(method.attribute.__wrapped__)
    configuration = configuration_of(method)
    attribution = method(configuration.forward_func, configuration.layer, [0], **configuration.options)
    assert attribution.layer is configuration.layer
    assert attribution.device_ids == [0]
    assert callable(attribution.forward_func)
    name = re.sub("(?<=[a-z])(?=[A-Z])", " ", method.__name__)  # no space inside of "ALTI"
    assert attribution.get_name() == method.get_name() == NAMES.get(method.__name__, name)
    assert attribution.has_convergence_delta() is False
    assert attribution.multiplies_by_inputs is False
    with pytest.raises(NotImplementedError, match="is not implemented"):
        attribution.attribute_future(**configuration.arguments)


@pytest.mark.parametrize("method", sampled(METHODS[:-1], captum_vz.ValueZeroing))
def test_show_progress_counts_the_layers(method: Any, capsys: pytest.CaptureFixture[str]) -> None:
    configuration = configuration_of(method)
    configuration.run(token=1, show_progress=True)
    shown = capsys.readouterr().err
    assert f"{len(configuration.case.layers)}/{len(configuration.case.layers)}" in shown
    assert "attribution" in shown
    configuration.run(token=1)
    assert capsys.readouterr().err == ""


def test_name_of_a_users_class() -> None:
    """Wherever the class stands. A private class has the name of its first public base."""
    own = type("NearestSource", (captum_vz.ValueZeroingRollout,), {"__module__": "package._methods"})
    assert own.get_name() == "Nearest Source"
    assert type("_Hidden", (own,), {}).get_name() == "Nearest Source"
