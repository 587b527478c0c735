"""Families that compute attention inline, in float64: XLNet, I-BERT, LiLT, ProphetNet ...

The twin reruns the layer with one value row zeroed, in the family's own code.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.yoso.modeling_yoso import YosoSelfAttention

from captum_vz import LayerAttention, ValueZeroing, find_layers
from tests.engine.blocks import without_value_of, zeroed_one_by_one
from tests.engine.compare import assert_same
from tests.reference.case import built

SIZE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
XLNET = {"vocab_size": 50, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24}
PROPHETNET = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}
XLM = {"vocab_size": 50, "emb_dim": 16, "n_layers": 2, "n_heads": 4}
GIT = SIZE | {"vision_config": VISION}
IDS = torch.tensor([[5, 9, 3, 7, 8, 4], [6, 2, 7, 3, 0, 0]])
MASK = (IDS != 0).long()
BOXES = torch.tensor([[1, 2, 30, 40], [5, 6, 20, 22], [9, 1, 12, 30], [3, 3, 8, 9], [2, 8, 9, 50], [7, 7, 9, 9]])

Zeroing = Callable[[nn.Module, int], AbstractContextManager[Any]]


@contextmanager
def by_einsum(layer: nn.Module, source: int) -> Iterator[None]:
    """Zero one row of the product with XLNet's value parameter."""
    einsum = torch.einsum

    def zeroing(equation: str, *operands: Tensor) -> Tensor:
        output = einsum(equation, *operands)
        if any(operand is layer.rel_attn.v for operand in operands):
            output[source] = 0
        return output

    with patch.object(torch, "einsum", zeroing):
        yield


def of(name: str) -> Zeroing:
    return lambda layer, source: without_value_of(source, layer.get_submodule(name))


# name -> (model, its inputs, the stack, whether the layer has its tokens first, how a value is zeroed)
CASES: dict[str, tuple[str, dict[str, Any], str | None, bool, Zeroing]] = {
    "XLNet": ("XLNetModel", XLNET, None, True, by_einsum),
    "ConvBERT": ("ConvBertModel", SIZE, None, False, of("attention.self.value")),
    "LiLT": (
        "LiltModel",
        SIZE | {"hidden_size": 24, "channel_shrink_ratio": 2},
        None,
        False,
        of("attention.self.value"),
    ),
    "YOSO": ("YosoModel", SIZE, None, False, of("attention.self.value")),
    "ProphetNet": ("ProphetNetModel", PROPHETNET, None, False, of("self_attn.value_proj")),
    "GIT": ("GitModel", GIT, "layer", False, of("attention.self.value")),
    "XLM": ("XLMModel", XLM, None, False, of("v_lin")),
}


def case(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = built(CASES[name][0], **CASES[name][1])
    inputs: dict[str, Any] = {"input_ids": IDS, "attention_mask": MASK}
    if name == "LiLT":
        inputs["bbox"] = BOXES.expand(2, -1, -1)
    if name == "GIT":  # the twin's runs would append to a cache
        inputs["use_cache"] = False
    if name == "ProphetNet":  # multiplies an integer mask's float32 by float64's smallest number
        inputs["attention_mask"] = MASK.double()
    return model.encoder if name == "ProphetNet" else model, inputs


def layers_of(name: str, model: Any) -> list[nn.Module]:
    """XLM runs the parts of its blocks in the forward of the model, so its layers are its attention modules."""
    return list(model.attentions) if hasattr(model, "attentions") else find_layers(model, stack=CASES[name][2])


@torch.no_grad()
def map_by_reruns(
    model: nn.Module, layer: nn.Module, inputs: dict[str, Any], zeroed: Zeroing, tokens_first: bool = False
) -> Tensor:
    """The raw map by its definition, `(batch, out, in)`. Rows and columns of padding are 0."""
    kept: list[Any] = []
    with layer.register_forward_pre_hook(lambda m, args, kwargs: kept.append((args, kwargs)), with_kwargs=True):
        model(**inputs)
    args, kwargs = kept[0]
    kwargs = kwargs | dict.fromkeys(kwargs.keys() & {"cache"})  # each run would append to XLM's

    def run() -> Tensor:
        output = layer(*args, **kwargs)
        while not isinstance(output, Tensor):
            output = output[0]
        return output.transpose(0, 1) if tokens_first else output

    clean, columns = run(), []
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones(clean.shape[:2]).bool()
    for source in range(real.shape[1]):
        with zeroed(layer, source):
            columns.append(1 - torch.cosine_similarity(run(), clean, dim=-1)[:, : real.shape[1]])
    return torch.stack(columns, dim=-1) * (real[:, :, None] & real[:, None, :])


def expected_map(name: str, model: nn.Module, layer: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return map_by_reruns(model, layer, inputs, CASES[name][4], tokens_first=CASES[name][3])


@pytest.mark.parametrize("name", CASES)
def test_maps_equal_the_twins(name: str) -> None:
    model, inputs = case(name)
    layers = layers_of(name, model)
    maps = ValueZeroing(model, layers, normalize=False).attribute(inputs)
    for layer, layer_map in zip(layers, maps, strict=True):
        expected = expected_map(name, model, layer, inputs)
        assert_same(layer_map, expected)
        assert (expected.amax(-1)[MASK.bool()] > 1e-4).all()


def test_xlnet_without_padding_and_causal() -> None:
    for fields in ({}, {"attn_type": "uni"}):
        model = built("XLNetModel", **XLNET, **fields)
        layer = find_layers(model)[1]
        scores = ValueZeroing(model, layer, normalize=False).attribute(IDS[:1])
        assert_same(scores, expected_map("XLNet", model, layer, {"input_ids": IDS[:1]}))


def test_weights_of_xlnet_are_refused() -> None:
    model, inputs = case("XLNet")
    with pytest.raises(AssertionError, match="cannot be read"):
        LayerAttention(model, find_layers(model)[0]).attribute(inputs)


def test_inline_attention_as_a_layer() -> None:
    """The map of an attention module differs from that of its block. XLM has no block."""
    model, inputs = case("YOSO")
    with pytest.raises(AssertionError, match="of a YosoLayer"):
        ValueZeroing(model, find_layers(model)[0].attention.self).attribute(inputs)
    with pytest.raises(AssertionError, match="has no stack"):
        find_layers(case("XLM")[0])


class InlineFirst(nn.Module):
    """A layer whose first attention is inline. Its second attention reads other states, and is not inline."""

    def __init__(self) -> None:
        super().__init__()
        self.first = YosoSelfAttention(transformers.YosoConfig(**SIZE))
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.double().eval()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.first(x, torch.zeros(len(x), 1, 1, x.shape[1], dtype=x.dtype))[0]
        parts = (self.query(x), self.key(memory), self.value(memory))
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        return x + nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("attention", "name"), [("self", "first.value"), ("cross", "value")])
def test_attention_after_an_inline_one(attention: str, name: str) -> None:
    torch.manual_seed(0)
    layer, inputs = InlineFirst(), torch.randn(2, 2, 5, 16, dtype=torch.float64).unbind()
    scores = ValueZeroing(layer, layer, attention=attention, normalize=False).attribute(inputs)
    assert_same(scores, zeroed_one_by_one(layer, *inputs, value=name, normalize=False))


def test_single_first_token() -> None:
    """FSMT's causal mask is then a single 0 that is added. In its mask of padding, 1 hides."""
    config = transformers.FSMTConfig(
        langs=["en", "de"], src_vocab_size=30, tgt_vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    model = transformers.FSMTModel(config).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.tensor([[2]]), "use_cache": False}
    assert ValueZeroing(model, find_layers(model, stack="decoder")[0]).attribute(inputs).tolist() == [[[1.0]]]


def test_git_with_pictures() -> None:
    """The tokens of the picture come before the text and see each other."""
    model, inputs = case("GIT")
    inputs = inputs | {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    inputs["attention_mask"] = torch.ones_like(IDS)
    layer = find_layers(model, stack="layer")[1]
    found = ValueZeroing(model, layer, normalize=False).attribute(inputs)
    without_mask = {key: value for key, value in inputs.items() if key != "attention_mask"}
    assert_same(found, expected_map("GIT", model, layer, without_mask))


def test_class_of_a_layer_is_collected() -> None:
    def explain() -> weakref.ref[type]:
        class Own(nn.TransformerEncoderLayer):
            pass

        layer = Own(8, 2, 16, batch_first=True).eval()
        ValueZeroing(layer, layer).attribute(torch.randn(1, 3, 8))
        return weakref.ref(Own)

    explained = explain()
    gc.collect()
    assert explained() is None
