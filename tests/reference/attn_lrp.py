"""AttnLRP's rules of relevance, written out for a small model of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VALUE_HEADS, WORDS = 12, 4, 2, 20
IDS = torch.tensor([[3, 7, 1, 9, 4], [5, 2, 8, 6, 11]])


class WrittenGelu(nn.Module):
    """In several operations, as in transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Grouped queries, and a feed-forward network with or without a gate."""

    def __init__(self, gated: bool, rms: bool, sdpa: bool, bias: bool) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=bias)
        self.norms = nn.ModuleList(Rms() if rms else nn.LayerNorm(WIDTH) for _ in range(2))
        size = WIDTH // HEADS * VALUE_HEADS
        self.q, self.k, self.v, self.o = (linear(WIDTH, out) for out in (WIDTH, size, size, WIDTH))
        self.gate, self.up, self.down = linear(WIDTH, 16), linear(WIDTH, 16), linear(16, WIDTH)
        self.act = nn.SiLU() if gated else WrittenGelu()
        self.gated, self.sdpa = gated, sdpa

    def heads(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        return x.repeat_interleave(HEADS // x.shape[1], 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (self.heads(part(y)) for part in (self.q, self.k, self.v))
        if self.sdpa:
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            logits = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(future, -torch.inf)
            context = logits.softmax(-1) @ v
        x = x + self.o(context.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(self.act(self.gate(y)) * self.up(y) if self.gated else self.act(self.gate(y)))


class Model(nn.Module):
    def __init__(self, gated: bool = True, rms: bool = True, sdpa: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(gated, rms, sdpa, bias) for _ in range(2)))
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.double().eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(ids)))


# The rules, as functions whose backward pass is given the relevance of the output and returns that of the inputs.
class Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Callable[..., Any], value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.share, ctx.inputs, ctx.value = share, inputs, value
        return value.clone()

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.share(relevance, ctx.value, *ctx.inputs)


def ruled(share: Callable[..., Any], compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        value = compute(*inputs)
    apply: Any = Rule.apply
    return apply(share, value, *inputs)


def linear(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Epsilon rule: each term of a sum has a share of the relevance. Biases keep theirs."""

    def share(relevance: Tensor, z: Tensor, x: Tensor) -> tuple[Tensor]:
        origin = layer(torch.zeros_like(x))
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(layer(x) - origin.detach(), x, relevance / z)
        return (x.detach() * found,)

    return ruled(share, layer, x)


def added(a: Tensor, b: Tensor) -> Tensor:
    return ruled(lambda r, z, a, b: (r * a / z, r * b / z), torch.add, a, b)


def gated(a: Tensor, b: Tensor) -> Tensor:
    return ruled(lambda r, z, a, b: (r / 2, r / 2), torch.mul, a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    def share(r: Tensor, z: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        terms = a[..., :, :, None] * b[..., None, :, :] * torch.where(z == 0, 0, r / z)[..., :, None, :]
        return terms.sum(-1) / 2, terms.sum(-3) / 2

    return ruled(share, torch.matmul, a, b)


def softmax(x: Tensor) -> Tensor:
    def share(r: Tensor, s: Tensor, x: Tensor) -> tuple[Tensor]:
        return (torch.where(x.isinf(), 0, x) * (r - s * r.sum(-1, keepdim=True)),)

    return ruled(share, lambda x: x.softmax(-1), x)


def passed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return ruled(lambda r, z, x: (r,), function, x)


def by_rules(model: Model, vectors: Tensor) -> Tensor:
    """The output of the model, with relevance for gradients."""
    x = vectors
    for block in model.blocks:
        assert isinstance(block, Block)
        y = by_norm(block.norms[0], x)
        q, k, v = (block.heads(linear(part, y)) for part in (block.q, block.k, block.v))
        scaled = passed(lambda x: x / (WIDTH // HEADS) ** 0.5, product(q, k.mT))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        context = product(softmax(scaled.masked_fill(future, -torch.inf)), v)
        x = added(x, linear(block.o, context.transpose(1, 2).flatten(2)))
        y = by_norm(block.norms[1], x)
        inner = passed(block.act, linear(block.gate, y))
        x = added(x, linear(block.down, gated(inner, linear(block.up, y)) if block.gated else inner))
    return linear(model.head, x)


def by_norm(norm: Any, x: Tensor) -> Tensor:
    """Linear, with a constant scale."""
    centred = x if isinstance(norm, Rms) else x - x.mean(-1, keepdim=True)
    scale = (centred.detach().square().mean(-1, keepdim=True) + (1e-6 if isinstance(norm, Rms) else 1e-5)).rsqrt()

    def constant(x: Tensor) -> Tensor:
        x = x if isinstance(norm, Rms) else x - x.mean(-1, keepdim=True)
        return x * scale * norm.weight + getattr(norm, "bias", torch.zeros(()))

    return linear(constant, x)
