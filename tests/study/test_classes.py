"""Every class of Captum and of this package as a method: an answer, or an error that says what to pass."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import captum.attr
import pytest
import torch
from captum.attr import FeatureAblation, NoiseTunnel, Saliency, TextTokenInput

import captum_vz
from captum_vz import TokenAttribution, explain
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.generation import LLMTokenMaps
from captum_vz.study import as_method, compare
from captum_vz.testbed import load_model

CLASSES: dict[str, Any] = {
    name: kind
    for package in (captum.attr, captum_vz)
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


@pytest.mark.parametrize("name", CLASSES)
def test_class_is_taken_or_refused_by_name(name: str) -> None:
    told = refusal(lambda: as_method(CLASSES[name]))
    assert told is None or name in told


def test_most_classes_of_inputs_are_taken() -> None:
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
        assert explain(model, TEXT, tokenizer=tokenizer, method=CLASSES[name]).scores.isfinite().all()
    with pytest.raises(RefusedError, match=OF_MASKED[name]) if name in OF_MASKED else nullcontext():
        shares = compare((model, tokenizer), TEXT, [CLASSES[name]]).shares[name]
        assert shares.sum().item() == pytest.approx(1)
    causal, of_causal = load_model("causal")
    maps = LLMTokenMaps(CLASSES[name], of_causal, model=causal)
    with pytest.raises(RefusedError, match=OF_CAUSAL[name]) if name in OF_CAUSAL else nullcontext():
        found = maps.attribute(TextTokenInput("some hat", of_causal), target="is nice").token_attr
        assert found.isfinite().all()
        assert found.count_nonzero() > 1


def test_wrapper_runs_as_an_object() -> None:
    """What the error advises. Without noise, the tunnel changes nothing."""
    model, tokenizer = load_model()
    quiet = TokenAttribution(model, lambda run: Quiet(Saliency(run)), tokenizer)
    plain = TokenAttribution(model, Saliency, tokenizer)
    found, expected = (compare((model, tokenizer), TEXT, {"it": one}).shares["it"] for one in (quiet, plain))
    assert torch.allclose(found, expected, atol=1e-6)


class Quiet(NoiseTunnel):
    def attribute(self, inputs: Any, **options: Any) -> Any:
        return super().attribute(inputs, nt_samples=2, stdevs=0.0, **options)


@pytest.mark.parametrize("kind", [FeatureAblation, Saliency, captum.attr.IntegratedGradients])
def test_object_of_captum_on_a_model(kind: Any) -> None:
    model, tokenizer = load_model()
    with pytest.raises(ArgumentError, match=rf"{kind.__name__} of Captum fails on token ids .*Pass its class"):
        explain(model, TEXT, tokenizer=tokenizer, method=kind(model))


def no_arguments() -> None: ...


def three_arguments(model: Any, layers: Any, more: Any) -> None: ...


@pytest.mark.parametrize("function", [no_arguments, three_arguments])
def test_function_with_other_arguments(function: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{function.__name__}\(.*pass a function of one argument, a Batch"):
        as_method(function)
