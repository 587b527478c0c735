"""Misuse raises AssertionError, as Captum's own does, and says what was passed, what was expected and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from captum.attr import IntegratedGradients, LayerIntegratedGradients, NoiseTunnel
from torch import nn

from captum_vz import (
    ALTILogit,
    AttnLRP,
    LayerAttention,
    RandomAttribution,
    TokenAttribution,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
    find_layers,
)
from captum_vz.errors import ArgumentError, RefusedError
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


SHAPES = "(1, 7) or (3, 7)"
NO_TOKEN = "an empty tensor"
MISTAKES: list[tuple[Call, str]] = [
    (asked(attribute_to_layer_input=True), "Leave attribute_to"),
    (asked(perturbations_per_eval=0), "per_eval is 0"),
    (asked(perturbations_per_eval=1.5), "per_eval is 1.5"),
    (asked(feature_mask="words"), "mask is of type str"),
    (asked(feature_mask=[0, 0, 1]), SHAPES),
    (asked(feature_mask=torch.zeros(1, 1, 7, dtype=torch.long)), "torch.int64 (1, 1"),
    (asked(feature_mask=torch.zeros(1, 7)), "torch.float32 (1"),
    (asked(feature_mask=torch.zeros(1, 6, dtype=torch.long)), SHAPES),
    (asked(feature_mask=torch.zeros(2, 7, dtype=torch.long)), SHAPES),
    (given(None), "inputs is None"),
    (given(EMPTY), NO_TOKEN),
    (given((EMPTY, EMPTY)), NO_TOKEN),
    (given(dict.fromkeys(CASE.inputs, EMPTY)), NO_TOKEN),
    (given(CASE.inputs, additional_forward_args=(1,)), "inputs is a mapping"),
    (of_layers(FAMILIES["bert"].build().layers), "layer 0 of 3, a"),
    (of_layers([CASE.layers[1].intermediate]), "called no attention"),
    (of_layers([CASE.model.encoder]), "attention 3 times"),
    (of_layers([CASE.layers[0]] * 2), "more than once"),
    (of_layers([]), "layer is empty"),
    (of_layers("encoder.layer.0"), "layer.0': pass a"),
    (of_layers(0), "layer is 0: pass a module"),
    (of_layers(["encoder.layer.0"]), "'encoder.layer.0'"),
    (of_layers(None), "layer is None, but"),
]


@pytest.mark.all_cases
@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_named(call: Call, message: str) -> None:
    """By the shell of all maps and by that of all rollouts, of which one class each is tested."""
    for method in (ValueZeroing, ValueZeroingRollout):
        with pytest.raises(AssertionError, match=re.escape(message)):
            call(method)


def test_layers_in_another_order_or_left_out() -> None:
    with pytest.raises(AssertionError, match="another order than"):
        of_layers(CASE.layers[::-1])(ValueZeroingRollout)
    with pytest.raises(AssertionError, match="between the layers"):
        of_layers(CASE.layers[::2])(ValueZeroingRollout)


def test_refusals_need_no_assertions() -> None:
    """Assertions narrow types only: `python -O`, which removes them, takes no wrong call."""
    for path in (Path(__file__).parents[2] / "captum_vz").rglob("*.py"):
        text = path.read_text("utf-8")
        checks = re.findall(r"^ *assert (.+)", text, re.MULTILINE)
        assert all("is not None" in one or one.startswith("isinstance(") for one in checks), (path.name, checks)
        assert "__debug__" not in text, path.name


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
    *((one, {"heads": heads}, f"is {heads!r}, but") for one, many in HEADS.items() for heads in many),
    (ValueZeroing, {"heads": []}, "heads is []"),
    (ValueZeroing, {"heads": [[0], [1]]}, "has 2 selections"),
    (ValueZeroing, {"heads": [[0], [1.0], [2]]}, "[1.0], but layer 1"),
    (ValueZeroing, {"attention": "both"}, "attention is 'both'"),
    (LayerAttention, {"heads": [[0], [1]]}, "has 2 selections"),
    (ValueZeroing, {"distance": lambda a, b: a}, "distance"),
    (ValueZeroing, {"distance": lambda a, b: a[..., 0] * torch.nan}, "not finite"),
    *((ValueZeroingRollout, {"residual": residual}, repr(residual)) for residual in ("half", 0.7)),
    (ValueZeroingRollout, {"other_mixing": "maybe"}, "'maybe'"),
    (ValueZeroingRollout, {"heads": [0, 9]}, "query heads 0 to 3"),
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


# Mistakes of beginners, and of users of Captum's other methods.

EVERY_KIND = (ValueZeroing, LayerAttention, ValueZeroingRollout, ValueZeroingEffect, ALTILogit)
each_kind = pytest.mark.parametrize("method", EVERY_KIND)


class Tokenizer:
    """What a tokenizer is known by."""

    def convert_tokens_to_ids(self, tokens: Any) -> None: ...

    def __call__(self, *texts: Any) -> None: ...


LISTS, ONE = IDS[:1].tolist(), IDS[:1]
INPUTS: list[tuple[str, Any, str]] = [
    ("no batch axis", IDS[0], "an axis for the"),
    ("no batch axis by keyword", {"input_ids": IDS[0]}, "an axis for the"),
    ("three axes", ONE[None], "ids have two axes"),
    ("four axes", ONE[None, None], "ids have two axes"),
    ("ids that are floats", ONE.float(), "given torch.float32"),
    ("a list", LISTS, "is of type list"),
    ("a tuple of lists", (LISTS,), "an entry of type"),
    ("an empty tuple", (), "inputs is empty"),
    ("an array", ONE.numpy(), "of type ndarray"),
    ("a text", "a text", "inputs is of type str"),
    ("lists by keyword", {"input_ids": LISTS}, r"ids'\] is of type"),
    ("a mask in lists", {"input_ids": ONE, "attention_mask": [[1] * 7]}, r"mask'\] is of type"),
    ("unknown ids", ONE + 10**6, r"given ids from 1\d"),
    ("negative ids", ONE - 10**6, "ids from -"),
]


@pytest.mark.all_cases
@pytest.mark.parametrize(("inputs", "message"), [pytest.param(*one[1:], id=one[0]) for one in INPUTS])
def test_wrong_inputs(inputs: Any, message: str) -> None:
    for method in (ValueZeroing, LayerAttention, ValueZeroingRollout):
        with pytest.raises(ArgumentError, match=message):
            method(CASE.model, CASE.layers).attribute(inputs)


def test_error_of_the_models_own() -> None:
    def fail(ids: Any) -> None:
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        ValueZeroing(fail, CASE.layers).attribute(IDS)


@each_kind
def test_forward_func_of_wrong_type(method: Any) -> None:
    for forward_func, message in (
        (Tokenizer(), "is a tokenizer"),
        ("bert-base-uncased", "is 'bert-base"),
        (None, "is of type None"),
        (torch.nn.Linear, "is the class"),
        ([torch.nn.Identity()], "is of type list"),
        (torch.nn.ModuleList(), "is of type Module"),
    ):
        with pytest.raises(ArgumentError, match=f"func {message}"):
            method(forward_func, CASE.layers).attribute(CASE.inputs)


@each_kind
def test_swapped_arguments(method: Any) -> None:
    with pytest.raises(ArgumentError, match="a part of layer"):
        method(CASE.layers[0], CASE.model).attribute(CASE.inputs)


@pytest.mark.parametrize("method", EVERY_KIND[:-1])
def test_embeddings_as_layer(method: Any) -> None:
    with pytest.raises(RefusedError, match="called no attention"):
        method(CASE.model, CASE.model.embeddings).attribute(CASE.inputs)


def test_blocks_that_hold_an_embedding() -> None:
    class EmbeddedBlock(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = torch.nn.Embedding(6, 16)
            self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.places.weight
            return x + self.attention(x, x, x)[0]

    block = EmbeddedBlock().eval()
    assert ValueZeroing(block, block).attribute(torch.randn(1, 6, 16)).shape == (1, 6, 6)


REMEDIES = {"baselines": "Leave it out", "nt_samples": "NoiseTunnel", "attention_mask": "Pass a mapping"}
REMEDIES["internal_batch_size"] = "perturbations_per_eval"


@each_kind
def test_keywords_of_captum(method: Any) -> None:
    for keyword, remedy in REMEDIES.items():
        with pytest.raises(ArgumentError, match=f"{keyword}.*{remedy}"):
            method(CASE.model, CASE.layers).attribute(CASE.inputs, **{keyword: 1})
    with pytest.raises(TypeError, match="argument 'tokn'"):
        method(CASE.model, CASE.layers).attribute(CASE.inputs, tokn=1)


@pytest.mark.parametrize("method", [RandomAttribution(), AttnLRP(CASE.model)], ids=["random", "attn-lrp"])
def test_keywords_that_a_method_lacks(method: Any) -> None:
    for keyword in ("internal_batch_size", "perturbations_per_eval", "show_progress"):
        with pytest.raises(ArgumentError, match=f"takes no {keyword}"):
            method.attribute(CASE.inputs, **{keyword: 1})


def test_axes_that_are_too_many_or_few() -> None:
    with pytest.raises(ArgumentError, match=r"\(batch, tokens, d"):
        ValueZeroing(lambda x: CASE.model(inputs_embeds=x), CASE.layers).attribute(torch.randn(6, 16).double())
    with pytest.raises(ArgumentError, match=r"is \(1, 1, 7\)"):
        RandomAttribution().attribute(torch.ones(1, 1, 7).long())


@each_kind
def test_a_mask_in_the_place_of_target(method: Any) -> None:
    """It stands second, where Captum's scripts pass additional_forward_args to some functions."""
    for second in (torch.zeros_like(IDS), (torch.zeros_like(IDS),)):
        with pytest.raises(ArgumentError, match="target is a tensor"):
            method(CASE.model, CASE.layers).attribute(IDS, second)


def test_a_noise_tunnel_with_baselines() -> None:
    tunnel = NoiseTunnel(ValueZeroing(lambda x: CASE.model(inputs_embeds=x), CASE.layers[0]))
    with pytest.raises(ArgumentError, match="takes no baselines"):
        tunnel.attribute(torch.randn(1, 6, 32).double(), nt_samples=2, baselines=torch.zeros(1, 6, 32))


def test_token_attribution() -> None:
    plain = (CASE.model, IntegratedGradients, None)
    for build, inputs, options, message in (
        ((CASE.model, IntegratedGradients(CASE.model), None), IDS, {}, "pass its class"),
        ((Tokenizer(), IntegratedGradients, CASE.model), IDS, {}, "is a tokenizer"),
        (plain, IDS, {"return_convergence_delta": True}, "Leave return_conv"),
        ((CASE.model, LayerIntegratedGradients, None), IDS, {}, "layer is None"),
        ((*plain, CASE.layers[0]), IDS, {}, "layer is BertLayer"),
        ((CASE.model, LayerIntegratedGradients, None, CASE.layers), IDS, {}, "pass one module"),
        (plain, IDS + 10**6, {"target": 0}, "was given ids from"),
        (plain, IDS[0], {"target": 0}, r"int64 \(7,\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            TokenAttribution(*build).attribute(inputs, **options)
    with pytest.raises(ArgumentError, match="target is a tensor"):
        TokenAttribution(*plain).attribute(IDS, IDS)
