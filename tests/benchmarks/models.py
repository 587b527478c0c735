"""Random models of real sizes, because speed does not depend on the values of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel


@dataclass(frozen=True)
class Size:
    """How to build a model, find its layers and zero a value row; and the size of the feed-forward's last matrix."""

    build: Callable[[int | None], nn.Module]
    layers: Callable[[nn.Module], list[nn.Module]]
    values: Callable[[nn.Module], nn.Module]  # the submodule of a layer whose output holds the values
    first_value: int  # output feature at which the values begin
    last: tuple[int, int]  # (in, out) of the feed-forward's last matrix
    causal: bool


def _bert(depth: int | None) -> nn.Module:
    return BertModel(BertConfig(num_hidden_layers=depth or 12), add_pooling_layer=False)


def _minilm(depth: int | None) -> nn.Module:
    config = BertConfig(hidden_size=384, num_hidden_layers=depth or 6, num_attention_heads=12, intermediate_size=1536)
    return BertModel(config, add_pooling_layer=False)


def _gpt2(depth: int | None) -> nn.Module:
    return GPT2Model(GPT2Config(num_hidden_layers=depth or 12, use_cache=False))


def _llama(depth: int | None) -> nn.Module:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=depth or 16,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaModel(config)


SIZES = {
    "minilm": Size(
        _minilm,
        lambda model: list(model.encoder.layer),
        lambda layer: layer.attention.self.value,
        0,
        (1536, 384),
        causal=False,
    ),
    "bert-base": Size(
        _bert,
        lambda model: list(model.encoder.layer),
        lambda layer: layer.attention.self.value,
        0,
        (3072, 768),
        causal=False,
    ),
    "gpt2": Size(
        _gpt2,
        lambda model: list(model.h),
        lambda layer: layer.attn.c_attn,
        1536,
        (3072, 768),
        causal=True,
    ),
    "llama-1b": Size(
        _llama,
        lambda model: list(model.layers),
        lambda layer: layer.self_attn.v_proj,
        0,
        (8192, 2048),
        causal=True,
    ),
}


def build(size: Size, dtype: torch.dtype, device: str, depth: int | None = None) -> nn.Module:
    """A random model in eval mode, drawn on the CPU from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return size.build(depth).eval().requires_grad_(False).to(device, dtype)


def token_ids(tokens: int, device: str) -> Tensor:
    """One random sentence."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 30000, (1, tokens), generator=generator).to(device)
