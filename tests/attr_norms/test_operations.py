"""How many operations the decompositions take: a number that does not grow with the tokens.

tests/rehearsal bounds this number for one layer, and how often the host waits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from captum_vz import ALTILogit, LayerALTI, LayerAttentionNorm, find_layers


def bert() -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    return BertModel(BertConfig(num_hidden_layers=2, **size)).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50)).eval()


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


class Operations(TorchDispatchMode):
    """Counts the operations of torch, views included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", METHODS)
def test_operations_do_not_grow_with_tokens(name: str) -> None:
    make, method = METHODS[name]
    model, counts = make(), []
    for tokens in (8, 40):
        ids = torch.arange(5, 5 + tokens)[None]
        method(model, ids)
        with Operations() as counted:
            method(model, ids)
        counts.append(counted.count)
    assert counts[0] == counts[1]
