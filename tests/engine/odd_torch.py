"""Odd layers without transformers: of torch.nn, and home-made ones that call torch's attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_vz.errors import RefusedError
from tests.engine.odd import Odd, Table, by_call, rows

WIDTH, HEADS, TOKENS = 16, 4, 5


def drawn(length: int = TOKENS, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def encoder(batch_first: bool, norm_first: bool, nested: bool) -> Odd:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested and batch_first).double().eval()
    x, padding = drawn(), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = x if batch_first else x.transpose(0, 1)

    def twin(layer: nn.Module, x: Tensor) -> Tensor:
        found = by_call(layer, x, sources=TOKENS, src_key_padding_mask=padding)
        found = found if batch_first else found.transpose(0, 1)
        return found * ~padding[:, :, None] * ~padding[:, None, :]

    return Odd(model.layers[0], x, model=lambda x: model(x, src_key_padding_mask=padding), twin=twin)


def decoder(batch_first: bool, sources: int, attention: str) -> Odd:
    """With a memory as long as the sequence, shapes do not distinguish the two attentions."""
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, batch_first=batch_first)
    model = nn.TransformerDecoder(layer, 2).double().eval()
    given = tuple(one if batch_first else one.transpose(0, 1) for one in (drawn(), drawn(sources)))
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
    cross = attention == "cross"

    def twin(layer: nn.Module, *given: Tensor) -> Tensor:
        found = by_call(layer, *given, sources=sources if cross else TOKENS, calls=[int(cross)], tgt_mask=causal)
        return found if batch_first else found.transpose(0, 1)

    options = {"attention": attention}
    model_of = partial(model, tgt_mask=causal)
    return Odd(model.layers[0], given, model=model_of, twin=twin, options=options)


class GroupedAttention(nn.Module):
    """Causal attention of a home-made GPT, with grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.keys_values = nn.Linear(WIDTH, WIDTH)  # two keys and two values of width 4
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.queries(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.keys_values(x).unflatten(-1, (4, -1)).transpose(1, 2).chunk(2, dim=1)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(context.transpose(1, 2).flatten(2))


class OneForward(nn.Module):
    """A block whose forward calls an attention function."""

    def __init__(self, attention: Callable[[Tensor], Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.inner = attention, inner
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def inline() -> OneForward:
    """The attention's code runs in the block, and not as a module."""
    own = GroupedAttention()
    return OneForward(lambda x: GroupedAttention.forward(own, x), own)


class Twice(OneForward):
    """Runs one attention on its own output."""

    def __init__(self) -> None:
        super().__init__(GroupedAttention())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.attention(x))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask)


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def merged(context: Tensor) -> Tensor:
    return context.transpose(1, 2).flatten(2)


def difference(x: Tensor) -> Tensor:
    """Differential attention: the difference of two attentions over the same values."""
    first, second = heads_of(x), heads_of(x.flip(-1))
    return merged(attend(first, second, first) - attend(second, second, first) / 2)


def head_by_head(x: Tensor) -> Tensor:
    heads = heads_of(x).split(1, dim=1)
    return merged(torch.cat([attend(head, head, head) for head in heads], dim=1))


def without_heads(x: Tensor) -> Tensor:
    mask = torch.ones(len(x), TOKENS, TOKENS, dtype=torch.bool).tril()
    return attend(x, x, x, mask)


def local_and_global(x: Tensor) -> Tensor:
    near = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-1)
    one, other = heads_of(x).split(1, dim=1)
    return merged(torch.cat([attend(one, one, one, near), attend(other, other, other)], dim=1))


def written_over(x: Tensor) -> Tensor:
    """Writes into the memory of its values after the attention."""
    values = x * 2
    context = merged(attend(heads_of(x), heads_of(x), heads_of(values)))
    values.neg_()
    return context


def by_content(x: Tensor) -> Tensor:
    """Only the three tokens with the largest first entries are seen. The others are no padding."""
    keys = torch.zeros(x.shape[:2], dtype=torch.bool).scatter(1, x[..., 0].topk(3).indices, True)
    return merged(attend(heads_of(x), heads_of(x), heads_of(x), keys[:, None, None]))


def after_registers(x: Tensor) -> Tensor:
    """Each token sees two registers, which come first, and the tokens before it."""
    sources = torch.cat([torch.linspace(-1, 1, 2 * WIDTH, dtype=x.dtype).view(1, 2, -1).expand(len(x), -1, -1), x], 1)
    earlier = torch.ones(TOKENS, TOKENS + 2, dtype=torch.bool).tril(1)
    return merged(attend(heads_of(x), heads_of(sources), heads_of(sources), earlier))


def one_forward(attention: Callable[[Tensor], Tensor], **fields: Any) -> Odd:
    return Odd(OneForward(attention), drawn(), twin=by_call, **fields)


def in_bfloat16(attention: Callable[[Tensor], Tensor]) -> Odd:
    layer, x = OneForward(attention).bfloat16(), drawn().bfloat16()
    return Odd(layer, x, twin=lambda layer, x: by_call(layer.double(), x.double()), tolerance=1e-3)


def replaced(sharper: int, **fields: Any) -> Odd:
    """A function that computes the same is accepted. Any other function is refused."""
    torchs = F.scaled_dot_product_attention

    def users(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torchs(query * sharper, *args, **kwargs)

    return one_forward(without_heads, around=partial(patch.object, F, "scaled_dot_product_attention", users), **fields)


def side_by_side(attention: str) -> Odd:
    both = nn.Sequential(GroupedAttention(), GroupedAttention())
    layer = OneForward(lambda x: both[0](x) + both[1](x), both)
    refused = "two attentions over"
    return Odd(layer, drawn(), refused, options={"attention": attention})


class ReadsBackwards(nn.TransformerEncoderLayer):
    """Passes keys and values in the reverse order."""

    def _sa_block(self, x: Tensor, *masks: Any, is_causal: bool = False) -> Tensor:
        y = x.flip(1)
        return self.self_attn(x, y, y, need_weights=False)[0]


def upper_half(x: Tensor) -> Tensor:
    """Entries above the median of all positions. Other entries become zero."""
    return x * (x > x.flatten(0, -2).median(0).values)


def changed(kind: Callable[..., nn.Module], norm_first: bool) -> Odd:
    """Layers whose `forward` is torch's."""
    layer = kind(WIDTH, HEADS, 32, batch_first=True, norm_first=norm_first).double().eval()
    flipped = [-1] if isinstance(layer, ReadsBackwards) else []
    return Odd(layer, drawn(20, batch=1), twin=lambda *given: by_call(*given).flip(flipped))


def changed_activation(*args: Any, **kwargs: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(*args, **kwargs, activation=upper_half)


CHANGED = (ReadsBackwards, changed_activation)


class OfTorch(nn.Module):
    """A block whose attention is torch's module."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **more)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.double().eval()

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return x + self.mlp(x)


def with_more(more: str, padding: str) -> Odd:
    """An attention with more sources than the layer's tokens, after them."""
    padded = torch.tensor([[False] * TOKENS, [one == "1" for one in padding]])
    twin = lambda *given: by_call(*given, sources=TOKENS + 1) * ~padded[:, :, None]  # noqa: E731
    return Odd(OfTorch(**{more: True}), (drawn(), padded), twin=twin)


class Unread(OfTorch):
    """A decoder's layer whose first attention no tap reads, or that has only a cross-attention."""

    def __init__(self, reads_itself: bool, stops_nan: bool) -> None:
        super().__init__()
        self.reads_itself, self.stops_nan = reads_itself, stops_nan

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor | None = None) -> Tensor:
        if self.stops_nan:
            x, memory = x.nan_to_num(), memory.nan_to_num()
        if self.reads_itself:
            x = x + (x @ x.mT).softmax(-1) @ x
        x = x + self.attention(x, memory, memory, key_padding_mask=hidden, need_weights=False)[0]
        return x + self.mlp(x)


def unread(kind: str, stops_nan: bool, sources: int) -> Odd:
    hidden = torch.zeros(2, sources, dtype=torch.bool)
    hidden[0, 1:3] = True
    given = drawn(), drawn(sources), *([hidden] if kind == "hidden sources" else [])
    refused = "something else that" if kind == "after another" else ""
    return Odd(Unread(bool(refused), stops_nan), given, refused, twin=partial(by_call, sources=sources))


class AsksForWeights(OfTorch):
    """Asks torch's module for its weights, as torch's documentation does."""

    def __init__(self, uses: bool = False) -> None:
        super().__init__()
        self.uses, self.needs, self.seen = uses, True, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        context, weights = self.attention(x, x, x, need_weights=self.needs)
        if weights is not None:
            self.seen = weights.clamp_min(1e-9).log() if self.uses else weights
        return x + context + self.mlp(x + context)


def asks_for_weights(uses: bool, device: str | None = None) -> Odd:
    """A default device is a function mode. Under function modes torch calls its own function twice."""

    def twin(layer: AsksForWeights, x: Tensor) -> Tensor:
        layer.needs = False  # else torch computes them by other functions
        return by_call(layer, x)

    around = nullcontext if device is None else partial(torch.device, device)
    return Odd(AsksForWeights(uses), drawn(), twin=twin, around=around)


SWITCH = (False, True)
PARTS = (difference, head_by_head, local_and_global, without_heads)
LAYERS: Table = {
    **rows("torch's encoder", encoder, SWITCH, (False,), (True,)),
    **rows("torch's encoder", encoder, (True,), (True,), (False,)),
    **rows("torch's decoder", decoder, (True,), (TOKENS,), ("self", "cross")),
    **rows("torch's decoder", decoder, (False,), (3,), ("self", "cross")),
    "grouped queries": lambda: Odd(inline(), drawn(), twin=by_call),
    **rows("one forward", one_forward, (*PARTS, written_over, by_content)),
    "registers before strictly causal tokens": lambda: Odd(
        OneForward(after_registers), drawn(), twin=partial(by_call, sources=TOKENS + 2)
    ),
    "one attention twice": lambda: Odd(Twice(), drawn(), "attends several"),
    **rows("one forward in bfloat16", in_bfloat16, (difference, without_heads)),
    "weights of parts": lambda: one_forward(difference, refused="computed in 2 parts", by="attention"),
    "replaced function": partial(replaced, 1),
    "replaced function that differs": partial(replaced, 3, refused="Another function", error=RefusedError),
    **rows("side by side", side_by_side, ("self", "cross")),
    **rows("changed", changed, CHANGED, SWITCH),
    **rows("with more sources", with_more, ("add_bias_kv",), ("00011",)),
    **rows("with more sources", with_more, ("add_zero_attn",), ("11000",)),
    **rows("unread", unread, ("after another",), (False,), (TOKENS,)),
    **rows("unread", unread, ("cross-attention alone", "hidden sources"), (True,), (TOKENS,)),
    **rows("unread", unread, ("cross-attention alone",), (False,), (3,)),
    **rows("unread", unread, ("hidden sources",), (False,), (TOKENS + 2,)),
    "asks for weights: False: None": lambda: asks_for_weights(False),
    "asks for weights: True: cpu": lambda: asks_for_weights(True, "cpu"),
}
