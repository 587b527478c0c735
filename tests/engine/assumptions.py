"""A table of home-made layers, each of which breaks an assumption that a replay could make."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad, scaled_dot_product_attention, softmax
from transformers.modeling_outputs import BaseModelOutput

from tests.engine.blocks import HEADS, WIDTH, CausalMean, Convolution, Crowd, Projections

Change = Callable[["Layer", Tensor], Any]
Pair = namedtuple("Pair", ["hidden", "weights"])


def same(layer: Layer, x: Tensor) -> Any:
    return x


class Attention(Projections):
    """Attention by torch's function. `attend` computes it, and `finish` takes its merged context."""

    def __init__(self, attend: Any = None, finish: Change | None = None) -> None:
        super().__init__()
        self.attend = attend or (lambda own, query, key, value: scaled_dot_product_attention(query, key, value))
        self.finish = finish or (lambda own, context: context)

    def forward(self, x: Tensor) -> Tensor:
        context: Tensor = self.attend(self, *self.heads(x))
        return self.output(self.finish(self, context.transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    """A block whose steps are functions, so that each of them can be changed.

    `before` makes the input of the attention, `added` is added to its output, `after` changes the sum, and `end` makes
    what the block returns.
    """

    def __init__(
        self,
        *,
        before: Change = same,
        added: Change = lambda layer, x: 0,
        after: Change = same,
        end: Change = same,
        attend: Any = None,
        finish: Change | None = None,
        part: nn.Module | None = None,
        prepare: Callable[[Layer], Any] = lambda layer: None,
    ) -> None:
        super().__init__()
        self.before, self.added, self.after, self.end = before, added, after, end
        self.attention = Attention(attend, finish)
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.part = part
        self.place, self.bias = nn.Parameter(torch.rand(64, 1) + 0.5), nn.Parameter(torch.randn(WIDTH))
        self.calls, self.seen, self.own = 0, [0], random.Random(0)
        self.double().eval()
        prepare(self)

    def forward(self, x: Tensor) -> Any:
        given = self.before(self, x)
        x = x + self.attention(self.attention_norm(given)) + self.added(self, x)
        x = self.after(self, x)
        return self.end(self, x + self.feed_forward(self.norm(x)))


def part(layer: Layer, x: Tensor) -> Tensor:
    assert layer.part is not None
    return x + layer.part(x)


def in_place(layer: Layer, x: Tensor) -> Tensor:
    x += 0.1
    return x


def counted(layer: Layer, x: Tensor) -> Tensor:
    layer.calls += 1
    layer.seen[0] += 1
    return x


def scaled_by_calls(layer: Layer, x: Tensor) -> Tensor:
    layer.calls += 1
    return x * (1 + layer.calls % 2)


def finite_only(layer: Layer, x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise FloatingPointError("not finite")
    return x


def of_one_size(layer: Layer, x: Tensor) -> Tensor:
    if x.shape[:2] != (2, 6):
        raise ArithmeticError(f"{tuple(x.shape)}")
    return x


def odd_tokens_only(layer: Layer, x: Tensor) -> Tensor:
    return torch.where((torch.arange(x.shape[1]) % 2 == 1)[:, None], x, x.flip(-1))


def first_token_apart(layer: Layer, x: Tensor) -> Tensor:
    return torch.cat([x[:, :1] * 2, x[:, 1:]], dim=1)


def of_the_first_tokens(own: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    count = query.shape[2] - 2
    short = scaled_dot_product_attention(query[:, :, :count], key, value)
    return torch.cat([short, torch.zeros_like(query[:, :, count:])], dim=2)


def twice(own: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    first = scaled_dot_product_attention(query, key, value)
    return scaled_dot_product_attention(first, key, value)


def over_features(own: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query.mT, key.mT, value.mT).mT


def half_of_the_heads(own: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    seen = scaled_dot_product_attention(query[:, :2], key[:, :2], value[:, :2])
    weights = softmax(query[:, 2:] @ key[:, 2:].mT / 2, dim=-1)
    return torch.cat([seen, weights @ value[:, 2:]], dim=1)


def mask_of(visible: Callable[[int], Tensor]) -> Any:
    return lambda own, query, key, value: scaled_dot_product_attention(
        query, key, value, attn_mask=visible(query.shape[2])
    )


def hooked(name: str, hook: Any, pre: bool = False) -> Callable[[Layer], Any]:
    def prepare(layer: Layer) -> None:
        module = layer.get_submodule(name)
        module.register_forward_pre_hook(hook) if pre else module.register_forward_hook(hook)

    return prepare


def steered(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output + 0.5


def louder(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0] * 1.5,)


def capped(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output.clamp(-0.2, 0.2)


def averaged(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output + output.mean(1, keepdim=True)


def patched(layer: Layer) -> None:
    forward = layer.feed_forward.forward
    layer.feed_forward.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]


def trained_norm(layer: Layer) -> None:
    layer.part = nn.BatchNorm1d(WIDTH).double().train()


def normalised(layer: Layer, x: Tensor) -> Tensor:
    assert layer.part is not None
    return x + layer.part(x.mT).mT


CHANGES: dict[str, Change] = {
    "a convolution": part,
    "the mean of tokens": lambda layer, x: x + x.mean(1, keepdim=True),
    "the largest of tokens": lambda layer, x: x + x.amax(1, keepdim=True),
    "the token before": lambda layer, x: x + pad(x, (0, 0, 1, -1)),
    "the token after": lambda layer, x: x + pad(x, (0, 0, -1, 1)),
    "the first token": lambda layer, x: x + x[:, :1],
    "the last token": lambda layer, x: x + x[:, -1:],
    "a sum so far": lambda layer, x: x.cumsum(1),
    "tokens reversed": lambda layer, x: x.flip(1),
    "tokens sorted": lambda layer, x: x.sort(1).values,
    "tokens transformed": lambda layer, x: torch.fft.fft(x, dim=1).real,
    "shares of tokens": lambda layer, x: x * softmax(x, dim=1),
    "largest entry of all": lambda layer, x: x / x.abs().amax(),
    "largest entry of a token": lambda layer, x: x / x.abs().amax(-1, keepdim=True),
    "number of tokens": lambda layer, x: x / x.shape[1],
    "number of examples": lambda layer, x: x * x.shape[0],
    "examples mixed": lambda layer, x: x + x.mean(0, keepdim=True),
    "examples reversed": lambda layer, x: x.flip(0),
    "a factor of each place": lambda layer, x: x * layer.place[: x.shape[1]],
    "every other token": odd_tokens_only,
    "first token apart": first_token_apart,
    "clamped": lambda layer, x: x.clamp(-0.5, 0.5),
    "rounded": lambda layer, x: (x * 4).round() / 4,
    "rectified": lambda layer, x: x.relu(),
    "signs": lambda layer, x: x.sign(),
    "very small": lambda layer, x: x * 1e-9,
    "very large": lambda layer, x: x * 1e9,
    "written in place": in_place,
    "detached": lambda layer, x: x.detach(),
    "by numpy": lambda layer, x: torch.from_numpy(np.tanh(x.detach().numpy())),
    "float32 inside": lambda layer, x: x.float().tanh().double(),
    "counted": counted,
    "raises at NaN": finite_only,
    "raises at other sizes": of_one_size,
    "scaled by the number of calls": scaled_by_calls,
    "noise of torch": lambda layer, x: x + 0.1 * torch.randn_like(x),
    "noise of Python": lambda layer, x: x * random.uniform(0.5, 1.5),
    "noise of numpy": lambda layer, x: x * np.random.uniform(0.5, 1.5),
    "noise of its own": lambda layer, x: x * layer.own.uniform(0.5, 1.5),
    "dropout in eval mode": lambda layer, x: dropout(x, 0.3, training=True),
}
ENDS: dict[str, Change] = {
    "a tuple": lambda layer, x: (x, None),
    "a list": lambda layer, x: [x],
    "a dict": lambda layer, x: {"hidden": x},
    "a named tuple": lambda layer, x: Pair(x, None),
    "a ModelOutput": lambda layer, x: BaseModelOutput(last_hidden_state=x),
    "weights second": lambda layer, x: (x, x.new_zeros(len(x), HEADS, x.shape[1], x.shape[1])),
    "a mask second": lambda layer, x: (x, x[..., 0] > 0),
    "a number second": lambda layer, x: (x, 3),
    "a view": lambda layer, x: x[:, :, :].view(x.shape),
    "strided": lambda layer, x: x.mT.contiguous().mT,
    "nothing": lambda layer, x: None,
    "one vector": lambda layer, x: x.mean(1),
    "half of the tokens": lambda layer, x: x[:, ::2],
    "pairs of tokens": lambda layer, x: x.unflatten(1, (-1, 2)).flatten(2),
    "more tokens": lambda layer, x: pad(x, (0, 0, 1, 0)),
    "tokens first": lambda layer, x: x.transpose(0, 1),
    "another axis": lambda layer, x: x[:, None],
    "not finite": lambda layer, x: x / 0,
}
ATTENTIONS: dict[str, Any] = {
    "causal": mask_of(lambda count: torch.ones(count, count).tril().bool()),
    "a window": mask_of(lambda count: torch.ones(count, count).tril(1).triu(-1).bool()),
    "rows that see nothing": mask_of(lambda count: torch.ones(count, count).tril(-1).bool()),
    "a bias of places": mask_of(lambda count: -(torch.arange(count)[:, None] - torch.arange(count)).abs().double()),
    "some rows": of_the_first_tokens,
    "two after each other": twice,
    "over features": over_features,
    "half of the heads": half_of_the_heads,
    "heads scaled": lambda own, *parts: scaled_dot_product_attention(*parts) * torch.arange(1.0, 5)[:, None, None],
    "values doubled": lambda own, query, key, value: scaled_dot_product_attention(query, key, 2 * value),
    "values bounded": lambda own, query, key, value: scaled_dot_product_attention(query, key, value.tanh()),
    "values added": lambda own, query, key, value: scaled_dot_product_attention(query, key, value) + value,
    "five axes": lambda own, *parts: scaled_dot_product_attention(*(one[:, None] for one in parts))[:, 0],
    "dropout in eval mode": lambda own, *parts: scaled_dot_product_attention(*parts, dropout_p=0.2),
}
HOOKS: dict[str, Callable[[Layer], Any]] = {
    "the feed-forward steered": hooked("feed_forward", steered),
    "the norm steered": hooked("norm", steered),
    "the attention steered": hooked("attention", steered),
    "the output projection capped": hooked("attention.output", capped),
    "the attention averaged": hooked("attention", averaged),
    "the feed-forward averaged": hooked("feed_forward", averaged),
    "the layer steered": hooked("", steered),
    "the layer averaged": hooked("", averaged),
    "the layer's input louder": hooked("", louder, pre=True),
    "the attention's input louder": hooked("attention", louder, pre=True),
    "the feed-forward's input louder": hooked("feed_forward", louder, pre=True),
    "the values' input louder": hooked("attention.value", louder, pre=True),
    "a patched forward": patched,
}


def changed(place: str, change: Change) -> Layer:
    """A layer with a change at one place."""
    layer = Layer(part=Convolution())
    if place == "the context":
        layer.attention.finish = lambda own, context: change(layer, context)
    else:
        setattr(layer, place, change)
    return layer


LAYERS: dict[str, Callable[[], Layer]] = {
    **{
        f"{place}: {name}": partial(changed, place, change)
        for place in ("before", "added", "after", "the context", "end")
        for name, change in CHANGES.items()
    },
    **{f"returns {name}": partial(Layer, end=change) for name, change in ENDS.items()},
    **{f"attention: {name}": partial(Layer, attend=attend) for name, attend in ATTENTIONS.items()},
    **{f"hook: {name}": partial(Layer, prepare=prepare) for name, prepare in HOOKS.items()},
    "after: batch norm in train mode": partial(Layer, after=normalised, prepare=trained_norm),
    "after: only some positions": partial(Layer, after=part, part=Crowd(4)),
    "after: mean so far": partial(Layer, after=part, part=CausalMean()),
}
