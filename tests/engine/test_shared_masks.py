"""Layers that share one mask, into which code of the user's writes between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from captum_vz import LayerAttention, ValueZeroing

Write = Callable[[Tensor], object]
HIDES, SHOWS = -torch.inf, 0.0
WAYS: dict[str, Callable[[Tensor, float], object]] = {
    "in place": lambda mask, value: mask[..., :2].fill_(value),
    "data": lambda mask, value: mask.data[..., :2].fill_(value),
    "numpy": lambda mask, value: mask.detach().numpy()[..., :2].fill(value),
}


class Block(nn.Module):
    """An attention block of one head, whose mask is written into before it runs."""

    def __init__(self, write: Write | None = None) -> None:
        super().__init__()
        self.value, self.write = nn.Linear(8, 8), write

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        if self.write is not None:
            self.write(mask)
        split = states[:, None]
        return states + scaled_dot_product_attention(split, split, self.value(states)[:, None], mask)[:, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["in the block", "between blocks", "in a hook"])
@pytest.mark.parametrize(("before", "after"), [(SHOWS, HIDES), (HIDES, SHOWS)])
def test_mask_that_is_written_between_layers(way: str, place: str, before: float, after: float) -> None:
    def write(mask: Tensor) -> None:
        WAYS[way](mask, after)

    first, second = Block(), Block(write if place == "in the block" else None)
    if place == "in a hook":
        second.register_forward_pre_hook(lambda module, inputs: write(inputs[1]))

    def forward(states: Tensor) -> Tensor:
        mask = torch.zeros(1, 1, 5, 5).index_fill(3, torch.tensor([0, 1]), before)
        states = first(states, mask)
        if place == "between blocks":
            write(mask)
        return second(states, mask)

    states = torch.randn(1, 5, 8)
    _, attention = LayerAttention(forward, [first, second]).attribute(states)
    given = first(states, torch.zeros(5, 5).index_fill(1, torch.tensor([0, 1]), before))
    seen = torch.zeros(5, 5).index_fill(1, torch.tensor([0, 1]), after)
    torch.testing.assert_close(attention, torch.softmax(given @ given.mT / 8**0.5 + seen, -1))
    _, together = ValueZeroing(forward, [first, second]).attribute(states)
    torch.testing.assert_close(together, ValueZeroing(forward, second).attribute(states), rtol=1e-5, atol=1e-6)
    assert bool((together[..., :2] == 0).all()) == (after == HIDES)
