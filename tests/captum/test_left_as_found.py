"""The model is unchanged after success and after an error at any point."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from captum_vz import ValueZeroing
from tests.captum.configurations import each_method
from tests.captum.footprint import HOOKS, assert_same_numbers, footprint, numbers
from tests.reference.case import Case
from tests.reference.families import FAMILIES


class InterruptionError(Exception):
    """What the tests raise in the middle of a pass."""


def lively(family: str = "bert", implementation: str = "eager") -> Case:
    """A model of one's own in a state that is easy to disturb: parameters that want gradients, hooks of its user."""
    case = FAMILIES[family].build(attn_implementation=implementation)
    for number, parameter in enumerate(case.model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    case.layers[0].register_forward_hook(lambda module, args, output: None)
    case.model.register_forward_pre_hook(lambda module, args: None)
    return case


def unchanged_by(case: Case, action: Callable[[], Any]) -> None:
    before, values = footprint(case.model), numbers(case.model)
    inputs = {name: value.clone() for name, value in case.inputs.items()}
    action()
    assert footprint(case.model) == before
    assert_same_numbers(case.model, values)
    assert all(torch.equal(case.inputs[name], value) for name, value in inputs.items())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "albert"])
@each_method
def test_after_success(method: Any, family: str, implementation: str) -> None:
    """The model, and the object that explains it. Inside no_grad, the answer is the same."""
    case = lively(family, implementation)
    clean = case.model(**case.inputs).last_hidden_state
    attribution = method(case.model, case.layers)
    options, answers = dict(vars(attribution)), []
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            unchanged_by(case, lambda: answers.append([*attribution.attribute(case.inputs, token=1)]))
    assert vars(attribution) == options
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))
    assert torch.equal(case.model(**case.inputs).last_hidden_state, clean)


@pytest.mark.parametrize("place", ["before", "after", "layers.0", "layers.2", "attention", "distance"])
@each_method
def test_after_an_error(method: Any, place: str) -> None:
    case, options = lively(), {}
    interrupted = {
        "layers.0": case.layers[0].output.dense,
        "layers.2": case.layers[2].output.dense,
        "attention": case.layers[1].attention.self.value,
    }

    def interrupt(*args: Any) -> None:
        raise InterruptionError

    def forward(**inputs: Any) -> Any:
        if place == "before":
            interrupt()
        output = case.model(**inputs)
        return interrupt() if place == "after" else output

    if place == "distance":  # in a replay
        method, options = ValueZeroing, {"distance": interrupt}

    def run() -> None:
        with pytest.raises(InterruptionError):
            method(forward, case.layers, **options).attribute(case.inputs)

    with interrupted[place].register_forward_pre_hook(interrupt) if place in interrupted else nullcontext():
        unchanged_by(case, run)


@each_method
def test_after_a_layer_that_never_ran(method: Any) -> None:
    case = lively()
    stranger = FAMILIES["bert"].build().layers[0]

    def misused() -> None:
        with pytest.raises(AssertionError, match="did not run layer"):
            method(case.model, [case.layers[0], stranger]).attribute(case.inputs)

    unchanged_by(case, misused)
    assert not any(getattr(module, hook) for module in stranger.modules() for hook in HOOKS)


@each_method
def test_after_a_refusal(method: Any) -> None:
    """While a layer runs, and because of train mode."""
    case = lively()

    def misused(message: str, **keywords: Any) -> None:
        with pytest.raises(AssertionError, match=message):
            method(case.model, case.layers).attribute(case.inputs, **keywords)

    unchanged_by(case, lambda: misused("feature_mask is", feature_mask=torch.zeros(1, 3, dtype=torch.long)))
    case.model.train()
    case.layers[2].eval()
    unchanged_by(case, lambda: misused("train mode"))


@each_method
def test_train_mode_without_dropout_is_kept(method: Any) -> None:
    case = lively("llama").example(0)  # LLaMA has no dropout
    case.model.train()
    expected = method(FAMILIES["llama"].case.model, FAMILIES["llama"].case.layers).attribute(case.inputs)
    unchanged_by(case, lambda: method(case.model, case.layers).attribute(case.inputs))
    answer = method(case.model, case.layers).attribute(case.inputs)
    assert all(torch.equal(one, other) for one, other in zip([*answer], [*expected], strict=True))


@each_method
def test_half_precision_parameters_are_left_alone(method: Any) -> None:
    case = FAMILIES["bert"].build(torch.bfloat16)
    unchanged_by(case, lambda: method(case.model, case.layers).attribute(case.inputs))


@each_method
def test_users_attention_function_is_kept(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs, calls = F.scaled_dot_product_attention, []

    def users(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return torchs(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", users)
    case = lively()

    def forward(**inputs: Tensor) -> Any:
        F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3)  # outside of the layers that are explained
        return case.model(**inputs)

    method(forward, case.layers).attribute(case.inputs, token=1)
    assert len(calls) == 1
    assert F.scaled_dot_product_attention is users


def test_footprint_sees_changes() -> None:
    for disturb in (
        lambda layer: layer.attention.register_forward_hook(lambda module, args, output: None),
        lambda layer: layer.train(),
        lambda layer: setattr(layer.attention.self.config, "_attn_implementation", "sdpa"),
        lambda layer: setattr(layer, "forward", layer.forward),
        lambda layer: layer.output.dense.weight.data.add_(1),
    ):
        case = lively()
        with pytest.raises(AssertionError):
            unchanged_by(case, partial(disturb, case.layers[1]))
