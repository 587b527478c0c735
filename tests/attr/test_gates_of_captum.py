"""Classes of Captum on the gates of the embedded model: each equals the effect, a twin or a closed form."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from captum.attr import (
    FeatureAblation,
    IntegratedGradients,
    KernelShap,
    LayerConductance,
    LayerGradientXActivation,
    Lime,
    NeuronConductance,
    ShapleyValueSampling,
)
from torch import Tensor, nn

from captum_vz import ValueGates, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.testbed import load_model
from tests.captum.footprint import footprint
from tests.engine.compare import assert_same

MODEL, TOKENIZER = load_model()
TEXT = TOKENIZER("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
RIGHT, WRONG = TOKENIZER.convert_tokens_to_ids(["are", "is"])
PLACE = TEXT["input_ids"][0].tolist().index(TOKENIZER.mask_token_id)
GATES = torch.ones(TEXT["input_ids"].shape)


LAYERS = find_layers(MODEL)
TENSORS = TEXT["input_ids"], TEXT["attention_mask"]


OF_MODEL = ValueGates(MODEL, LAYERS)


def odds(gates: Tensor, *inputs: Any) -> Tensor:
    logits = OF_MODEL(gates, *inputs)
    return logits[:, PLACE, RIGHT] - logits[:, PLACE, WRONG]


def test_one_sentence_for_several_rows_of_gates() -> None:
    """As SHAP's explainers call a function."""
    gated, gates = ValueGates(MODEL), torch.rand(3, GATES.shape[1])
    expected = torch.cat([gated(one, TEXT) for one in gates.split(1)])
    for found in (gated(gates, TEXT), gated(gates, *TENSORS), gated(gates, **TEXT)):
        assert_same(found, expected, 1e-4)


def test_ablation_on_the_embedded_model() -> None:
    expected = ValueZeroingEffect(MODEL, LAYERS).attribute(TEXT, (PLACE, RIGHT), foil=(PLACE, WRONG))
    assert expected.abs().max() > 3
    for inputs, per_eval in ((TEXT, 1), (TENSORS, 4), (TENSORS, 100)):
        found = FeatureAblation(odds).attribute(GATES, additional_forward_args=inputs, perturbations_per_eval=per_eval)
        assert_same(found, expected, 4e-6 * expected.abs().max().item())


@pytest.mark.parametrize("size", [None, 7])
def test_integrated_gradients_are_complete(size: int | None) -> None:
    scores, delta = IntegratedGradients(odds).attribute(
        GATES, additional_forward_args=TENSORS, return_convergence_delta=True, internal_batch_size=size, n_steps=32
    )
    with torch.no_grad():
        change = odds(GATES, TEXT) - odds(0 * GATES, TEXT)
    assert delta.abs().max() < 1e-3
    assert_same(scores.sum(1).float(), change, 1e-3)
    assert change.abs().min() > 1


def test_shapley_values_are_complete() -> None:
    gates = torch.rand(GATES.shape)
    drawn = ShapleyValueSampling(odds).attribute(gates, additional_forward_args=TEXT, n_samples=2)
    assert_same(drawn.sum(1), (odds(gates, TEXT) - odds(0 * gates, TEXT)).detach(), 1e-4)


@pytest.mark.parametrize(
    "method",
    [
        lambda gated, given: LayerConductance(gated, LAYERS[1]).attribute(*given, n_steps=5),
        lambda gated, given: NeuronConductance(gated, LAYERS[1]).attribute(given[0], (PLACE, 0), *given[1:], n_steps=5),
        lambda gated, given: LayerGradientXActivation(gated, LAYERS[1]).attribute(given[0], *given[2:]),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_layer_methods_of_captum(method: Callable[..., Tensor], rows: int) -> None:
    """Layer methods keep what a module returns for the whole batch. They equal those of a model with scaled values."""
    gates = torch.linspace(0.3, 1.2, rows * GATES.shape[1]).view(rows, -1)
    ids = TEXT["input_ids"].repeat(rows, 1)

    class Twin(nn.Module):
        def forward(self, gates: Tensor, ids: Tensor) -> Tensor:
            with ExitStack() as stack:
                for layer in LAYERS:
                    value = layer.attention.self.value
                    handle = value.register_forward_hook(lambda module, args, out: out * gates[..., None])
                    stack.callback(handle.remove)
                return MODEL(ids).logits

    given = (gates, 0, (PLACE, RIGHT), ids)
    before = footprint(MODEL)
    assert_same(method(ValueGates(MODEL, LAYERS), given), method(Twin(), given), 1e-5)
    assert footprint(MODEL) == before


def test_layer_methods_on_functions_are_refused() -> None:
    """A function runs one row of gates at a time, so a layer method would see one row of the batch."""
    gated = ValueGates(lambda ids: MODEL(ids).logits, LAYERS)
    for module in (LAYERS[1], MODEL.get_input_embeddings()):
        with pytest.raises(RefusedError, match="gates runs alone"):
            LayerConductance(gated, module).attribute(GATES, 0, (PLACE, RIGHT), TEXT["input_ids"], n_steps=3)


def test_inputs_in_pieces() -> None:
    """KernelShap and Lime pass on the entries of what is no tuple. The subject has the largest score."""
    for kind in (KernelShap, Lime):
        for inputs in (TEXT, dict(TEXT), TEXT["input_ids"]):
            with pytest.raises(ArgumentError, match=r"_args=\(inputs,\)"):
                kind(odds).attribute(GATES, additional_forward_args=inputs, n_samples=4)
        torch.manual_seed(0)
        found = kind(odds).attribute(GATES, additional_forward_args=(TEXT,), n_samples=40, perturbations_per_eval=8)
        assert int(found.argmax()) == TEXT.tokens().index("pictures")


def test_ids_are_no_gates() -> None:
    for inputs in (TEXT, TENSORS):
        with pytest.raises(ArgumentError, match="gates holds token"):
            FeatureAblation(odds).attribute(TEXT["input_ids"], additional_forward_args=inputs)
    assert odds(GATES.long(), TEXT).shape == odds(GATES * 2, TEXT).shape == (1,)


def test_method_of_ours_on_gates_is_refused() -> None:
    """Two passes over the same layers at once. No number comes of it."""
    with pytest.raises(RefusedError):
        ValueZeroing(lambda ids: OF_MODEL(GATES, ids), LAYERS[-1]).attribute(TEXT["input_ids"])


def test_copies_and_pickles() -> None:
    gated = ValueGates(MODEL)
    expected = gated(GATES, TEXT)
    assert_same(expected, MODEL(**TEXT).logits, 1e-5)
    for other in (copy.copy(gated), copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        assert_same(other(GATES, TEXT), expected, 1e-5)
    assert gated.device == MODEL.device
    with pytest.raises(AttributeError):
        gated.nothing  # noqa: B018
