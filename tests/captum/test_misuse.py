"""Mistakes of beginners and of users of Captum's other methods: each is named in one sentence, with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients, LayerIntegratedGradients, NoiseTunnel

from captum_vz import (
    ALTILogit,
    AttnLRP,
    LayerAttention,
    RandomAttribution,
    TokenAttribution,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
)
from captum_vz.errors import ArgumentError, RefusedError
from tests.reference.case import Case
from tests.reference.families import FAMILIES

METHODS = (ValueZeroing, LayerAttention, ValueZeroingRollout, ValueZeroingEffect, ALTILogit)
each_method = pytest.mark.parametrize("method", METHODS)


def case() -> Case:
    return FAMILIES["bert"].case


class Tokenizer:
    """What a tokenizer is known by."""

    def convert_tokens_to_ids(self, tokens: Any) -> None: ...

    def __call__(self, *texts: Any) -> None: ...


INPUTS: list[tuple[str, Callable[[torch.Tensor], Any], str]] = [
    ("no batch axis", lambda ids: ids[0], "without an axis for the batch"),
    ("no batch axis by keyword", lambda ids: {"input_ids": ids[0]}, "without an axis for the batch"),
    ("three axes", lambda ids: ids[None], "token ids have two axes"),
    ("four axes", lambda ids: ids[None, None], "token ids have two axes"),
    ("ids that are floats", lambda ids: ids.float(), "was given torch.float32"),
    ("a list", lambda ids: ids.tolist(), r"inputs is of type list: pass a tensor.*return_tensors='pt'"),
    ("a list of tensors", lambda ids: [ids], "inputs is of type list: pass"),
    ("a tuple of lists", lambda ids: (ids.tolist(),), "inputs is a tuple with an entry of type list: pass"),
    ("an empty tuple", lambda ids: (), "inputs is empty: pass"),
    ("an array", lambda ids: ids.numpy(), "inputs is of type ndarray: pass"),
    ("a text", lambda ids: "a text", "inputs is of type str: pass"),
    ("lists by keyword", lambda ids: {"input_ids": ids.tolist()}, r"inputs\['input_ids'\] is of type list: pass"),
    (
        "a mask in lists",
        lambda ids: {"input_ids": ids, "attention_mask": [[1] * 7]},
        r"inputs\['attention_mask'\] is of type list: pass",
    ),
    ("unknown ids", lambda ids: ids + 10**6, r"An Embedding of \d+ entries was given ids from 1\d{6} to 1\d{6}"),
    (
        "negative ids",
        lambda ids: ids - 10**6,
        "ids from -",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), [pytest.param(*one[1:], id=one[0]) for one in INPUTS])
@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention, ValueZeroingRollout])
def test_wrong_inputs(method: Any, mistake: Callable[[torch.Tensor], Any], message: str) -> None:
    ids = case().example(0).inputs["input_ids"]
    with pytest.raises(ArgumentError, match=message):
        method(case().model, case().layers).attribute(mistake(ids))


def test_error_of_the_models_own() -> None:
    def fail(ids: Any) -> None:
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        ValueZeroing(fail, case().layers).attribute(case().inputs["input_ids"])


@pytest.mark.parametrize(
    ("forward_func", "message"),
    [
        (Tokenizer(), "forward_func is a tokenizer"),
        ("bert-base-uncased", "forward_func is 'bert-base-uncased': pass the model, or a function that runs it, first"),
        (None, "forward_func is of type NoneType: pass the model"),
        (torch.nn.Linear, "forward_func is the class Linear and no object of it: pass the model"),
        ([torch.nn.Identity()], "forward_func is of type list: pass the model"),
        (torch.nn.ModuleList(), "forward_func is of type ModuleList: pass the model"),
    ],
)
@each_method
def test_forward_func_of_wrong_type(method: Any, forward_func: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        method(forward_func, case().layers).attribute(case().inputs)


@each_method
def test_swapped_arguments(method: Any) -> None:
    with pytest.raises(ArgumentError, match=r"forward_func is BertLayer, a part of layer \(Bert\w+\)"):
        method(case().layers[0], case().model).attribute(case().inputs)


@pytest.mark.parametrize("method", METHODS[:-1])
def test_embeddings_as_layer(method: Any) -> None:
    with pytest.raises(RefusedError, match="called no attention"):
        method(case().model, case().model.embeddings).attribute(case().inputs)


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


@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("baselines", "Leave it out"),
        ("nt_samples", "NoiseTunnel"),
        ("internal_batch_size", "perturbations_per_eval"),
        ("attention_mask", "Pass a mapping"),
    ],
)
@each_method
def test_keywords_of_captum(method: Any, keyword: str, remedy: str) -> None:
    with pytest.raises(ArgumentError, match=f"takes no {keyword}.* {remedy}"):
        method(case().model, case().layers).attribute(case().inputs, **{keyword: 1})


def test_embeddings_without_a_batch_axis() -> None:
    with pytest.raises(ArgumentError, match=r"Pass \(batch, tokens, d\)"):
        ValueZeroing(lambda x: case().model(inputs_embeds=x), case().layers).attribute(torch.randn(6, 16).double())


@pytest.mark.parametrize("keyword", ["internal_batch_size", "perturbations_per_eval", "show_progress"])
@pytest.mark.parametrize("method", [RandomAttribution(), AttnLRP(case().model)], ids=["random", "attn-lrp"])
def test_keywords_that_a_method_lacks(method: Any, keyword: str) -> None:
    with pytest.raises(ArgumentError, match=f"takes no {keyword}. Leave it out"):
        method.attribute(case().inputs, **{keyword: 1})


def test_three_axes_without_a_model() -> None:
    with pytest.raises(ArgumentError, match=r"inputs is \(1, 1, 7\)"):
        RandomAttribution().attribute(torch.ones(1, 1, 7).long())


@each_method
def test_other_keywords(method: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokn'"):
        method(case().model, case().layers).attribute(case().inputs, tokn=1)


@each_method
def test_a_second_positional_tensor(method: Any) -> None:
    ids = case().inputs["input_ids"]
    for second in (torch.zeros_like(ids), (torch.zeros_like(ids),)):
        with pytest.raises(ArgumentError, match="second positional argument of attribute is target"):
            method(case().model, case().layers).attribute(ids, second)


def test_a_noise_tunnel_with_baselines() -> None:
    tunnel = NoiseTunnel(ValueZeroing(lambda x: case().model(inputs_embeds=x), case().layers[0]))
    with pytest.raises(ArgumentError, match="takes no baselines"):
        tunnel.attribute(torch.randn(1, 6, 32).double(), nt_samples=2, baselines=torch.zeros(1, 6, 32))


def test_token_attribution() -> None:
    ids, model = case().inputs["input_ids"], case().model
    for build, options, message in (
        ((model, IntegratedGradients(model), None), {}, "method is a IntegratedGradients object: pass its class"),
        ((Tokenizer(), IntegratedGradients, model), {}, "forward_func is a tokenizer"),
        ((model, IntegratedGradients, None), {"return_convergence_delta": True}, "Leave return_convergence_delta out"),
        ((model, LayerIntegratedGradients, None), {}, "method is LayerIntegratedGradients and layer is None"),
        ((model, IntegratedGradients, None, case().layers[0]), {}, "layer is BertLayer"),
        ((model, LayerIntegratedGradients, None, case().layers), {}, "layer is of type list: pass one module"),
    ):
        with pytest.raises(ArgumentError, match=message):
            TokenAttribution(*build).attribute(ids, **options)
    with pytest.raises(ArgumentError, match=r"An Embedding of \d+ entries was given ids from"):
        TokenAttribution(model, IntegratedGradients, None).attribute(ids + 10**6, target=0)
    with pytest.raises(ArgumentError, match=r"The token ids in inputs are torch.int64 \(7,\)"):
        TokenAttribution(model, IntegratedGradients, None).attribute(ids[0], target=0)
    with pytest.raises(ArgumentError, match="second positional argument of attribute is target"):
        TokenAttribution(model, IntegratedGradients, None).attribute(ids, ids)
