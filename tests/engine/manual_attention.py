"""Attention in a layer's own code, in the styles of well-known libraries, without torch's function.

Each class has `source`: the twin sets it, and the rows of this token are zeroed after they are projected.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.engine.blocks import HEADS, WIDTH, Block, block_of, direction

D_HEAD = WIDTH // HEADS


class Manual(nn.Module):
    source: int | None = None

    def cut(self, values: Tensor) -> Tensor:
        """The values `(batch, tokens, ...)`, with one row zeroed if the twin runs."""
        if self.source is None:
            return values
        values = values.clone()
        values[:, self.source] = 0
        return values

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return (scores if mask is None else scores.masked_fill(mask == 0, -torch.inf)).softmax(-1) @ value


class NanoGPT(Manual):
    """Causal, packed queries, keys and values, split by `split`."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", torch.ones(32, 32).tril())

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.c_attn(x).split(WIDTH, dim=2)
        query, key, value = (
            one.view(batch, length, HEADS, D_HEAD).transpose(1, 2) for one in (query, key, self.cut(value))
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(D_HEAD)
        weights = scores.masked_fill(self.bias[:length, :length] == 0, -torch.inf).softmax(-1)
        context = self.attn_dropout(weights) @ value
        return self.resid_dropout(self.c_proj(context.transpose(1, 2).contiguous().view(batch, length, WIDTH)))


class Annotated(Manual):
    """Four linear layers in a list, as in the Annotated Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (one(x) for one in self.linears[:3])
        heads = (one.view(len(x), -1, HEADS, D_HEAD).transpose(1, 2) for one in (query, key, self.cut(value)))
        return self.linears[-1](self.attend(*heads, mask).transpose(1, 2).reshape(x.shape))


class Einsum(Manual):
    """Projections are parameters with an axis of heads. The values come with heads before tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(HEADS, WIDTH, D_HEAD) / 4) for _ in range(3))
        self.w_o = nn.Parameter(torch.randn(HEADS, D_HEAD, WIDTH) / 4)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        query, key, value = (torch.einsum("bnd,hde->bhne", x, one) for one in (self.w_q, self.w_k, self.w_v))
        weights = (torch.einsum("bhie,bhje->bhij", query, key) / math.sqrt(D_HEAD)).softmax(-1)
        value = self.cut(value.transpose(1, 2)).transpose(1, 2)
        return torch.einsum("bhij,bhje,heo->bio", weights, value, self.w_o)


class Windows(Manual):
    """Windows of four tokens after a shift, with weights that are given to `linear`, as in torchvision's Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        windows = x.roll(-1, 1).reshape(-1, 4, WIDTH)
        parts = linear(windows, self.qkv.weight, self.qkv.bias).reshape(-1, 4, 3, HEADS, D_HEAD).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        if self.source is not None:
            places = torch.arange(x.shape[1]).roll(-1).expand(len(x), -1).reshape(-1, 4)
            value = torch.where((places == self.source)[:, None, :, None], 0, value)
        context = self.attend(query, key, value).transpose(1, 2).reshape(windows.shape)
        return linear(context, self.proj.weight, self.proj.bias).reshape(x.shape).roll(1, 1)


class InBlock(Block):
    """A block without an attention module: its own forward projects and attends."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Annotated()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.double().eval()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        normed = self.attention_norm(x)
        value = self.attention.cut(self.to_v(normed))
        x = x + self.to_out(self.attention.attend(self.to_q(normed), self.to_k(normed), value, mask))
        return x + self.feed_forward(self.norm(x))


def manual(style: type[nn.Module]) -> Block:
    """A block with attention of a style, in float64."""
    torch.manual_seed(1)
    return style() if issubclass(style, Block) else block_of(style())


@torch.no_grad()
def twin(block: Block, x: Tensor, *args: Any) -> Tensor:
    """The map by its definition, `(batch, out, in)`: one run for each source."""
    clean, columns = block(x, *args), []
    for source in range(x.shape[1]):
        block.attention.source = source
        columns.append((direction(block(x, *args)) - direction(clean)).square().sum(-1) / 2)
    block.attention.source = None
    return torch.stack(columns, dim=-1)
