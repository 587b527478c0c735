"""The registry: one row is enough for a method, and its parts fit each other."""

from dataclasses import replace

import pytest
import torch
from captum.attr import IntegratedGradients, ShapleyValueSampling
from torch import Tensor

from captum_vz import LayerAttention, ValueGates, find_layers
from captum_vz.functional import normalize_rows
from captum_vz.methods import Question
from captum_vz.study import METHODS, compare
from captum_vz.subjects import Subject
from tests.study.conftest import Shipped

SENTENCE = "the pictures of some hat [MASK] scaring marcus."


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("value-zeroing", "layer 2"),
        ("alti", "layers 0 to 2"),
        ("value-zeroing-rollout", "layers 0 to 2, residual 0.5"),
        ("value-zeroing-rollout-paper", "layers 0 to 2, no residual"),
        ("attention-flow", "all layers, residual 0.5"),
        ("value-zeroing-effect", ""),
        ("value-zeroing-effect-layer", "layer 2"),
        ("integrated-gradients", ""),
        ("random", ""),
    ],
)
def test_scope_names_the_layers_shown(name: str, scope: str) -> None:
    assert METHODS[name].scope(2) == scope


def test_maps_are_computed_once(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = shipped
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    subject, question = Subject(model, model, find_layers(model), tokenizer), Question(inputs, 6)
    METHODS["attention-rollout"].scores(subject, question)
    monkeypatch.setattr(LayerAttention, "attribute", None)
    monkeypatch.setattr(LayerAttention, "run", None)  # so there is no other pass
    whole = METHODS["attention"].layer_maps(subject, replace(question, token=3))
    torch.testing.assert_close(METHODS["attention"].scores(subject, question)[1], whole[1][0, 6])


KINDS = {
    "value-zeroing-shapley": (ShapleyValueSampling, {"n_samples": 5}),
    "value-zeroing-integrated": (IntegratedGradients, {"n_steps": 8}),
}


@pytest.mark.parametrize("name", KINDS)
def test_gated_rows_are_captums(name: str, shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    for option, count in KINDS[name][1].items():
        monkeypatch.setitem(METHODS[name].options, option, count)  # type: ignore[arg-type]  # it is a dict
    model, tokenizer = shipped
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    right, wrong = tokenizer.convert_tokens_to_ids(["are", "is"])
    gated, (kind, options) = ValueGates(model, find_layers(model)), KINDS[name]

    def choice(gates: Tensor) -> Tensor:
        logits = gated(gates, inputs)[:, 6]
        return logits[:, right] - logits[:, wrong]

    before = torch.get_rng_state()
    found = compare((model, tokenizer), SENTENCE, name, target="are", foil="is").shares[name]
    again = compare((model, tokenizer), SENTENCE, name, target="are", foil="is").shares[name]
    assert torch.equal(found, again)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    scores = kind(choice).attribute(torch.ones(inputs["input_ids"].shape), **options)
    torch.testing.assert_close(found.float(), normalize_rows(scores.abs())[0].float(), rtol=1e-3, atol=1e-4)
    assert inputs.tokens()[found.argmax()] == "pictures"
