"""What Captum's wrappers do to a method: they put another forward function, or another layer, in its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from captum._utils.common import _get_module_from_name
from captum.concept import TCAV, Concept
from torch import Tensor, nn

from captum_vz import (
    ALTI,
    AttentionFlow,
    AttentionRollout,
    GlobEnc,
    LayerALTI,
    LayerAttention,
    LayerAttentionNorm,
    RandomAttribution,
    Rollout,
    ValueZeroingRollout,
)
from captum_vz.errors import ArgumentError
from tests.captum.configurations import LAYER_METHODS, STACK_METHODS, Configuration, each_of
from tests.engine.compare import assert_same
from tests.reference.families import FAMILIES


@pytest.mark.parametrize("method", [*STACK_METHODS, GlobEnc])
def test_a_rollout_runs_the_new_forward(method: Any) -> None:
    case = FAMILIES["bert"].case
    calls: list[Any] = []

    def forward(**inputs: Tensor) -> Any:
        calls.append(inputs)
        return case.model(**inputs)

    def never(**inputs: Tensor) -> Any:
        raise RuntimeError("replaced")

    attribution = method(never, case.layers)
    attribution.forward_func = forward
    found = attribution.attribute(case.inputs, token=2)
    assert len(calls) == 1
    assert attribution.maps.forward_func is forward
    torch.testing.assert_close(found, method(case.model, case.layers).attribute(case.inputs, token=2))


OPTIONS: list[tuple[Any, str, Any]] = [
    (ValueZeroingRollout, "distance", "euclidean"),
    (ValueZeroingRollout, "heads", [1]),
    (ValueZeroingRollout, "normalize", False),
    (AttentionRollout, "heads", [0, 2]),
    (AttentionFlow, "reduce_heads", "max"),
    (ALTI, "p", 2),
    (GlobEnc, "normalize", False),
]


@pytest.mark.parametrize(("method", "name", "value"), OPTIONS)
def test_options_of_the_maps(method: Any, name: str, value: Any) -> None:
    case = FAMILIES["bert"].case
    changed, built = method(case.model, case.layers), method(case.model, case.layers, **{name: value})
    setattr(changed, name, value)
    assert getattr(changed.maps, name) == value
    assert torch.equal(changed.attribute(case.inputs), built.attribute(case.inputs))
    setattr(changed.maps, name, getattr(method(case.model, case.layers), name))
    assert getattr(changed, name) == getattr(changed.maps, name)
    assert torch.equal(changed.attribute(case.inputs), method(case.model, case.layers).attribute(case.inputs))


LATER = [
    *((AttentionRollout, name) for name in ("other_mixing", "residual", "reduce_heads")),
    *((ValueZeroingRollout, name) for name in ("normalize", "distance")),
    *((method, name) for method in (ALTI, LayerALTI) for name in ("p", "include")),
    (LayerAttentionNorm, "include"),
]


@pytest.mark.all_cases
@pytest.mark.parametrize(("method", "name"), LATER)
def test_unknown_options_put_later(method: Any, name: str) -> None:
    case = FAMILIES["bert"].case
    rollout = method(case.model, case.layers)
    setattr(rollout, name, "unknown")
    with pytest.raises(ArgumentError, match=f"{name} is 'unk"):
        rollout.attribute(case.inputs)


def test_layers_of_the_maps() -> None:
    case = FAMILIES["bert"].case
    rollout = Rollout(LayerALTI(case.model, case.layers))
    for name, new in {"layer": [case.layers[0]], "device_ids": [0]}.items():
        setattr(rollout, name, new)
        assert getattr(rollout.maps, name) is new


def test_model_free_maps_roll_out() -> None:
    case = FAMILIES["bert"].case
    ids, rollout = case.inputs["input_ids"], Rollout(RandomAttribution(None, case.layers))
    (found,) = rollout.attribute((ids,), target=(1, 5))
    assert torch.equal(found, rollout.attribute(ids, token=1))
    with pytest.raises(ArgumentError, match="may name a class"):
        rollout.attribute(ids, target=1)


def test_computed_maps_join_twice() -> None:
    case = FAMILIES["gpt2"].case
    run = LayerAttention(case.model, case.layers).run(case.inputs, find_other_mixing=True)
    for method in (AttentionRollout, AttentionFlow):
        joined = method(case.model, case.layers)
        (last,) = joined.join_run(run, token=2)
        assert torch.equal(last, joined.attribute(case.inputs, token=2))
        assert torch.equal(joined.join_run(run, all_layers=True)[1], joined.attribute(case.inputs, all_layers=True)[1])


# TCAV sets the attribute `layer` of a method and calls the unlogged `attribute` with keywords. It multiplies the answer
# with a vector of the layer's activations, for which scores of tokens have no meaning. So TCAV itself is refused.


def unlogged(attribution: Any, configuration: Configuration) -> Any:
    """As TCAV calls a method."""
    arguments = dict(configuration.arguments)
    return attribution.attribute.__wrapped__(attribution, arguments.pop("inputs"), token=2, **arguments)


@each_of(LAYER_METHODS)
def test_layer_replaced_between_calls(method: Any) -> None:
    configuration = Configuration(method, layers=0)
    attribution = configuration.build()
    expected = Configuration(method).run(token=2)
    for index, name in enumerate(["encoder.layer.0", "encoder.layer.1", "encoder.layer.2"]):
        attribution.layer = _get_module_from_name(configuration.case.model, name)
        assert_same(unlogged(attribution, configuration), expected[index])
    attribution.layer = configuration.case.layers
    assert_same(unlogged(attribution, configuration), expected)


@each_of(STACK_METHODS)
def test_stack_of_a_rollout_replaced(method: Any) -> None:
    configuration = Configuration(method)
    attribution = configuration.build()
    for depth in (1, 3):
        attribution.layer = configuration.case.layers[:depth]
        shorter = method(configuration.forward_func, configuration.case.layers[:depth])
        expected = shorter.attribute(**configuration.arguments, token=2)
        assert torch.equal(unlogged(attribution, configuration), expected)


class LastHidden(nn.Module):
    """A model whose module `vector` has the activations of one token."""

    def __init__(self, model: nn.Module, position: int) -> None:
        super().__init__()
        self.model, self.vector, self.position = model, nn.Identity(), position

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.vector(self.model(inputs_embeds=embeddings).last_hidden_state[:, self.position])


def concepts(embeddings: Tensor) -> list[Concept]:
    """Two concepts that are far apart: inputs, and inputs with the opposite sign."""
    noisy = [embeddings + 0.01 * torch.randn_like(embeddings) for _ in range(8)]
    return [Concept(0, "given", noisy), Concept(1, "opposite", [-one for one in noisy])]


@each_of(LAYER_METHODS)
def test_tcav_refuses_scores_of_tokens(method: Any, tmp_path: Path) -> None:
    configuration = Configuration(method, inputs="embeddings", layers=2)
    # A copy, because rounding would change the weights that other tests share.
    model = LastHidden(copy.deepcopy(configuration.case.model).float(), position=2)
    embeddings = configuration.arguments["inputs"][:1].float()
    tcav = TCAV(model, ["vector"], save_path=str(tmp_path), layer_attr_method=method(model, None))
    with pytest.raises(ArgumentError, match="attr_method is"):
        tcav.interpret(embeddings, [concepts(embeddings)], target=0)
