"""Methods and metrics that users pass: functions, objects, and every class of Captum and of this package."""

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import captum.attr
import numpy as np
import pytest
import torch
from torch import Tensor

import captum_vz as vz
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.generation import LLMTokenMaps
from captum_vz.study import (
    METHODS,
    METRICS,
    Batch,
    EvaluationBatch,
    Example,
    Metric,
    Scorer,
    as_method,
    compare,
    encode,
    register_method,
    register_metric,
)
from captum_vz.testbed import load_model
from tests.study.conftest import Shipped

pytestmark = pytest.mark.usefixtures("own_names", "undrawn")


OBJECTS: dict[Any, str] = {
    vz.ValueZeroing: "value-zeroing",
    vz.AttentionRollout: "attention-rollout",
    vz.ValueZeroingEffect: "value-zeroing-effect",
}


def uneven(batch: Batch) -> Tensor:
    """Scores of any sign and size, also at padding."""
    return -(batch.inputs["input_ids"].double() + 1)


def scored(shipped: Shipped, examples: list[Example], methods: Any, **options: Any) -> list[dict[str, Any]]:
    return Scorer(*shipped, methods, "cue_dot", **options).score(examples)


class Named:
    """A method that is neither captum's nor of this package."""

    def attribute(self, inputs: Any, token: Any = None) -> Any:
        assert len(token) == len(inputs["input_ids"])
        return -(inputs["input_ids"].double() + 1)


def built(model: Any, layers: Any) -> Named:
    assert vz.find_layers(model) == layers
    return Named()


FORMS: dict[str, Any] = {
    "tensor": uneven,
    "array": lambda batch: uneven(batch).numpy(),
    "lists": lambda batch: uneven(batch).tolist(),
    "integers": lambda batch: uneven(batch).long(),
    "class": Named,
    "object": Named(),
    "function": built,
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_shares(form: str, shipped: Shipped, examples: list[Example]) -> None:
    for row, example in zip(scored(shipped, examples[:4], {"mine": FORMS[form]}), examples[:4], strict=True):
        sizes = [number + 1 for number in encode(shipped[1], example).ids]
        assert row["scores"] == pytest.approx([size / sum(sizes) for size in sizes])
        (cue,) = row["cue"]
        assert row["cue_dot"] == pytest.approx(sizes[cue] / sum(sizes))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (vz.ValueZeroing, "value-zeroing"),
        (vz.AttentionRollout, "attention-rollout"),
        (vz.RandomAttribution, "random"),
        (vz.ValueZeroingEffect, "value-zeroing-effect"),
        (captum.attr.Saliency, "saliency"),
        (captum.attr.InputXGradient, "input-x-gradient"),
        (partial(vz.LayerAttention), "attention"),
        (METHODS["attention"], "attention"),
        *((lambda model, kind=kind: kind(model, vz.find_layers(model)), name) for kind, name in OBJECTS.items()),
    ],
)
def test_classes_and_objects_equal_the_registry(
    given: Any, name: str, shipped: Shipped, examples: list[Example]
) -> None:
    given = given(shipped[0]) if getattr(given, "__name__", "") == "<lambda>" else given
    expected = scored(shipped, examples[:3], name)
    found = scored(shipped, examples[:3], {"mine": given})
    assert [row["layer"] for row in found] == [row["layer"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row["skipped"] is None
        np.testing.assert_allclose(row["scores"], other["scores"], rtol=1e-4, atol=1e-6)


def test_captums_object_gets_ids_and_mask(shipped: Shipped, examples: list[Example]) -> None:
    model, tokenizer = shipped

    def logits(ids: Tensor, mask: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=mask).logits

    method = captum.attr.LayerGradientXActivation(logits, model.get_input_embeddings())
    for row, example in zip(scored(shipped, examples[:4], {"mine": method}), examples, strict=False):
        encoded = encode(tokenizer, example)
        ids = torch.tensor([encoded.ids])
        vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
        assert encoded.forms is not None
        model(inputs_embeds=vectors).logits[0, encoded.target, encoded.forms[0]].backward()
        assert vectors.grad is not None
        sizes = (vectors.grad * vectors).sum(dim=-1)[0].abs()
        np.testing.assert_allclose(row["scores"], (sizes / sizes.sum()).detach(), rtol=1e-3, atol=1e-5)


#: What a method returns for a batch of some sentences and tokens, and what the error says of it for 1 and 12.
WRONG: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "wider": (lambda count, tokens: torch.ones(count, tokens + 2), r"\(1, 14\) of torch.float32"),
    "maps": (lambda count, tokens: torch.ones(count, tokens, tokens), r"\(1, 12, 12\) of torch.float32"),
    "none": (lambda count, tokens: None, "an object of type NoneType"),
    "infinite": (lambda count, tokens: torch.full((count, tokens), torch.inf), "a row with the sum inf"),
    "lengths": (lambda count, tokens: [[0.5] * 12, [1.0]], "an object of type list"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_rows_are_an_error(kind: str, shipped: Shipped, examples: list[Example]) -> None:
    returned, came = WRONG[kind]
    assert len(encode(shipped[1], examples[0]).ids) == 12
    methods = {"bad": lambda batch: returned(*batch.inputs["input_ids"].shape), "position": "position"}
    rows = scored(shipped, examples[:2], methods)
    skipped = [row for row in rows if row["skipped"] is not None]
    assert [(row["method"], row["example"]) for row in skipped] == [("bad", one.id) for one in examples[:2]]
    told = f"^method 'bad', example 'anaphor 0': the method returned {came}.*; expected "
    assert re.search(told, skipped[0]["skipped"])
    assert [row["skipped"] for row in rows if row["method"] == "position"] == [None, None]


def careless(batch: Batch) -> Tensor:
    scores = torch.ones(batch.inputs["input_ids"].shape)
    batch.inputs["input_ids"].zero_()
    batch.inputs["attention_mask"].zero_()
    batch.token[:] = [0] * len(batch.token)
    return scores


def test_method_that_changes_its_batch_harms_no_other(shipped: Shipped, examples: list[Example]) -> None:
    names = ["value-zeroing", "value-zeroing-rollout", "saliency"]
    rows = scored(shipped, examples[:3], [careless, *names])
    assert [row for row in rows if row["method"] != "careless"] == scored(shipped, examples[:3], names)


def largest(batch: EvaluationBatch, rows: Tensor) -> Tensor:
    return rows.max(-1).values


def test_metric_that_changes_its_rows_harms_no_other(shipped: Shipped, examples: list[Example]) -> None:
    def careless(batch: EvaluationBatch, rows: Tensor) -> Tensor:
        if batch.encoded:
            batch.effects_of().zero_()
            batch.inputs["input_ids"].zero_()
        for one in (batch.attended, batch.cues, batch.content):
            one.zero_()
        return rows.zero_().sum(-1)

    names = ["cue_ap", "blank_out", "sensitivity"]
    others = {name: METRICS[name] for name in names}
    first = {
        "of cues": Metric("", careless, needs_cue=True),
        "of forms": Metric("", careless, needs_forms=True),
        "of the model": Metric("", careless, runs_model=True),
    }
    with_it = Scorer(*shipped, ["attention", "position"], first | others).score(examples[:3])
    without = Scorer(*shipped, ["attention", "position"], others).score(examples[:3])
    assert [{name: row[name] for name in names} for row in with_it] == [
        {name: row[name] for name in names} for row in without
    ]


def test_failing_metric_costs_its_numbers(shipped: Shipped, examples: list[Example]) -> None:
    def picky(batch: EvaluationBatch, rows: Tensor) -> Tensor:
        if any(example.id == examples[1].id for example in batch.examples):
            raise ZeroDivisionError("nothing here")
        return rows.max(-1).values

    scorer = Scorer(*shipped, ["position", "random"], {"picky": picky, "largest": largest})
    rows = scorer.score(examples[:3])
    skipped = [row for row in rows if row["skipped"] is not None]
    assert {(row["example"], row["metric"], row["skipped"]) for row in skipped} == {
        (examples[1].id, "picky", "ZeroDivisionError: nothing here")
    }
    assert [row["method"] for row in skipped] == ["position", "random"]
    for row in rows:
        if row["skipped"] is None:
            assert row["picky"] == (None if row["example"] == examples[1].id else row["largest"])


@pytest.mark.parametrize(
    ("values", "came"),
    [(torch.ones(3), r"\(3,\)"), (torch.full((1, 1), torch.inf), "infinity"), (None, "an object of type NoneType")],
)
def test_wrong_metric_is_an_error(values: Any, came: str, shipped: Shipped, examples: list[Example]) -> None:
    rows = Scorer(*shipped, ["random"], {"bad": lambda batch, rows: values}).score(examples[:1])
    assert rows[0]["bad"] is None
    told = f"^metric 'bad', example 'anaphor 0': the metric returned {came}.*expected finite numbers or NaN"
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(rows[1]["skipped"])


def test_registered_names_are_unique(shipped: Shipped, examples: list[Example]) -> None:
    register_method("mine", uneven, title="my own")
    register_metric("largest", largest)
    register_method("mine", uneven)  # a notebook's cell runs twice
    (row,) = Scorer(*shipped, ["mine"], ["largest"]).score(examples[:1])
    assert row["largest"] == max(row["scores"])
    with pytest.raises(ArgumentError, match="'uneven' twice"):
        Scorer(*shipped, [uneven, uneven, partial(uneven)], "cue_dot")
    with pytest.raises(ArgumentError, match="'random' twice"):
        Scorer(*shipped, {"random": uneven}, "cue_dot")


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda: register_method("attention", uneven), "'attention', which"),
        (lambda: register_method("mine", 5), "of type int"),
        (lambda: register_method("mine", lambda model, layers, more: 0), "of one argument"),
        (lambda: register_method("mine", SimpleNamespace), "SimpleNamespace"),
        (lambda: register_metric("scores", largest), "'scores', which"),
        (lambda: register_metric("cue_dot", largest), "'cue_dot', which"),
    ],
)
def test_wrong_registrations_refused(use: Callable[[], object], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        use()


def test_object_of_another_model_refused(shipped: Shipped, examples: list[Example]) -> None:
    model, _ = shipped
    other = type(model)(model.config).eval()
    rows = scored(shipped, examples[:1], vz.ValueZeroing(other, vz.find_layers(other)))
    assert "the object was made for another model (BertForMaskedLM): pass its class" in rows[0]["skipped"]
    bound = captum.attr.IntegratedGradients(other)
    assert "was made for another model" in scored(shipped, examples[:1], bound)[0]["skipped"]


# Classes


CLASSES: dict[str, Any] = {
    name: kind
    for package in (captum.attr, vz)
    for name, kind in ((name, getattr(package, name)) for name in package.__all__)
    if inspect.isclass(kind)
}
TEXT = "some hat [MASK]."


def refusal(make: Callable[[], Any]) -> str | None:
    """What an error says; None without an error."""
    try:
        make()
    except ArgumentError as error:
        return str(error)
    return None


#: Classes that refuse the masked model, the causal model, or one example, with what they say.
REFUSED = {
    "LRP": "LRP of Captum does not take this model",
    "DeepLiftShap": "DeepLiftShap of Captum does not take this model",
    "FeaturePermutation": "FeaturePermutation exchanges tokens between examples",
    "ALTIPlus": "ALTI Plus takes the layers of an encoder",
}
OF_MASKED = REFUSED | {"ALTILogit": "The layer BertLayer norms the sum"}
OF_CAUSAL = REFUSED | {"GlobEnc": "The layer LlamaDecoderLayer norms the attention's input"}
TAKEN = [name for name, kind in CLASSES.items() if refusal(partial(as_method, kind)) is None]


def test_most_classes_of_inputs_are_taken() -> None:
    """The others are refused by their names."""
    for name in CLASSES.keys() - TAKEN:
        assert name in str(refusal(partial(as_method, CLASSES[name])))
    taken = set(TAKEN)
    assert {"IntegratedGradients", "Saliency", "Lime", "ShapleyValueSampling", "Occlusion"} < taken
    assert {"ValueZeroing", "ValueZeroingEffect", "AttentionRollout", "ALTI"} < taken
    of_layers = {name for name in captum.attr.__all__ if name.startswith(("Layer", "Neuron"))}
    assert taken.isdisjoint({*of_layers, "NoiseTunnel", "LLMAttribution", "LimeBase", "DataLoaderAttribution", "Count"})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TAKEN)
def test_taken_class_answers_or_refuses_the_model(name: str) -> None:
    model, tokenizer = load_model()
    with pytest.raises(RefusedError, match=OF_MASKED[name]) if name in OF_MASKED else nullcontext():
        assert vz.explain(model, TEXT, tokenizer=tokenizer, method=CLASSES[name]).scores.isfinite().all()
    with pytest.raises(RefusedError, match=OF_MASKED[name]) if name in OF_MASKED else nullcontext():
        shares = compare((model, tokenizer), TEXT, [CLASSES[name]]).shares[name]
        assert shares.sum().item() == pytest.approx(1)
    causal, of_causal = load_model("causal")
    maps = LLMTokenMaps(CLASSES[name], of_causal, model=causal)
    with pytest.raises(RefusedError, match=OF_CAUSAL[name]) if name in OF_CAUSAL else nullcontext():
        found = maps.attribute(captum.attr.TextTokenInput("some hat", of_causal), target="is nice").token_attr
        assert found.isfinite().all()
        assert found.count_nonzero() > 1


def test_wrapper_runs_as_an_object() -> None:
    """What the error advises. Without noise, the tunnel changes nothing."""
    model, tokenizer = load_model()
    quiet = vz.TokenAttribution(model, lambda run: Quiet(captum.attr.Saliency(run)), tokenizer)
    plain = vz.TokenAttribution(model, captum.attr.Saliency, tokenizer)
    found, expected = (compare((model, tokenizer), TEXT, {"it": one}).shares["it"] for one in (quiet, plain))
    assert torch.allclose(found, expected, atol=1e-6)
    with pytest.raises(ArgumentError, match="returned a list"):
        compare((model, tokenizer), TEXT, {"it": lambda model, layers: layers})


class Quiet(captum.attr.NoiseTunnel):
    def attribute(self, inputs: Any, **options: Any) -> Any:
        return super().attribute(inputs, nt_samples=2, stdevs=0.0, **options)


@pytest.mark.parametrize("kind", [captum.attr.FeatureAblation, captum.attr.Saliency, captum.attr.IntegratedGradients])
def test_object_of_captum_on_a_model(kind: Any) -> None:
    model, tokenizer = load_model()
    with pytest.raises(ArgumentError, match="fails on token ids"):
        vz.explain(model, TEXT, tokenizer=tokenizer, method=kind(model))
