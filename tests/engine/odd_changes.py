"""Blocks that do one thing more before, in or after the attention, or with what they return."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad
from transformers.modeling_outputs import BaseModelOutput

from captum_vz.errors import RefusedError
from tests.engine.blocks import HEADS, Block, Convolution, Crowd, sequences
from tests.engine.odd import LONG, Odd, Table, by_hook, in_its_batch, rows


class Does(nn.Module):
    """A module whose forward is a function, which may use an inner module."""

    def __init__(self, function: Callable[[Tensor], Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Ends(Block):
    """A block that returns what a function makes of its output."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.end(super().forward(x, mask))


def at(place: str, change: Callable[[Tensor], Any]) -> Block:
    """A block that is changed before its attention, in it, after it, or at its end."""
    if place == "context":
        return Block(finish=lambda own, context, x: own.output(change(context)))
    block = {"after": Block(after=Does(change)), "end": Ends(change)}.get(place, Block())
    if place == "before":
        block.attention_norm = nn.Sequential(Does(change), block.attention_norm)
    return block


def changed(name: str, place: str = "after", **fields: Any) -> Odd:
    return Odd(at(place, CHANGES[name]), sequences(2, LONG), token=5, **fields)


def hooked(name: str) -> Odd:
    block = Block()
    HOOKS[name](block)
    return Odd(block, sequences(2, LONG))


def patched(block: Block) -> None:
    forward = block.feed_forward.forward
    block.feed_forward.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]


def finite_only(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise FloatingPointError("not finite")
    return x


def of_one_size(x: Tensor) -> Tensor:
    if x.shape[:2] != (2, LONG):
        raise ArithmeticError(f"{tuple(x.shape)}")
    return x


def in_place(x: Tensor) -> Tensor:
    x += 0.1
    return x


CALLS, OWN = count(1), random.Random(0)
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "a convolution": Convolution().double(),
    "the mean of tokens": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "the token before": lambda x: pad(x, (0, 0, 1, -1)),
    "the token after": lambda x: pad(x, (0, 0, -1, 1)),
    "a mean so far": lambda x: x.cumsum(1) / torch.arange(1, 1 + x.shape[1])[:, None],
    "tokens reversed": lambda x: x.flip(1),
    "tokens sorted": lambda x: x.sort(1).values,
    "every other token": lambda x: torch.where((torch.arange(x.shape[1]) % 2 == 1)[:, None], x, x.flip(-1)),
    "a factor of each place": lambda x: x * torch.arange(1, 1 + x.shape[1])[:, None],
    "some positions": lambda x: Crowd(4)(x),
    "number of examples": lambda x: x * x.shape[0],
    "largest entry of all": lambda x: x / x.abs().amax(),
    "examples reversed": lambda x: x.flip(0),
    "clamped": lambda x: x.clamp(-0.5, 0.5),
    "signs": lambda x: x.sign(),
    "very small": lambda x: x * 1e-9,
    "very large": lambda x: x * 1e9,
    "written in place": in_place,
    "detached": lambda x: x.detach(),
    "by numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()).tanh(),
    "float32 inside": lambda x: x.float().tanh().double(),
    "raises at NaN": finite_only,
    "raises at other sizes": of_one_size,
    "noise of Python": lambda x: x * random.uniform(0.5, 1.5),
    "draws for gradients only": lambda x: x + 0 * (random.random() if torch.is_grad_enabled() else 0.0),
}
OF_ALL_EXAMPLES = ("largest entry of all", "examples reversed")
NOT_AGAIN: dict[str, Callable[[Tensor], Any]] = {
    "scaled by the number of calls": lambda x: x * next(CALLS),
    "noise of torch": lambda x: x + 0.1 * torch.randn_like(x),
    "noise of Python": CHANGES["noise of Python"],
    "noise of numpy": lambda x: x * np.random.uniform(0.5, 1.5),
    "noise of its own": lambda x: x * OWN.uniform(0.5, 1.5),
    "dropout in eval mode": lambda x: dropout(x, 0.3, training=True),
}
ENDS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: [x],
    "a dict": lambda x: {"hidden_states": x, "aux": None},
    "a model output": lambda x: BaseModelOutput(last_hidden_state=x),
    "a dict in a tuple": lambda x: ({"x": [x]}, None),
    "weights second": lambda x: (x, x.new_zeros(len(x), HEADS, x.shape[1], x.shape[1])),
    "strided": lambda x: x.mT.contiguous().mT,
    "half of the tokens": lambda x: x[:, ::2],
    "more tokens": lambda x: pad(x, (0, 0, 1, 0)),
}
NO_ENDS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nothing": (lambda x: None, "returned NoneType"),
    "a dict without states": (lambda x: {"aux": None, "hidden_states": x}, "entry is no tensor"),
    "one vector": (lambda x: x.mean(1), "Expected one vector"),
    "tokens first": (lambda x: x.transpose(0, 1), "Expected one vector"),
    "another axis": (lambda x: x[:, None], "Expected one vector"),
    "not finite": (lambda x: x / 0, "not finite"),
}
HOOKS: dict[str, Callable[[Block], Any]] = {
    "on the norm": lambda block: block.norm.register_forward_hook(lambda *given: given[2] + 0.5),
    "on the attention": lambda block: block.attention.register_forward_hook(
        lambda *given: given[2] + given[2].mean(1, keepdim=True)
    ),
    "on the layer": lambda block: block.register_forward_hook(lambda *given: given[2] + given[2].mean(1, keepdim=True)),
    "before the layer": lambda block: block.register_forward_pre_hook(lambda *given: (given[1][0] * 1.5,)),
    "before the values": lambda block: block.attention.value.register_forward_pre_hook(
        lambda *given: (given[1][0] * 1.5,)
    ),
    "a patched forward": patched,
}


def not_again(name: str, place: str) -> Odd:
    return Odd(at(place, NOT_AGAIN[name]), sequences(2), "cannot be replayed", error=RefusedError)


def no_end(name: str) -> Odd:
    return Odd(Ends(NO_ENDS[name][0]), sequences(2), NO_ENDS[name][1], error=RefusedError)


class Twin(nn.Module):
    """Runs a layer with the draw of the clean run, and returns its first tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        random.seed(0)
        output = self.layer(x)
        while not isinstance(output, Tensor):
            output = next(iter(output.values())) if isinstance(output, dict) else output[0]
        return output


def of_twin(layer: nn.Module, x: Tensor) -> Tensor:
    return by_hook(Twin(layer), x, value="layer.attention.value")


def scale_before() -> Odd:
    """One scale is drawn before the attention: replays take weights and values of the clean run."""
    random.seed(0)
    return Odd(at("before", CHANGES["noise of Python"]), sequences(2, LONG), twin=of_twin)


def some_places(tokens: int, every: int) -> Odd:
    """Changes some positions beyond those of the clean pass."""

    def change(x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1])
        return torch.where(((index % every == 0) & (index >= tokens))[:, None], x.flip(-1), x)

    return Odd(at("after", change), sequences(1, tokens))


CHANGED: Table = {
    **rows("after", changed, [name for name in CHANGES if name not in (*OF_ALL_EXAMPLES, "noise of Python")]),
    **rows("after", partial(changed, twin=in_its_batch), OF_ALL_EXAMPLES),
    **rows("context", partial(changed, place="context"), ("the mean of tokens", "clamped", "a factor of each place")),
    **rows("end", partial(changed, place="end"), ("the mean of tokens", "signs")),
    **rows("before", partial(changed, place="before"), ("the mean of tokens", "tokens sorted")),
    "before: tokens reversed": lambda: changed(
        "tokens reversed",
        "before",
        twin=lambda *given: by_hook(*given).flip(-1),  # columns are the layer's tokens
    ),
    "before: one scale drawn": scale_before,
    **rows("not again", not_again, NOT_AGAIN, ("after",)),
    **rows("not again", not_again, [name for name in NOT_AGAIN if "calls" not in name], ("context",)),
    **rows("returns", lambda name: Odd(Ends(ENDS[name]), sequences(2, LONG), twin=of_twin), ENDS),
    **rows("returns", no_end, NO_ENDS),
    **rows("hook", hooked, HOOKS),
    **rows("places beyond", some_places, (LONG,), (37,)),
    **rows("places beyond", some_places, (40,), (640,)),
}
