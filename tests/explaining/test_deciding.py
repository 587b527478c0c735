"""The layer that decides: the one in which the explained token reads what the decision rests on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import captum_vz
from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.functional import word_mask
from captum_vz.study import compare
from captum_vz.testbed import load_model
from tests.explaining.models import joint, views

MASKED, PREFIX = "the pictures of some hat [MASK] scaring marcus.", "the pictures of some hat"
CASES = [("agreement", MASKED, "is"), ("pre-norm", MASKED, "is"), ("causal", PREFIX, "is")]


def by_hand(rows: list[list[float]], amounts: list[list[float]], place: int) -> list[float]:
    """Of each layer: which part of what the decision rests on its row lies on."""
    rests_on = joint(amounts, (0, place))
    return [sum(v * r for v, r in zip(row, rests_on, strict=True)) / sum(row) for row in rows]


@pytest.mark.parametrize(("name", "method"), [("value-zeroing", ValueZeroing), ("attention", LayerAttention)])
@pytest.mark.parametrize(("model_name", "text", "foil"), CASES)
def test_layer_agrees_most_with_the_decision(model_name: str, text: str, foil: str, name: str, method: Any) -> None:
    found = captum_vz.explain(model_name, text, method=name, target="are", foil=foil, layer="deciding")
    model, tokenizer = load_model(model_name)
    inputs, place = tokenizer(text, return_tensors="pt"), found.token
    assert place is not None
    are, other = tokenizer.convert_tokens_to_ids(["are", foil])
    rows = [row[0].tolist() for row in method(model, find_layers(model)).attribute(inputs, token=place)]
    products = by_hand(rows, views(model, inputs, (place, are), (place, other)), place)
    best = sorted(range(len(products)), key=lambda layer: -products[layer])
    assert found.layer == best[0]
    torch.testing.assert_close(found.scores, captum_vz.explain(model_name, text, method=name, layer=best[0]).scores)
    (told,) = (line for line in found.told if "decision rests on" in line)
    assert told.startswith(f"{name}: layer {best[0]} ")
    assert f"{products[best[0]]:.2f} of it; then layer {best[1]} {products[best[1]]:.2f}" in told


def test_words_are_one_source_each() -> None:
    text = "the unhappiness of some hat [MASK] scaring marcus."  # words of several tokens
    found = captum_vz.explain("agreement", text, target="are", foil="is", layer="deciding", words=True)
    model, tokenizer = load_model()
    inputs = tokenizer(text, return_tensors="pt")
    place, groups = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id), word_mask(inputs)
    are, other = tokenizer.convert_tokens_to_ids(["are", "is"])
    index = {"target": (place, are), "foil": (place, other)}
    effects = ValueZeroingEffect(model).attribute(inputs, feature_mask=groups, **index)[0]
    maps = ValueZeroing(model, find_layers(model)).attribute(inputs, token=place, feature_mask=groups)
    words = groups[0].tolist()
    firsts = [words.index(word) for word in dict.fromkeys(words)]
    rows, at = [row[0][firsts].tolist() for row in maps], list(dict.fromkeys(words)).index(words[place])
    by_word = [
        [sum(view[i] for i, one in enumerate(words) if one == word) for word in dict.fromkeys(words)]
        for view in views(model, inputs, index["target"], index["foil"])[1:]
    ]
    products = by_hand(rows, [effects[firsts].tolist(), *by_word], at)
    assert found.layer == products.index(max(products))


def test_compare_has_a_layer_for_each_method() -> None:
    methods = ["value-zeroing", "attention", "value-zeroing-rollout", "value-zeroing-effect"]
    found = compare("causal", PREFIX, methods, "are", foil="is", layer="deciding")
    for name in ("value-zeroing", "attention"):
        alone = captum_vz.explain("causal", PREFIX, method=name, target="are", foil="is", layer="deciding")
        assert found.parts[name].layer == alone.layer
        torch.testing.assert_close(found.parts[name].rows[0].scores, alone.scores)
    last = compare("causal", PREFIX, methods, "are", foil="is")
    for name in ("value-zeroing-rollout", "value-zeroing-effect"):
        torch.testing.assert_close(found.shares[name], last.shares[name])
    assert len(found.told) == 2


def test_what_a_decision_rests_on_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all methods of a table."""
    own, calls = ValueZeroingEffect.attribute, list[Any]()
    monkeypatch.setattr(
        ValueZeroingEffect, "attribute", lambda *args, **named: calls.append(args) or own(*args, **named)
    )
    compare("causal", PREFIX, ["value-zeroing", "attention", "attention-norm"], "are", foil="is", layer="deciding")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("agreement", {"method": "value-zeroing-rollout"}, "no scores of single layers"),
        ("agreement", {"method": "value-zeroing-effect-layer"}, "no scores of single layers"),
        ("agreement", {"window": 6}, "read whole"),
        ("agreement", {"layer": "deciding."}, "'deciding' or None"),
        ("minilm", {}, "a model with a head"),
    ],
)
def test_refusals(model: str, options: dict[str, Any], message: str) -> None:
    text = MASKED if model == "agreement" else "some hat is small."
    with pytest.raises(ArgumentError, match=message):
        captum_vz.explain(model, text, **({"layer": "deciding"} | options))
