"""A model on several devices: accelerate's hooks move what goes from layer to layer, and replays go past them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.big_modeling import attach_align_device_hook_on_blocks
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from torch import Tensor
from torch.utils import backend_registration

from captum_vz import ValueZeroing
from tests.captum.configurations import METHODS, ONE_THREAD_METHODS
from tests.captum.footprint import footprint
from tests.engine.compare import assert_same
from tests.engine.elsewhere import second_device
from tests.reference import FAMILIES, Case

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_DummyDeviceGuard"), reason="this torch has no devices made in Python"
)


@pytest.fixture
def elsewhere() -> Iterator[torch.device]:
    with second_device() as device:
        yield device


def spread(name: str, elsewhere: torch.device) -> Case:
    """A model whose layers but the first are elsewhere, dispatched as `accelerate.dispatch_model` does it."""
    case = FAMILIES[name].build()
    stack = case.family.layers
    places = {f"{stack}.{number}": elsewhere for number in range(1, len(case.layers))}
    for place, _ in case.model.named_modules():
        holds_layers = f"{stack}.".startswith(place and f"{place}.")
        if not holds_layers and not any(place.startswith(layer) for layer in places):
            places[place] = torch.device("cpu")
    attach_align_device_hook_on_blocks(
        case.model, execution_device={"": torch.device("cpu"), **places}, offload=dict.fromkeys(places, False)
    )
    if hasattr(case.model.config, "use_cache"):
        case.model.config.use_cache = False  # a cache is begun by a tensor of nothing, which is not made in Python
    return case


def tensors(answer: Any) -> list[Tensor]:
    return answer if isinstance(answer, list) else [answer]


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ONE_THREAD_METHODS])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "bart-decoder"])
def test_layers_on_two_devices(name: str, method: Any, elsewhere: torch.device) -> None:
    case, whole = spread(name, elsewhere), FAMILIES[name].case
    before = footprint(case.model)
    wrappers = [(vars(module)["forward"], module._hf_hook) for module in case.layers]
    assert {p.device.type for p in case.layers[1].parameters()} == {elsewhere.type}
    found = tensors(method(case.model, case.layers).attribute(case.inputs))
    expected = tensors(method(whole.model, whole.layers).attribute(whole.inputs))
    places = [one.device for one in found]
    assert places == ([torch.device("cpu")] + [elsewhere] * (len(places) - 1))
    assert_same([one.cpu() for one in found], expected)
    assert footprint(case.model) == before
    assert [(vars(module)["forward"], module._hf_hook) for module in case.layers] == wrappers


def test_the_hook_of_a_layer_among_others(elsewhere: torch.device) -> None:
    case, whole = spread("llama", elsewhere), FAMILIES["llama"].case
    add_hook_to_module(case.layers[1], ModelHook(), append=True)
    assert isinstance(case.layers[1]._hf_hook, SequentialHook)
    found = ValueZeroing(case.model, case.layers[1]).attribute(case.inputs)
    assert_same(found.cpu(), ValueZeroing(whole.model, whole.layers[1]).attribute(whole.inputs))
