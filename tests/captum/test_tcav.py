"""TCAV sets the attribute `layer` of a method and calls the unlogged `attribute` with keywords.

It multiplies the answer with a vector of the layer's activations, for which scores of tokens have no meaning. So TCAV
itself is refused. Its concept vectors can be a `distance` of Value Zeroing.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from captum._utils.common import _get_module_from_name
from captum.concept import TCAV, Concept
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz.errors import ArgumentError
from tests.captum.configurations import LAYER_METHODS, STACK_METHODS, Configuration
from tests.engine.compare import assert_same


def unlogged(attribution: Any, configuration: Configuration) -> Any:
    """As TCAV calls a method."""
    arguments = dict(configuration.arguments)
    return attribution.attribute.__wrapped__(attribution, arguments.pop("inputs"), token=2, **arguments)


@pytest.mark.parametrize("method", LAYER_METHODS)
def test_layer_replaced_between_calls(method: Any) -> None:
    configuration = Configuration(method, layers=0)
    attribution = configuration.build()
    expected = Configuration(method).run(token=2)
    for index, name in enumerate(["encoder.layer.0", "encoder.layer.1", "encoder.layer.2"]):
        attribution.layer = _get_module_from_name(configuration.case.model, name)
        assert_same(unlogged(attribution, configuration), expected[index])
    attribution.layer = configuration.case.layers
    assert_same(unlogged(attribution, configuration), expected)


@pytest.mark.parametrize("method", STACK_METHODS)
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


@pytest.mark.parametrize("method", LAYER_METHODS)
def test_tcav_refuses_scores_of_tokens(method: Any, tmp_path: Path) -> None:
    configuration = Configuration(method, inputs="embeddings", layers=2)
    # A copy, because rounding would change the weights that other tests share.
    model = LastHidden(copy.deepcopy(configuration.case.model).float(), position=2)
    embeddings = configuration.arguments["inputs"][:1].float()
    tcav = TCAV(model, ["vector"], save_path=str(tmp_path), layer_attr_method=method(model, None))
    with pytest.raises(ArgumentError, match="layer_attr_method is"):
        tcav.interpret(embeddings, [concepts(embeddings)], target=0)


def test_concept_vector_as_distance() -> None:
    """The distance along a vector equals the projection of what hooks change."""
    case = Configuration(ValueZeroing, inputs="embeddings", layers=2)
    embeddings, further = case.arguments.values()
    layer, vector = case.layer, torch.randn(embeddings.shape[-1], dtype=embeddings.dtype)
    along = ValueZeroing(
        case.forward_func, layer, normalize=False, distance=lambda zeroed, clean: ((zeroed - clean) @ vector).abs()
    )
    row = along.attribute(embeddings, token=2, additional_forward_args=further)

    def output(zeroed: int | None) -> Tensor:
        kept: list[Tensor] = []
        columns = torch.tensor([] if zeroed is None else [zeroed], dtype=torch.long)
        zero = layer.attention.self.value.register_forward_hook(lambda m, i, values: values.index_fill(1, columns, 0))
        keep = layer.register_forward_hook(lambda m, i, out: kept.append(out[0] if isinstance(out, tuple) else out))
        with torch.no_grad(), zero, keep:
            case.forward_func(embeddings, *further)
        return kept[0][0, 2]

    for j in range(row.shape[1]):
        assert row[0, j].item() == pytest.approx(abs((output(j) - output(None)) @ vector).item(), rel=1e-8, abs=1e-12)
