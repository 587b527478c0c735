"""A model on several devices: accelerate's hooks move tensors between layers, and replays run without these hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.big_modeling import attach_align_device_hook_on_blocks
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from torch import Tensor

from captum_vz import ALTILogit, ALTIPlus, ValueZeroing, ValueZeroingEffect, find_layers
from tests.captum.configurations import METHODS, ONE_THREAD_METHODS
from tests.captum.footprint import footprint
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.reference import FAMILIES, Case, Family
from tests.reference.alti_logit import LANGUAGE_MODELS
from tests.rehearsal.device import AVAILABLE, ELSEWHERE

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices made in Python")


def spread(family: Family) -> Case:
    """A model with all layers but the first on the second device, as `accelerate.dispatch_model` places them."""
    case = family.build()
    stack = family.layers
    places = {f"{stack}.{number}": ELSEWHERE for number in range(1, len(case.layers))}
    for place, _ in case.model.named_modules():
        holds_layers = f"{stack}.".startswith(place and f"{place}.")
        if not holds_layers and not any(place.startswith(layer) for layer in places):
            places[place] = torch.device("cpu")
    attach_align_device_hook_on_blocks(
        case.model, execution_device={"": torch.device("cpu"), **places}, offload=dict.fromkeys(places, False)
    )
    if hasattr(case.model.config, "use_cache"):
        case.model.config.use_cache = False  # an empty cache tensor is not made in Python
    return case


def tensors(answer: Any) -> list[Tensor]:
    return answer if isinstance(answer, list) else [answer]


@pytest.mark.parametrize("method", quick([one for one in METHODS if one not in ONE_THREAD_METHODS], ValueZeroing))
@pytest.mark.parametrize("name", quick(["bert", "gpt2", "llama", "bart-decoder"], "bert"))
def test_layers_on_two_devices(name: str, method: Any) -> None:
    case, whole = spread(FAMILIES[name]), FAMILIES[name].case
    before = footprint(case.model)
    wrappers = [(vars(module)["forward"], module._hf_hook) for module in case.layers]
    assert {p.device.type for p in case.layers[1].parameters()} == {ELSEWHERE.type}
    found = tensors(method(case.model, case.layers).attribute(case.inputs))
    expected = tensors(method(whole.model, whole.layers).attribute(whole.inputs))
    places = [one.device for one in found]
    assert places == ([torch.device("cpu")] + [ELSEWHERE] * (len(places) - 1))
    assert_same([one.cpu() for one in found], expected)
    assert footprint(case.model) == before
    assert [(vars(module)["forward"], module._hf_hook) for module in case.layers] == wrappers


def effect(case: Case) -> Any:
    return ValueZeroingEffect(case.model, case.layers).attribute(case.inputs, target=lambda output: output[0][:, -1, 0])


def effect_of_the_encoder(case: Case) -> Any:
    method = ValueZeroingEffect(case.model, case.layers, attention="cross")
    return method.attribute(case.inputs, target=lambda output: output[0][:, -1, 0])


def alti_plus(case: Case) -> Any:
    layers = [*find_layers(case.model, "encoder"), *case.layers]
    return ALTIPlus(case.model, layers).attribute(case.inputs)


def alti_logit(case: Case) -> Any:
    target, foil = ([(1, entry) for entry in entries] for entries in ((9, 9, 9), (10, 11, 12)))
    return ALTILogit(case.model, case.layers).attribute(case.inputs, target=target, foil=foil)


@pytest.mark.parametrize(
    ("explain", "family"),
    quick(
        [
            (effect, FAMILIES["bert"]),
            (effect, FAMILIES["gpt2"]),
            (effect_of_the_encoder, FAMILIES["bart-decoder"]),
            (alti_plus, FAMILIES["bart-decoder"]),
            (alti_logit, LANGUAGE_MODELS["gpt2"]),
            (alti_logit, LANGUAGE_MODELS["llama"]),
        ],
        (effect, FAMILIES["bert"]),
    ),
)
def test_aggregations_on_two_devices(explain: Any, family: Family) -> None:
    found, expected = (tensors(explain(case)) for case in (spread(family), family.case))
    assert {one.device.type for one in found} == {"cpu"}  # where the first layer is
    assert_same(found, expected)


def test_layer_with_several_hooks() -> None:
    case, whole = spread(FAMILIES["llama"]), FAMILIES["llama"].case
    add_hook_to_module(case.layers[1], ModelHook(), append=True)
    assert isinstance(case.layers[1]._hf_hook, SequentialHook)
    found = ValueZeroing(case.model, case.layers[1]).attribute(case.inputs)
    assert_same(found.cpu(), ValueZeroing(whole.model, whole.layers[1]).attribute(whole.inputs))
