"""Mistakes of beginners and of users of Captum's other methods: each is named in one sentence, with its remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients, LayerIntegratedGradients

from captum_vz import (
    ALTILogit,
    LayerAttention,
    RandomAttribution,
    TokenAttribution,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
)
from captum_vz.errors import ArgumentError, RefusedError
from tests.reference.families import FAMILIES

CASE = FAMILIES["bert"].case
MODEL, LAYERS = CASE.model, CASE.layers
IDS = CASE.inputs["input_ids"]
METHODS = (ValueZeroing, LayerAttention, ValueZeroingRollout, ValueZeroingEffect, ALTILogit)
each_method = pytest.mark.parametrize("method", METHODS)


class Tokenizer:
    """What a tokenizer is known by."""

    def convert_tokens_to_ids(self, tokens: Any) -> None: ...

    def __call__(self, *texts: Any) -> None: ...


LISTS, ONE = IDS[:1].tolist(), IDS[:1]
INPUTS: list[tuple[str, Any, str]] = [
    ("no batch axis", IDS[0], "without an axis for the batch"),
    ("no batch axis by keyword", {"input_ids": IDS[0]}, "without an axis for the batch"),
    ("three axes", ONE[None], "token ids have two axes"),
    ("four axes", ONE[None, None], "token ids have two axes"),
    ("ids that are floats", ONE.float(), "was given torch.float32"),
    ("a list", LISTS, r"inputs is of type list: pass a tensor.*return_tensors='pt'"),
    ("a list of tensors", [ONE], "inputs is of type list"),
    ("a tuple of lists", (LISTS,), "inputs is a tuple with an entry of type list"),
    ("an empty tuple", (), "inputs is empty"),
    ("an array", ONE.numpy(), "inputs is of type ndarray"),
    ("a text", "a text", "inputs is of type str"),
    ("lists by keyword", {"input_ids": LISTS}, r"inputs\['input_ids'\] is of type list"),
    ("a mask in lists", {"input_ids": ONE, "attention_mask": [[1] * 7]}, r"inputs\['attention_mask'\] is of type list"),
    ("unknown ids", ONE + 10**6, r"An Embedding of \d+ entries was given ids from 1\d{6} to 1\d{6}"),
    ("negative ids", ONE - 10**6, "ids from -"),
]


@pytest.mark.all_cases
@pytest.mark.parametrize(("inputs", "message"), [pytest.param(*one[1:], id=one[0]) for one in INPUTS])
def test_wrong_inputs(inputs: Any, message: str) -> None:
    for method in (ValueZeroing, LayerAttention, ValueZeroingRollout):
        with pytest.raises(ArgumentError, match=message):
            method(MODEL, LAYERS).attribute(inputs)


def test_error_of_the_models_own() -> None:
    def fail(ids: Any) -> None:
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        ValueZeroing(fail, LAYERS).attribute(IDS)


@each_method
def test_forward_func_of_wrong_type(method: Any) -> None:
    for forward_func, message in (
        (Tokenizer(), "is a tokenizer"),
        ("bert-base-uncased", "is 'bert-base-uncased': pass the model, or a function"),
        (None, "is of type NoneType: pass the model"),
        (torch.nn.Linear, "is the class Linear and no object of it"),
        ([torch.nn.Identity()], "is of type list"),
        (torch.nn.ModuleList(), "is of type ModuleList"),
    ):
        with pytest.raises(ArgumentError, match=f"forward_func {message}"):
            method(forward_func, LAYERS).attribute(CASE.inputs)


@each_method
def test_swapped_arguments(method: Any) -> None:
    with pytest.raises(ArgumentError, match=r"forward_func is BertLayer, a part of layer \(Bert\w+\)"):
        method(LAYERS[0], MODEL).attribute(CASE.inputs)


@pytest.mark.parametrize("method", METHODS[:-1])
def test_embeddings_as_layer(method: Any) -> None:
    with pytest.raises(RefusedError, match="called no attention"):
        method(MODEL, MODEL.embeddings).attribute(CASE.inputs)


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


def test_axes_that_are_too_many_or_few() -> None:
    with pytest.raises(ArgumentError, match=r"Pass \(batch, tokens, d\)"):
        ValueZeroing(lambda x: MODEL(inputs_embeds=x), LAYERS).attribute(torch.randn(6, 16).double())
    with pytest.raises(ArgumentError, match=r"inputs is \(1, 1, 7\)"):
        RandomAttribution().attribute(torch.ones(1, 1, 7).long())


@each_method
def test_a_mask_in_the_place_of_target(method: Any) -> None:
    """It stands second, where Captum's scripts pass additional_forward_args to some functions."""
    for second in (torch.zeros_like(IDS), (torch.zeros_like(IDS),)):
        with pytest.raises(ArgumentError, match="target is"):
            method(MODEL, LAYERS).attribute(IDS, second)


def test_token_attribution() -> None:
    plain = (MODEL, IntegratedGradients, None)
    for build, inputs, options, message in (
        ((MODEL, IntegratedGradients(MODEL), None), IDS, {}, "method is a IntegratedGradients object: pass its class"),
        ((Tokenizer(), IntegratedGradients, MODEL), IDS, {}, "forward_func is a tokenizer"),
        (plain, IDS, {"return_convergence_delta": True}, "Leave return_convergence_delta out"),
        ((MODEL, LayerIntegratedGradients, None), IDS, {}, "method is LayerIntegratedGradients and layer is None"),
        ((*plain, LAYERS[0]), IDS, {}, "layer is BertLayer"),
        ((MODEL, LayerIntegratedGradients, None, LAYERS), IDS, {}, "layer is of type list: pass one module"),
        (plain, IDS + 10**6, {"target": 0}, r"An Embedding of \d+ entries was given ids from"),
        (plain, IDS[0], {"target": 0}, r"The token ids in inputs are torch.int64 \(7,\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            TokenAttribution(*build).attribute(inputs, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'baselines'"):
        ValueZeroing(MODEL, LAYERS).attribute(IDS, baselines=0)
