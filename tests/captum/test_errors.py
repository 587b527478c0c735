"""Misuse raises AssertionError, as Captum's own does, and says what was passed, what was expected and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers
from tests.captum.configurations import LAYER_METHODS, METHODS, Configuration
from tests.reference.case import Case
from tests.reference.families import FAMILIES

# The shell of all maps and that of all rollouts are tested on one class each.
each_shell = pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingRollout])
each_method = pytest.mark.parametrize("method", METHODS)

# What is passed to attribute, beside three examples of seven tokens, and what is said of it.
BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"attribute_to_layer_input": True}, "Leave attribute_to_layer_input False"),
    ({"perturbations_per_eval": 0}, "perturbations_per_eval is 0"),
    ({"perturbations_per_eval": 1.5}, "perturbations_per_eval is 1.5"),
    ({"feature_mask": "words"}, "feature_mask is of type str"),
    ({"feature_mask": [0, 0, 1]}, "pass integers of shape (1, 7) or (3, 7)"),
    ({"feature_mask": torch.zeros(1, 1, 7, dtype=torch.long)}, "feature_mask is torch.int64 (1, 1, 7)"),
    ({"feature_mask": torch.zeros(1, 7)}, "feature_mask is torch.float32 (1, 7)"),
    ({"feature_mask": torch.zeros(1, 6, dtype=torch.long)}, "pass integers of shape (1, 7) or (3, 7)"),
    ({"feature_mask": torch.zeros(2, 7, dtype=torch.long)}, "pass integers of shape (1, 7) or (3, 7)"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=lambda value: str(value).replace("\n", " ")[:60])
@each_shell
def test_bad_arguments_are_named(method: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        Configuration(method).run(**arguments)


def test_mask_of_one_example() -> None:
    case = FAMILIES["bert"].case.example(0)
    message = "the layer's attention has 1 example(s) of 7 source tokens: pass integers of shape (1, 7)."
    with pytest.raises(AssertionError, match=re.escape(message)):
        ValueZeroing(case.model, case.layers).attribute(case.inputs, feature_mask=torch.zeros(1, 3, dtype=torch.long))


@each_shell
def test_inputs_in_a_list(method: Any) -> None:
    configuration = Configuration(method)
    with pytest.raises(AssertionError, match="inputs is of type list"):
        configuration.build().attribute(list(configuration.case.inputs.values()))


@each_shell
def test_no_inputs_are_named(method: Any) -> None:
    with pytest.raises(AssertionError, match="inputs is None"):
        Configuration(method).build().attribute(None)


@each_shell
@pytest.mark.parametrize("inputs", ["tensor", "tuple", "mapping"])
def test_an_empty_sequence(method: Any, inputs: str) -> None:
    nothing = {name: value[:, :0] for name, value in FAMILIES["bert"].case.inputs.items()}
    forms: dict[str, Any] = {"tensor": nothing["input_ids"], "tuple": tuple(nothing.values()), "mapping": nothing}
    configuration = Configuration(method, inputs=inputs)
    message = r"inputs holds an empty tensor \(3, 0\): there is no token to explain"
    with pytest.raises(AssertionError, match=message):
        configuration.build().attribute(forms[inputs])


@each_shell
def test_a_mapping_with_further_arguments(method: Any) -> None:
    configuration = Configuration(method, inputs="mapping")
    with pytest.raises(AssertionError, match="inputs is a mapping"):
        configuration.run(additional_forward_args=(1,))


@each_shell
def test_layer_that_does_not_run(method: Any) -> None:
    configuration = Configuration(method)
    others = FAMILIES["bert"].build().layers
    with pytest.raises(AssertionError, match="forward_func did not run layer 0 of 3, a BertLayer"):
        method(configuration.forward_func, others).attribute(**configuration.arguments)


@each_shell
def test_a_layer_without_attention(method: Any) -> None:
    configuration = Configuration(method)
    feed_forward = configuration.case.layers[1].intermediate
    with pytest.raises(AssertionError, match="The layer BertIntermediate called no attention"):
        method(configuration.forward_func, [feed_forward]).attribute(**configuration.arguments)


@each_shell
def test_a_stack_as_a_layer(method: Any) -> None:
    configuration = Configuration(method)
    encoder = configuration.case.model.encoder
    with pytest.raises(AssertionError, match="called attention 3 times in one run"):
        method(configuration.forward_func, [encoder]).attribute(**configuration.arguments)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ([], "layer is empty: pass a module of the model, or a list of modules. captum_vz.find_layers"),
        ("encoder.layer.0", "layer is 'encoder.layer.0': pass a module of the model"),
        (0, "layer is 0: pass a module of the model"),
        (["encoder.layer.0"], "layer is 'encoder.layer.0': pass a module of the model"),
        (None, "layer is None, but forward_func is a function, whose layers are not known: pass layer="),
    ],
)
@each_shell
def test_layer_of_wrong_type(method: Any, layer: Any, message: str) -> None:
    configuration = Configuration(method)
    with pytest.raises(AssertionError, match=re.escape(message)):
        method(configuration.forward_func, layer).attribute(**configuration.arguments)


@each_shell
def test_a_layer_listed_twice(method: Any) -> None:
    configuration = Configuration(method)
    first = configuration.case.layers[0]
    with pytest.raises(AssertionError, match="layer lists a module more than once"):
        method(configuration.forward_func, [first, first]).attribute(**configuration.arguments)


@pytest.mark.parametrize("method", [ValueZeroingRollout])
def test_layers_in_another_order(method: Any) -> None:
    configuration = Configuration(method)
    with pytest.raises(AssertionError, match=r"another order than \[2, 1, 0\]"):
        method(configuration.forward_func, configuration.layer[::-1]).attribute(**configuration.arguments)


@each_method
def test_dropout(method: Any) -> None:
    case = FAMILIES["bert"].build()
    case.model.train()
    with pytest.raises(AssertionError, match="BertLayer is in train mode and has dropout"):
        method(case.model, case.layers).attribute(case.inputs)


@each_method
def test_numbers_that_overflow_float16(method: Any) -> None:
    case = overflowing_case()
    with pytest.raises(AssertionError, match=r"not finite .*float16 overflows above 65504: load the model in bfloat16"):
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


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (ValueZeroing, {"distance": "manhattan"}, "'manhattan'"),
        (ValueZeroing, {"heads": 4}, "heads is 4, but layer 0 has the query heads 0 to 3: pass an int"),
        (ValueZeroing, {"heads": []}, "heads is []"),
        (ValueZeroing, {"heads": [[0], [1]]}, "heads has 2 selections, one for each layer, but there are 3 layers"),
        (ValueZeroing, {"heads": True}, "heads is True, but layer 0 has the query heads 0 to 3: pass an int"),
        (ValueZeroing, {"heads": [0, True]}, "heads is [0, True], but layer 0"),
        (ValueZeroing, {"heads": 1.0}, "heads is 1.0, but layer 0"),
        (ValueZeroing, {"heads": [[0], [1.0], [2]]}, "heads is [1.0], but layer 1"),
        (ValueZeroing, {"heads": "all"}, "heads is 'all', but layer 0"),
        (LayerAttention, {"heads": True}, "heads is True, but layer 0"),
        (LayerAttention, {"heads": 1.0}, "heads is 1.0, but layer 0"),
        (LayerAttention, {"heads": [[0], [1]]}, "heads has 2 selections, one for each layer, but there are 3 layers"),
        (LayerAttention, {"heads": [-1]}, "heads is [-1], but layer 0 has the query heads 0 to 3"),
        (LayerAttention, {"reduce_heads": "median"}, "reduce_heads is 'median': pass 'mean' or 'max'"),
        (ValueZeroing, {"attention": "both"}, "attention is 'both': pass 'self', 'cross', or"),
        (LayerAttention, {"heads": "median"}, "heads is 'median', but layer 0 has the query heads 0 to 3"),
        (LayerAttention, {"heads": -1}, "heads is -1, but layer 0 has the query heads 0 to 3"),
        (ValueZeroingRollout, {"residual": "half"}, "'half'"),
        (ValueZeroingRollout, {"heads": [0, 9]}, "heads is [0, 9], but layer 0 has the query heads 0 to 3"),
    ],
)
def test_bad_options_are_named(method: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        Configuration(method, options=options).run()


@pytest.mark.parametrize("method", LAYER_METHODS)
def test_constructors_accept_any_module(method: Any) -> None:
    # Captum's own tests build a method for a layer that is none, and expect the error only when it is run.
    method(nn.Identity(), nn.Identity())


def test_find_layers() -> None:
    case = FAMILIES["bert"].case
    assert find_layers(case.model) == case.layers
