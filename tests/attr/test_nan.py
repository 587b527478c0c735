"""Models that return NaN: torch's attention with weights, for tokens that see nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import LayerAttention, Rollout, ValueGates, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout
from captum_vz.errors import RefusedError


class Block(nn.Module):
    """A block of a recommender, whose attention is asked for its weights by default."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)

    def forward(self, x: Tensor, causal: Tensor, padding: Tensor) -> Tensor:
        return self.norm(x + self.attn(x, x, x, attn_mask=causal, key_padding_mask=padding)[0])


class Recommender(nn.Module):
    """Two blocks over the items of a session, where 0 is padding."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.items, self.blocks = nn.Embedding(20, 16), nn.ModuleList(Block() for _ in range(2))
        self.is_causal = is_causal

    def forward(self, ids: Tensor) -> Tensor:
        x, size = self.items(ids), ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool).triu(1) & self.is_causal
        for block in self.blocks:
            x = block(x, causal, ids == 0)
        return x @ self.items.weight.T


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "effect": lambda model, ids: ValueZeroingEffect(model, list(model.blocks)).attribute(ids, target=(-1, 7)),
    "gates": lambda model, ids: ValueGates(model, list(model.blocks))(torch.ones(ids.shape), ids),
    "rollout": lambda model, ids: ValueZeroingRollout(model, list(model.blocks)).attribute(ids, token=-1),
    "attention rollout": lambda model, ids: Rollout(LayerAttention(model, list(model.blocks))).attribute(ids),
    "first layer": lambda model, ids: ValueZeroing(model, model.blocks[0]).attribute(ids),
}


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal, left padding", "an example of padding alone"])
@pytest.mark.parametrize("name", CALLS)
def test_model_that_returns_nan_is_refused(name: str, is_causal: bool) -> None:
    model = Recommender(is_causal).eval()
    ids = torch.tensor([[0, 0, 5, 6], [0, 0, 0, 0]])[: 1 if is_causal else 2]
    assert model(ids)[-1, -1].isnan().all()
    with pytest.raises(RefusedError, match="need_weights=False"):
        CALLS[name](model, ids)


def test_same_model_without_weights_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.MultiheadAttention.forward
    monkeypatch.setattr(
        nn.MultiheadAttention, "forward", lambda *args, **named: forward(*args, **named, need_weights=False)
    )
    assert CALLS["effect"](Recommender(True).eval(), torch.tensor([[0, 0, 5, 6]])).isfinite().all()
