"""Odd layers that do more than those of transformers: in the attention, with further arguments, with a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.blocks import (
    HEADS,
    WIDTH,
    Block,
    Conditioned,
    Reader,
    SelfAttention,
    as_added,
    attention_function,
    direction,
    eager_attention_forward,
    mask_of_window,
    scale_each_position,
    sequences,
)
from tests.engine.odd import LONG, Odd, Table, by_hook, rows

layer_norm = nn.functional.layer_norm
FINISHES: dict[str, Callable[[SelfAttention, Tensor, Tensor], Tensor]] = {
    "gate by the input": lambda own, context, x: own.output(context * own.query(x).sigmoid()),
    "gate by the context": lambda own, context, x: own.output(context) * context.sigmoid(),
    "gate in place": lambda own, context, x: own.output(context.mul_(own.query(x).sigmoid())),
    "residual and norm inside": lambda own, context, x: layer_norm(x + own.output(context), (WIDTH,)),
    "no projection": lambda own, context, x: context,
    "projection without a module": lambda own, context, x: context @ own.output.weight.T,
    "two projections": lambda own, context, x: own.output(context) + own.key(context),
    "projection thrown away": lambda own, context, x: (own.key(context), own.output(context))[1],
    "shift of the projection": lambda own, context, x: own.output(context) + 1e-3,
    "heads that talk": lambda own, context, x: own.output(
        context.unflatten(-1, (HEADS, -1)).flip(-2).cumsum(-2).flatten(-2)
    ),
    "neighbours inside": lambda own, context, x: own.output(context + context.roll(1, dims=1)),
}


def finished(finish: str, masked: bool = False) -> Odd:
    x, mask = sequences(2, LONG), mask_of_window(LONG, window=3)
    return Odd(Block(finish=FINISHES[finish]), (x, mask) if masked else x)


# Without a residual connection, and a part of the output that is left where one value is nearly all.
DIRECTIONS: dict[str, Callable[[SelfAttention, Tensor, Tensor], Tensor]] = {
    "module": lambda own, context, x: direction(context @ own.output.weight.T),
    "neighbours": lambda own, context, x: direction(context @ own.output.weight.T) + context.roll(1, dims=1),
}


class NormOfAttention(Block):
    """A block without a residual connection around the attention, or the attention alone."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        self.attention.output = nn.Linear(WIDTH, WIDTH, bias=False).double()
        self.norm.eps = 1e-300

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(x), mask)
        return attended if self.alone else x + self.feed_forward(self.norm(attended))


def nearly_all(name: str) -> Odd:
    """All weights but one are 1e-13."""
    mask = torch.full((1, 1, LONG, LONG), -30.0, dtype=torch.float64)
    mask[..., 2] = 0
    block = Block(finish=DIRECTIONS[name]) if name in DIRECTIONS else NormOfAttention(alone=name == "alone")
    return Odd(block, (sequences(2, LONG), mask))


class GatedProjection(nn.Module):
    """The projection of NeoMME: a submodule that takes the context and the attention's input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, context: Tensor, x: Tensor) -> Tensor:
        return self.output(context * self.gate(x).sigmoid())


def gated_projection(**fields: Any) -> Odd:
    block = Block(finish=lambda own, context, x: own.output(context, x))
    block.attention.add_module("output", GatedProjection().double())
    return Odd(block, sequences(2), **fields)


def scale_each_example(x: Tensor, condition: Tensor) -> Tensor:
    return x * condition[:, None, :]


# What a further tensor is used for, and its shape, from (batch, tokens). The shape alone does not identify the axes.
CONDITIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[int, int], tuple[int, ...]]]] = {
    "each example": (scale_each_example, lambda batch, tokens: (batch, WIDTH)),
    "all examples": (scale_each_example, lambda batch, tokens: (1, WIDTH)),
    "each position": (scale_each_position, lambda batch, tokens: (batch, tokens, WIDTH)),
    "position of all": (scale_each_position, lambda batch, tokens: (1, tokens, WIDTH)),
    "table of positions": (scale_each_position, lambda batch, tokens: (tokens, WIDTH)),
    "number a position": (lambda x, condition: x * condition[..., None], lambda batch, tokens: (batch, tokens)),
    "length": (
        lambda x, condition: x * (1 + (torch.arange(x.shape[1]) < condition[:, None]))[..., None],
        lambda batch, tokens: (batch,),
    ),
    "sequence first": (lambda x, condition: x * condition.transpose(0, 1), lambda *size: (*size[::-1], WIDTH)),
}


def condition(kind: str, size: tuple[int, int]) -> Odd:
    use, shape = CONDITIONS[kind]
    given = torch.rand(shape(*size), dtype=torch.float64) + 0.5
    if kind == "length":
        given = torch.randint(1, size[1] + 1, size[:1])
    return Odd(Conditioned(use), (sequences(*size), given), token=0)


def mask_for_each_head(batch: int) -> Odd:
    visible = (torch.rand(batch, HEADS, HEADS, HEADS) < 0.5) | torch.eye(HEADS, dtype=torch.bool)
    return Odd(Block(), (sequences(batch, HEADS), as_added(visible)))


def tokens_skip_themselves() -> Odd:
    visible = ~torch.eye(LONG, dtype=torch.bool).expand(2, 1, -1, -1).clone()
    visible[1, ..., -2:] = False  # these tokens are padding
    real = visible.any(2)[..., None][:, 0]
    return Odd(Block(), (sequences(2, LONG), as_added(visible)), twin=lambda *given: by_hook(*given) * real)


def cross_attention(size: tuple[int, int], hidden: int) -> Odd:
    """Hidden sources of a cross-attention are no padding of its targets."""
    tokens, sources = size
    visible = torch.ones(2, 1, tokens, sources, dtype=torch.bool)
    visible[:, ..., sources - hidden :] = False
    visible[1, ..., 3:] = False
    given = sequences(2, tokens), as_added(visible), sequences(2, sources) + 1
    return Odd(Reader().double().eval(), given, twin=partial(by_hook, value="value", sources=sources))


def by_interface(own: SelfAttention, x: Tensor, mask: Tensor | None, default: Any) -> Tensor:
    parts = [one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (own.query, own.key, own.value)]
    attend = attention_function(own.config._attn_implementation, default)
    return own.output(attend(own, *parts, mask)[0].flatten(2))


class ByKeyword(SelfAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        names = ("query", "key", "value")
        parts = {name: getattr(self, name)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in names}
        attend = attention_function(self.config._attn_implementation, eager_attention_forward)
        return self.output(attend(module=self, attention_mask=mask, dropout=0.0, **parts)[0].flatten(2))


def sharp_eager_attention_forward(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    return eager_attention_forward(module, 3 * query, *args, **kwargs)


class Sharp(SelfAttention):
    """Names one of the two functions of its file, as Llama 4's vision layers do."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return by_interface(self, x, mask, sharp_eager_attention_forward)


class Decorated(Sharp):
    @wraps(Sharp.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)


class Inherited(Sharp):
    pass


class Extended(Inherited):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, mask)


class Undecided(SelfAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        default = eager_attention_forward if mask is None else sharp_eager_attention_forward
        return by_interface(self, x, mask, default)


def boolean_eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    scores = (query @ key.transpose(2, 3)).masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.softmax(-1)


class Boolean(SelfAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return by_interface(self, x, mask, boolean_eager_attention_forward)


def of_kind(kind: type[SelfAttention], *masks: Tensor, **fields: Any) -> Odd:
    block = Block()
    block.attention.__class__ = kind
    return Odd(block, (sequences(2), *masks), **fields)


class Wordy(Block):
    # The signature differs from that of the base class, because this is what is tested.
    def forward(self, *, hidden: Tensor, options: dict[str, Any]) -> tuple[Tensor, None, str]:  # type: ignore[override]
        return super().forward(hidden, options["masks"][0]), None, "more"


class Wording(nn.Module):
    """Calls its block by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Wordy()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(hidden=x, options={"masks": (mask_of_window(6, window=3),), "name": "test"})[0]


def wordy() -> Odd:
    model = Wording()
    twin = lambda layer, x: by_hook(model, x, value="block.attention.value")  # noqa: E731
    return Odd(model.block, sequences(2), model=model, twin=twin)


def attention_as_layer() -> Odd:
    block = Block()
    twin = lambda layer, x: by_hook(layer, block.attention_norm(x), value="value")  # noqa: E731
    return Odd(block.attention, sequences(2), model=block, twin=twin)


BLOCKS: Table = {
    **rows("finish", finished, FINISHES),
    **rows("finish, masked", partial(finished, masked=True), ("gate by the input", "two projections", "no projection")),
    **rows("value that is nearly all", nearly_all, ("module", "neighbours", "norm", "alone")),
    "projection with a gate": gated_projection,
    "norms of a projection with a gate": partial(gated_projection, refused="output projection", by="norm"),
    **rows("condition", condition, CONDITIONS, [(3, LONG)]),
    **rows("condition", condition, ("each example", "each position", "sequence first"), [(4, 4)]),
    "attention as layer": attention_as_layer,
    "projection as layer": lambda: Odd(
        (block := Block()).attention.output, sequences(2), "Linear called no", model=block
    ),
    **rows("mask for each head", mask_for_each_head, (1, HEADS)),
    "tokens that skip themselves": tokens_skip_themselves,
    **rows("cross-attention as layer", cross_attention, [(5, 5)], (0, 2)),
    **rows("cross-attention as layer", cross_attention, [(5, 8), (8, 5)], (2,)),
    **rows("function", of_kind, (ByKeyword, Sharp, Decorated, Inherited, Extended)),
    "function: Boolean": lambda: of_kind(Boolean, torch.ones(6, 6, dtype=torch.bool).tril()[None, None]),
    "function: Undecided": partial(of_kind, Undecided, refused="name one function"),
    "keywords and further outputs": wordy,
}
