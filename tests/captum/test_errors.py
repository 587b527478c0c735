"""Misuse raises AssertionError, as Captum's own does, and says what was passed, what was expected and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from captum_vz import LayerALTI, LayerAttention, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers
from tests.captum.configurations import LAYER_METHODS, Configuration, each_method
from tests.reference.case import Case
from tests.reference.families import FAMILIES

Call = Callable[[Any], Any]  # of a method

CASE = FAMILIES["bert"].case  # three examples of seven tokens
IDS, MASK = CASE.inputs.values()
EMPTY = IDS[:, :0]


def asked(**keywords: Any) -> Call:
    return lambda method: Configuration(method).run(**keywords)


def given(inputs: Any, **keywords: Any) -> Call:
    return lambda method: Configuration(method).build().attribute(inputs, **keywords)


def of_layers(layer: Any) -> Call:
    def call(method: Any) -> Any:
        configuration = Configuration(method)
        return method(configuration.forward_func, layer).attribute(**configuration.arguments)

    return call


SHAPES = "pass integers of shape (1, 7) or (3, 7)"
NO_TOKEN = "inputs holds an empty tensor (3, 0)"
MISTAKES: list[tuple[Call, str]] = [
    (asked(attribute_to_layer_input=True), "Leave attribute_to_layer_input False"),
    (asked(perturbations_per_eval=0), "perturbations_per_eval is 0"),
    (asked(perturbations_per_eval=1.5), "perturbations_per_eval is 1.5"),
    (asked(feature_mask="words"), "feature_mask is of type str"),
    (asked(feature_mask=[0, 0, 1]), SHAPES),
    (asked(feature_mask=torch.zeros(1, 1, 7, dtype=torch.long)), "feature_mask is torch.int64 (1, 1, 7)"),
    (asked(feature_mask=torch.zeros(1, 7)), "feature_mask is torch.float32 (1, 7)"),
    (asked(feature_mask=torch.zeros(1, 6, dtype=torch.long)), SHAPES),
    (asked(feature_mask=torch.zeros(2, 7, dtype=torch.long)), SHAPES),
    (given([IDS, MASK]), "inputs is of type list"),
    (given(None), "inputs is None"),
    (given(EMPTY), NO_TOKEN),
    (given((EMPTY, EMPTY)), NO_TOKEN),
    (given(dict.fromkeys(CASE.inputs, EMPTY)), NO_TOKEN),
    (given(CASE.inputs, additional_forward_args=(1,)), "inputs is a mapping"),
    (of_layers(FAMILIES["bert"].build().layers), "did not run layer 0 of 3, a BertLayer"),
    (of_layers([CASE.layers[1].intermediate]), "BertIntermediate called no attention"),
    (of_layers([CASE.model.encoder]), "called attention 3 times"),
    (of_layers([CASE.layers[0]] * 2), "layer lists a module more than once"),
    (of_layers([]), "layer is empty"),
    (of_layers("encoder.layer.0"), "layer is 'encoder.layer.0': pass a module"),
    (of_layers(0), "layer is 0: pass a module"),
    (of_layers(["encoder.layer.0"]), "layer is 'encoder.layer.0'"),
    (of_layers(None), "layer is None, but forward_func is a function"),
]


@pytest.mark.all_cases
@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_named(call: Call, message: str) -> None:
    """By the shell of all maps and by that of all rollouts, of which one class each is tested."""
    for method in (ValueZeroing, ValueZeroingRollout):
        with pytest.raises(AssertionError, match=re.escape(message)):
            call(method)


def test_mask_of_one_example() -> None:
    case = CASE.example(0)
    with pytest.raises(AssertionError, match=r"1 example\(s\) of 7 source tokens: pass integers of shape \(1, 7\)"):
        ValueZeroing(case.model, case.layers).attribute(case.inputs, feature_mask=torch.zeros(1, 3, dtype=torch.long))


def test_layers_in_another_order_or_left_out() -> None:
    with pytest.raises(AssertionError, match=r"another order than \[2, 1, 0\]"):
        of_layers(CASE.layers[::-1])(ValueZeroingRollout)
    with pytest.raises(AssertionError, match=r"between the layers 0 \(BertLayer\) and 1"):
        of_layers(CASE.layers[::2])(ValueZeroingRollout)


def test_refusals_need_no_assertions() -> None:
    """Assertions narrow types only: `python -O`, which removes them, takes no wrong call."""
    for path in (Path(__file__).parents[2] / "captum_vz").rglob("*.py"):
        text = path.read_text("utf-8")
        checks = re.findall(r"^ *assert (.+)", text, re.MULTILINE)
        assert all("is not None" in one or one.startswith("isinstance(") for one in checks), (path.name, checks)
        assert "__debug__" not in text, path.name


@each_method
def test_dropout(method: Any) -> None:
    case = FAMILIES["bert"].build()
    case.model.train()
    with pytest.raises(AssertionError, match="in train mode and has dropout"):
        method(case.model, case.layers).attribute(case.inputs)


@each_method
def test_numbers_that_overflow_float16(method: Any) -> None:
    case = overflowing_case()
    with pytest.raises(AssertionError, match="float16 overflows"):
        method(case.model, case.layers).attribute(case.inputs)


@pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingEffect])
@pytest.mark.parametrize("kind", ["Mpt", "Bloom"])
def test_numbers_that_float64_hides_tokens_by(method: Any, kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(vocab_size=30, hidden_size=16, n_layers=2, n_heads=2)
    model = getattr(transformers, f"{kind}Model")(config).eval().double()
    ids = torch.arange(4, 10).view(1, 6).repeat(2, 1)
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])}
    target = {"target": (-1, 1)} if method is ValueZeroingEffect else {}
    assert model(**inputs).last_hidden_state.isnan().any()
    with pytest.raises(AssertionError, match=r"in torch\.float64") as error:
        method(model, find_layers(model)).attribute(inputs, **target)
    assert "float16" not in str(error.value)
    method(model.float(), find_layers(model)).attribute(inputs, **target)


def overflowing_case() -> Case:
    """A model whose first layer multiplies beyond what float16 holds."""
    case = FAMILIES["llama"].build(torch.float16)
    with torch.no_grad():
        case.layers[0].self_attn.q_proj.weight.mul_(300)
        case.layers[0].self_attn.k_proj.weight.mul_(300)
        case.layers[0].mlp.down_proj.weight.fill_(6e4)
    return case


HEADS = {ValueZeroing: (4, [-1], True, [0, True], 1.0, "all"), LayerAttention: (True, 1.0, [-1], -1, "median")}
OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (ValueZeroing, {"distance": "manhattan"}, "'manhattan'"),
    *((one, {"heads": heads}, f"heads is {heads!r}, but layer 0") for one, many in HEADS.items() for heads in many),
    (ValueZeroing, {"heads": []}, "heads is []"),
    (ValueZeroing, {"heads": [[0], [1]]}, "heads has 2 selections"),
    (ValueZeroing, {"heads": [[0], [1.0], [2]]}, "heads is [1.0], but layer 1"),
    (ValueZeroing, {"attention": "both"}, "attention is 'both'"),
    (LayerAttention, {"heads": [[0], [1]]}, "heads has 2 selections"),
    (LayerAttention, {"reduce_heads": "median"}, "reduce_heads is 'median'"),
    (ValueZeroing, {"distance": lambda a, b: a}, "distance"),
    (ValueZeroing, {"distance": lambda a, b: a[..., 0] * torch.nan}, "not finite"),
    (LayerALTI, {"p": 3}, "p is 3"),
    *((ValueZeroingRollout, {"residual": residual}, repr(residual)) for residual in ("half", 0.7)),
    (ValueZeroingRollout, {"other_mixing": "maybe"}, "'maybe'"),
    (ValueZeroingRollout, {"heads": [0, 9]}, "heads is [0, 9], but layer 0 has the query heads 0 to 3"),
]


@pytest.mark.all_cases
@pytest.mark.parametrize(("method", "options", "message"), OPTIONS)
def test_bad_options_are_named(method: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        Configuration(method, options=options).run()


def test_any_module_may_be_a_layer() -> None:
    # Captum's own tests build a method for a layer that is none, and expect the error only when it is run.
    for method in LAYER_METHODS:
        method(nn.Identity(), nn.Identity())


def test_find_layers() -> None:
    assert find_layers(CASE.model) == CASE.layers
