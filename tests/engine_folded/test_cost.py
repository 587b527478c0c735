"""The cheaper form is chosen by its products, and folding is taken wherever it saves a fifth of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2Model,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    Olmo2Config,
    Olmo2Model,
    Qwen2Config,
    Qwen2Model,
)

from captum_vz import ValueZeroing, find_layers
from captum_vz._engine import traced_replays
from captum_vz._engine.replay.folded.replay import FoldedReplay
from tests.engine.parameters import quick
from tests.engine_folded.replays import FOLDED

WIDTH, HEADS = 64, 4
SIZE: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": HEADS, "hidden_size": WIDTH, "vocab_size": 9}
WIDE: dict[str, Any] = {"intermediate_size": 4 * WIDTH}
# Post-norm, pre-norm, gates and grouped queries, many heads, a narrow feed-forward, norms of the attention's output.
SHAPES: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: BertModel(BertConfig(**SIZE, **WIDE), add_pooling_layer=False),
    "gpt2": lambda: GPT2Model(GPT2Config(n_embd=WIDTH, n_layer=1, n_head=HEADS, vocab_size=9)),
    "llama": lambda: LlamaModel(LlamaConfig(**SIZE, **WIDE, num_key_value_heads=2)),
    "many-heads": lambda: LlamaModel(LlamaConfig(**{**SIZE, "num_attention_heads": 16}, **WIDE)),
    "narrow": lambda: Qwen2Model(Qwen2Config(**SIZE, intermediate_size=WIDTH, num_key_value_heads=2)),
    "gemma2": lambda: Gemma2Model(Gemma2Config(**SIZE, **WIDE, num_key_value_heads=2, head_dim=16)),
    "olmo2": lambda: Olmo2Model(Olmo2Config(**{**SIZE, "vocab_size": 50}, **WIDE, pad_token_id=0, eos_token_id=1)),
}
CASES = [(name, tokens, row) for name in SHAPES for tokens in (4, 16, 32, 64, 128) for row in (None, -1)]
FAST = [("bert", 16, None), ("llama", 64, None), ("gemma2", 64, None), ("llama", 64, -1)]


@pytest.mark.parametrize(("name", "tokens", "row"), quick(CASES, *FAST))
def test_cheaper_form_is_chosen(name: str, tokens: int, row: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = SHAPES[name]().eval()
    method, ids = ValueZeroing(model, find_layers(model)), torch.randint(1, 9, (1, tokens))

    def products(only: str | None = None) -> tuple[int, str]:
        with traced_replays(only) as traces, FlopCounterMode(display=False) as counter:
            method.attribute(ids, token=row)
        assert traces[-1].replay is not None
        return counter.get_total_flops(), traces[-1].replay.name

    (chosen, form), (packed, _) = products(), products("packed pairs")
    monkeypatch.setattr(FoldedReplay, "fits", lambda *_: True)
    folded, _ = products(FOLDED)
    assert chosen == {"packed pairs": packed, FOLDED: folded}[form]
    assert chosen <= packed
    if folded <= 0.8 * packed:
        assert form == FOLDED
