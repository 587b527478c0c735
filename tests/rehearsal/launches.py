"""Kernels and synchronisations of each method: what one more layer costs beyond the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    SwinConfig,
    SwinModel,
    T5Config,
    T5Model,
)

import captum_vz as vz
from tests.rehearsal.counts import Counter, Launches
from tests.rehearsal.device import ELSEWHERE
from tests.rehearsal.subjects import moved

TOKENS = 40
ENCODED, DECODED = 7, 5
# An image of 4 windows, and one of 16.
SIZE, LARGE = 32, "Swin, 16 windows"
Run = Callable[[nn.Module, Any], Any]


def bert(depth: int) -> nn.Module:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=depth, num_attention_heads=4, intermediate_size=128, vocab_size=200
    )
    return BertForMaskedLM(config)


def gpt2(depth: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=depth, n_head=4, vocab_size=200))


def llama(depth: int) -> nn.Module:
    size = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=depth, vocab_size=200, **size))


def t5(depth: int) -> nn.Module:
    return T5Model(T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=depth, num_heads=4, vocab_size=200))


def swin(depth: int, size: int = SIZE) -> nn.Module:
    config = SwinConfig(depths=[depth], image_size=size, patch_size=4, embed_dim=16, num_heads=[2], window_size=4)
    return SwinModel(config)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    **{"BERT": bert, "GPT-2": gpt2, "LLaMA": llama, "T5": t5},
    **{"Swin": swin, LARGE: partial(swin, size=2 * SIZE)},
}


def maps_of(method: Any, **options: Any) -> Run:
    return lambda model, given: method(model, vz.find_layers(model), **options).attribute(given)


def both_stacks(model: nn.Module, given: Any) -> Any:
    layers = [*vz.find_layers(model, "encoder"), *vz.find_layers(model, "decoder")]
    return vz.ALTIPlus(model, layers).attribute(given)


METHODS: dict[str, Run] = {
    "ValueZeroing": maps_of(vz.ValueZeroing),
    "ValueZeroing, one row": lambda model, given: vz.ValueZeroing(model, vz.find_layers(model)).attribute(
        given, token=3
    ),
    "ValueZeroingRollout": maps_of(vz.ValueZeroingRollout),
    "LayerAttention": maps_of(vz.LayerAttention),
    "LayerAttentionNorm": maps_of(vz.LayerAttentionNorm),
    "ALTI": maps_of(vz.ALTI),
    "GlobEnc": maps_of(vz.GlobEnc),
    "ALTILogit": lambda model, given: vz.ALTILogit(model, vz.find_layers(model)).attribute(given, target=(3, 5)),
    "ALTIPlus": both_stacks,
    "HiddenTokenAttribution, one row": lambda model, given: vz.HiddenTokenAttribution(
        model, vz.find_layers(model)[-1]
    ).attribute(given, token=3),
}


def inputs_of(name: str) -> Any:
    if name in ("Swin", LARGE):
        size = SIZE if name == "Swin" else 2 * SIZE
        return torch.randn(1, 3, size, size)
    tokens = torch.arange(5, 5 + TOKENS)[None]
    return {"input_ids": tokens[:, :ENCODED], "decoder_input_ids": tokens[:, :DECODED]} if name == "T5" else tokens


@dataclass(frozen=True)
class Cost:
    """What one more layer starts: the forward pass alone, and a method beyond the forward pass."""

    forward: Launches
    method: Launches


@cache
def cost(method: str, name: str) -> Cost:
    """Counted at two depths, so that what is done once for a model drops out."""
    forward = _of_a_layer(name, _forward)
    return Cost(forward, _of_a_layer(name, METHODS[method]) - forward)


def _forward(model: nn.Module, given: Any) -> None:
    model(**given) if isinstance(given, dict) else model(given)


def _of_a_layer(name: str, run: Run) -> Launches:
    return (_counted(name, 4, run) - _counted(name, 2, run)) / 2


@torch.no_grad()
def _counted(name: str, depth: int, run: Run) -> Launches:
    torch.manual_seed(0)
    model = MODELS[name](depth).eval().requires_grad_(False).to(ELSEWHERE)
    given = moved(inputs_of(name), ELSEWHERE)
    with Counter() as counter:
        run(model, given)
    return counter.launches
