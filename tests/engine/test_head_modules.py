"""Blocks with one module for each head, as in "Let's build GPT": all named parts lose their values together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_vz import ValueGates, ValueZeroing, ValueZeroingEffect
from captum_vz.errors import ArgumentError, RefusedError

WIDTH, HEADS, TOKENS = 16, 4, 5


class Head(nn.Module):
    """One head, by hand or by torch's function."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if not self.by_hand:
            return functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return (q @ k.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(Head(by_hand) for _ in range(HEADS))
        self.proj, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.proj(torch.cat([head(y) for head in self.heads], -1))


X = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def zeroed(block: nn.Module, heads: list[nn.Module], gate: float = 0.0) -> Tensor:
    """The output with the values of one source zeroed in some heads, `(source, batch, out, d)`."""
    found = []
    for source in range(TOKENS):

        def change(module: nn.Module, args: Any, values: Tensor, source: int = source) -> Tensor:
            return values * torch.where(torch.arange(TOKENS) == source, gate, 1.0)[:, None]

        hooks = [head.value.register_forward_hook(change) for head in heads]
        found.append(block(X))
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def expected_map(block: nn.Module, heads: list[nn.Module]) -> Tensor:
    distances = 1 - functional.cosine_similarity(zeroed(block, heads), block(X), dim=-1)
    return functional.normalize(distances.permute(1, 2, 0), p=1, dim=-1).detach()


def named(block: Block, by: str, heads: slice = slice(None)) -> dict[str, Any]:
    parts = list(block.heads)[heads]
    return {by: parts if by == "attention" else [one.value for one in parts]}


FORMS = [(True, "values"), (False, "values"), (False, "attention")]


@pytest.mark.parametrize(("by_hand", "by"), FORMS)
@pytest.mark.parametrize("heads", [slice(None), slice(1, 3)], ids=["all", "two"])
def test_named_heads_are_zeroed_together(by_hand: bool, by: str, heads: slice) -> None:
    block = Block(by_hand)
    found = ValueZeroing(block, block, **named(block, by, heads)).attribute(X)
    torch.testing.assert_close(found, expected_map(block, list(block.heads)[heads]), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("by_hand", "by"), FORMS[::2])
def test_one_head_says_that_it_is_one(by_hand: bool, by: str) -> None:
    block = Block(by_hand)
    one = {by: next(iter(named(block, by).values()))[0]}
    with pytest.warns(UserWarning, match="alone, without"):
        found = ValueZeroing(block, block, **one).attribute(X)
    torch.testing.assert_close(found, expected_map(block, [block.heads[0]]), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("by_hand", "by"), FORMS)
def test_effect_and_gates_of_all_heads(by_hand: bool, by: str) -> None:
    block = Block(by_hand)
    model = nn.Sequential(block)
    found = ValueZeroingEffect(model, block, **named(block, by)).attribute(X, target=(-1, 2))
    change = (block(X) - zeroed(block, list(block.heads)))[:, :, -1, 2].T
    torch.testing.assert_close(found, change.detach(), rtol=0, atol=1e-9)
    gates = torch.ones(2, TOKENS).index_fill(1, torch.tensor(1), 0.5)
    gated = ValueGates(model, block, **named(block, by))(gates, X)
    torch.testing.assert_close(gated, zeroed(block, list(block.heads), 0.5)[1])


def test_several_layers_have_a_list_for_each() -> None:
    blocks = nn.Sequential(Block(True), Block(True))
    values = [[head.value for head in block.heads] for block in blocks]
    found = ValueZeroing(blocks, list(blocks), values=values).attribute(X)
    by_function = ValueZeroing(blocks, list(blocks), values=lambda block: [one.value for one in block.heads])
    assert all(map(torch.equal, found, by_function.attribute(X)))
    torch.testing.assert_close(found[0], expected_map(blocks[0], list(blocks[0].heads)), rtol=0, atol=1e-7)


def test_parts_that_are_no_values_are_refused() -> None:
    block = Block(True)
    with pytest.raises(RefusedError, match="these are no values"):
        ValueZeroing(block, block, values=[head.key for head in block.heads]).attribute(X)
    with pytest.raises(ArgumentError, match="pass a submodule or parameter"):
        ValueZeroing(block, block, values=[]).attribute(X)
