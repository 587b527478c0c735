"""Home-made Transformer blocks with one peculiarity each, and a twin that zeroes their values one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WIDTH, HEADS = 16, 4


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The attention function of `SelfAttention`, in the file of its class, as in transformers' own modules."""
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attention_function(name: str, eager: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a layer of transformers calls: by `get_interface`, or as layers asked before transformers 5."""
    if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
        return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return ALL_ATTENTION_FUNCTIONS[name] if name != "eager" else eager


class SelfAttention(nn.Module):
    """Attention through transformers' AttentionInterface. `finish` computes its output from the context."""

    is_causal = False

    def __init__(self, finish: Callable[[SelfAttention, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.config._attn_implementation = "eager"
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.finish = finish
        self.rates = [0.0]  # in a list, where no check looks for dropout
        self.careless = False  # whether to pass the rate in eval mode too

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = (linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        attend = attention_function(self.config._attn_implementation, eager_attention_forward)
        context, _ = attend(self, *parts, mask, dropout=self.rates[0] if self.training or self.careless else 0.0)
        context = context.flatten(2)
        return self.output(context) if self.finish is None else self.finish(self, context, x)


class Block(nn.Module):
    """A pre-norm block. The output of `after` is added between the attention and the feed-forward layer."""

    def __init__(
        self, after: nn.Module | None = None, finish: Callable[[SelfAttention, Tensor, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(finish)
        self.after = after
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.double().eval()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        if self.after is not None:
            x = x + self.after(x)
        return x + self.feed_forward(self.norm(x))


class Projections(nn.Module):
    """The linear layers of an attention module."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)]


def block_of(attention: nn.Module) -> Block:
    """A block with another attention."""
    block = Block()
    block.attention = attention
    return block.double().eval()


class Reader(SelfAttention):
    """A cross-attention without the rest of a decoder's layer."""

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        read = x if memory is None else memory
        given = ((self.query, x), (self.key, read), (self.value, read))
        parts = [linear(one).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear, one in given]
        attend = attention_function(self.config._attn_implementation, eager_attention_forward)
        return x + self.output(attend(self, *parts, mask)[0].flatten(2))


class Conditioned(Block):
    """Takes one more tensor. `use` applies it after the attention."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.use(x + self.attention(self.attention_norm(x), mask), condition)
        return x + self.feed_forward(self.norm(x))


def scale_each_position(x: Tensor, condition: Tensor) -> Tensor:
    return x * condition


class Halves(Block):
    """A block that attends within each half of the sequence. `prepare` changes the attention's input."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare = prepare

    def forward(self, x: Tensor) -> Tensor:
        halves = self.prepare(self.attention_norm(x)).reshape(-1, x.shape[1] // 2, x.shape[2])
        x = x + self.attention(halves).reshape(x.shape)
        return x + self.feed_forward(self.norm(x))


class HandedOn(Halves):
    """After the windows, each example depends on the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.roll(1, dims=0).cumsum(1)


class Convolution(nn.Module):
    """Mixes neighbours: position i depends on i - 1 and i + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).mT


class Stopping(Convolution):
    """The same for positive entries. NaN becomes zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(x > 0, x, 0))


class Mean(nn.Module):
    """Mixes all positions, whatever their order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


class Ahead(nn.Module):
    """Position i depends on i + 1, and the last position on no other."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, -1, 1))


class CausalMean(nn.Module):
    """Position i depends on all positions before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, 1 + x.shape[1])[:, None]


class Crowd(nn.Module):
    """Changes the first `capacity` positions of a run, and returns zeros for all others."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        served = torch.arange(x[..., 0].numel()).reshape(x.shape[:2]) < self.capacity
        return torch.where(served[..., None], x.flip(-1), 0)


class Noise(nn.Module):
    """Returns other numbers in each run."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.randn_like(x)


def sequences(batch: int, length: int = 6) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def as_added(visible: Tensor) -> Tensor:
    """A bool mask as it is added to the scores."""
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)


def mask_of_window(length: int, window: int) -> Tensor:
    """A causal mask of `window` tokens, the token itself included: `(1, 1, out, in)`, added to the scores."""
    visible = torch.ones(length, length).tril().triu(1 - window).bool()
    return as_added(visible[None, None])


def direction(x: Tensor) -> Tensor:
    return nn.functional.normalize(x, dim=-1, eps=1e-300)


@contextmanager
def without_value_of(source: int, *projections: nn.Module, axis: int = 1) -> Iterator[None]:
    """While the block runs, the row of one source is zero in the output of value projections, also in a tuple."""

    def zero(module: nn.Module, inputs: Any, output: Any) -> Any:
        first, *rest = (output,) if isinstance(output, Tensor) else output
        first = first.index_fill(axis, torch.tensor(source), 0)
        return (first, *rest) if rest else first

    with ExitStack() as hooks:
        for projection in projections:
            hooks.enter_context(projection.register_forward_hook(zero))
        yield


@torch.no_grad()
def zeroed_in_its_batch(
    block: nn.Module, x: Tensor, *, value: str = "attention.value", normalize: bool = True
) -> Tensor:
    """The map of a block with values zeroed in one example at a time, for examples that depend on each other."""
    clean, maps = direction(block(x)), []
    for example in range(len(x)):
        columns = []
        for source in range(x.shape[1]):

            def zero(module: nn.Module, inputs: Any, values: Tensor, place: Any = (example, source)) -> Tensor:
                return values.index_put(tuple(map(torch.tensor, place)), torch.zeros((), dtype=values.dtype))

            with block.get_submodule(value).register_forward_hook(zero):
                columns.append((direction(block(x)) - clean)[example].square().sum(-1) / 2)
        maps.append(torch.stack(columns, dim=-1))
    scores = torch.stack(maps)
    return scores / scores.sum(-1, keepdim=True) if normalize else scores


def zeroed_one_by_one(
    block: nn.Module,
    x: Tensor,
    *args: Any,
    value: str = "attention.value",
    normalize: bool = True,
    sources: int | None = None,
) -> Tensor:
    """The map of a block by its definition, `(batch, out, in)`: one rerun a source, with its value row zeroed.

    `value` names the value projection. `sources` is the number of its rows, if it is not that of `x`.
    """
    clean = block(x, *args)
    columns = []
    for source in range(sources or x.shape[1]):

        def zero(module: nn.Module, inputs: Any, values: Tensor, source: int = source) -> Tensor:
            values = values.clone(memory_format=torch.contiguous_format)
            values.view(len(x), -1, values.shape[-1])[:, source] = 0  # in windows, too
            return values

        with block.get_submodule(value).register_forward_hook(zero):
            # Equal to 1 - cosine, which would be lost in rounding where little changes.
            columns.append((direction(block(x, *args)) - direction(clean)).square().sum(-1) / 2)
    scores = torch.stack(columns, dim=-1)
    return scores / scores.sum(-1, keepdim=True) if normalize else scores
