"""How many operations the decompositions take: a number that does not grow with the tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from captum_vz import ALTILogit, LayerALTI, LayerAttentionNorm, find_layers


class Operations(TorchDispatchMode):
    """Counts the operations of torch, views included, and those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.waits = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.waits += str(func) in ("aten._local_scalar_dense.default", "aten.equal.default", "aten.nonzero.default")
        return func(*args, **(kwargs or {}))


def bert(layers: int) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    return BertModel(BertConfig(num_hidden_layers=layers, **size)).eval()


def gpt2(layers: int) -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=16, n_head=2, vocab_size=50)).eval()


METHODS = {
    "norms": (bert, lambda model, ids: LayerAttentionNorm(model, find_layers(model)).attribute(ids)),
    "globenc": (
        bert,
        lambda model, ids: LayerAttentionNorm(model, find_layers(model), include="encoder").attribute(ids),
    ),
    "alti": (bert, lambda model, ids: LayerALTI(model, find_layers(model)).attribute(ids)),
    "alti of pre-norm": (gpt2, lambda model, ids: LayerALTI(model, find_layers(model)).attribute(ids)),
    "alti-logit": (gpt2, lambda model, ids: ALTILogit(model, find_layers(model)).attribute(ids, target=(3, 5))),
}
# Operations and waits of one layer, the forward pass and the recording included: measured, with little room.
LIMITS = {
    "norms": (150, 6),
    "globenc": (215, 8),
    "alti": (210, 8),
    "alti of pre-norm": (240, 13),
    "alti-logit": (315, 14),
}


def operations(name: str, layers: int, tokens: int) -> Counter[str]:
    make, method = METHODS[name]
    model, ids = make(layers), torch.arange(5, 5 + tokens)[None]
    method(model, ids)
    with Operations() as counted:
        method(model, ids)
    return Counter(operations=counted.count, waits=counted.waits)


@pytest.mark.parametrize("name", METHODS)
def test_operations_do_not_grow_with_tokens(name: str) -> None:
    assert operations(name, 2, 8) == operations(name, 2, 40)


@pytest.mark.parametrize("name", METHODS)
def test_operations_of_a_layer(name: str) -> None:
    few, many = operations(name, 1, 12), operations(name, 3, 12)
    each = [(many[kind] - few[kind]) / 2 for kind in ("operations", "waits")]
    assert all(found <= limit for found, limit in zip(each, LIMITS[name], strict=True)), each
