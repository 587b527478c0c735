"""Odd layers that use their values, or other heads, where the attention that is read does not show it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.engine.blocks import HEADS, WIDTH, Convolution, Projections, block_of, mask_of_window, sequences
from tests.engine.by_name import ByName, InAMethod
from tests.engine.odd import LONG, Odd, Table, by_call, by_hook, rows


class Computed(Projections):
    """Attention whose context is computed by a function of the module, its input, its queries, keys and values.

    Without `projects`, the function is given the module and its input alone.
    """

    def __init__(self, compute: Callable[..., Any], inner: nn.Module | None = None, projects: bool = True) -> None:
        super().__init__()
        self.compute, self.inner, self.projects = compute, inner, projects

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        context = self.compute(self, x, *(self.heads(x) if self.projects else ()))
        return self.output(merged(context) if context.dim() == 4 else context)


class Fused(Computed):
    """The same with queries, keys and values of one projection."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        return list(self.fused(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4))


def odd(
    compute: Callable[..., Any],
    refused: str = "",
    *,
    kind: type[Computed] = Computed,
    inner: nn.Module | None = None,
    projects: bool = True,
    wrap: Callable[[Any], Any] = lambda forward: forward,
    batch: int = 2,
    **fields: Any,
) -> Odd:
    """A row of the table. `wrap` makes the attention's forward."""
    attention = kind(compute, inner, projects)
    attention.forward = wrap(attention.forward)  # type: ignore[method-assign]
    x = sequences(batch) if refused else sequences(batch, LONG)
    return Odd(block_of(attention), x, refused, **{"twin": by_call, **fields})


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def merged(context: Tensor) -> Tensor:
    return context.transpose(1, 2).flatten(2)


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


OTHERS: dict[str, Callable[..., Any]] = {
    "on five axes": lambda *parts: attend(*(one[:, None] for one in parts))[:, 0],
    "by hand": by_hand,
    "linear": lambda query, key, value: query.softmax(-1) @ (key.softmax(2).mT @ value),
    # Under a name that is in no module's file.
    "by name": lambda *parts, function=torch._C._nn.scaled_dot_product_attention: function(*parts),
}


def hidden_heads(other: str, kind: type[Computed], first: bool, **fields: Any) -> Odd:
    """Half of the heads by the function that is read, the others by another one."""

    def compute(own: Any, x: Tensor, *parts: Tensor) -> Tensor:
        seen, others = zip(*(one.chunk(2, 1) for one in parts), strict=True)
        return torch.cat(
            [OTHERS[other](*others), attend(*seen)] if first else [attend(*seen), OTHERS[other](*others)], 1
        )

    return odd(compute, "another attention", kind=kind, **fields)


hidden_in_all_ways = partial(hidden_heads, by="zeroing attention gradient effect")


def second_attention(other: str, first: bool) -> Odd:
    """Adds the output of a second attention, which has its own projections, to the output of the first."""

    def compute(own: Any, x: Tensor, *parts: Tensor) -> Tensor:
        if first:
            return OTHERS[other](*own.inner.heads(x)) + attend(*parts)
        return attend(*parts) + OTHERS[other](*own.inner.heads(x))

    return odd(compute, "another attention", inner=Projections(), by="zeroing attention")


def without_own_direction(own: Any, context: Tensor, value: Tensor) -> Tensor:
    along = functional.normalize(value, dim=-1)
    return context - (context * along).sum(-1, keepdim=True) * along


USES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "subtracted": without_own_direction,
    "skip": lambda own, context, value: context + value,
    "convolved": lambda own, context, value: context + own.inner(value),
    "gate": lambda own, context, value: context * value.sigmoid(),
}
WITHOUT_GRADIENTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "detached": lambda own, context, value: context + value.detach(),
    "numpy": lambda own, context, value: context + torch.from_numpy(value.detach().numpy()),
    "threshold": lambda own, context, value: context * (value > 0),
    "place of the largest": lambda own, context, value: context + value.argmax(-1, keepdim=True),
    "rounded": lambda own, context, value: context + value.round(),
}
USED = "values outside the"


def used_twice(name: str, grouped: bool, copied: bool, mode: Any = None) -> Odd:
    """Uses its values once more, before or after the attention. A mode may switch gradients off."""

    def compute(own: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if grouped:
            value = value[:, :1].expand(-1, HEADS, -1, -1)
        given = value.contiguous().clone() if copied else value
        return (USES | WITHOUT_GRADIENTS)[name](own, merged(attend(query, key, given)), merged(value))

    by = "zeroing effect" if name in USES and mode is None else "zeroing"
    return odd(compute, USED, inner=Convolution(), by=by, **({} if mode is None else {"wrap": mode()}))


def in_two_calls(own: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    first, second = (one.contiguous() for one in value.chunk(2, 1))
    seen = attend(query[:, :2], key[:, :2], first), attend(query[:, 2:], key[:, 2:], second)
    return torch.cat([seen[0] + first.detach(), seen[1]], 1)


KEPT: dict[str, Tensor] = {}


def kept_elsewhere(own: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    KEPT["values"] = value.contiguous()
    return attend(query, key, KEPT["values"]) + KEPT["values"].detach()


class AsFunction(torch.autograd.Function):
    """Attention by torch's function, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        return attend(*parts)

    @staticmethod
    def backward(ctx: Any, *shares: Tensor) -> Any:
        with torch.enable_grad():
            parts = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            return torch.autograd.grad(by_hand(*parts), parts, shares)


def turned(own: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Values are turned by an angle of their place."""
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    value = value * angle.cos() + torch.cat([-value[..., 2:], value[..., :2]], -1) * angle.sin()
    return attend(query, key, value)


def memory(own: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Learned keys and values, which are no sequence's."""
    slots = own.inner[0]
    return merged(attend(query, slots.expand(len(x), -1, -1, -1), slots)) + slots.mean()


def itself(own: Any, x: Tensor) -> Tensor:
    """The input is values, keys and queries."""
    parts = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return merged(attend(parts, parts, parts)) + x


def packed(own: Any, x: Tensor) -> Tensor:
    """One projection makes queries, keys, values, a gate and the feed-forward layer's hidden states."""
    *parts, gate, hidden = own.inner(x).chunk(5, -1)
    context = merged(attend(*(one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in parts)))
    return context * gate.sigmoid() + hidden.relu()


def in_place(own: Any, x: Tensor, *parts: Tensor) -> Tensor:
    context = merged(attend(*parts))
    context *= 2
    x = x.clone()
    x.relu_()
    context += x
    return context


class ConvolutionAdded(Computed):
    """A convolution of the layer's input outside the attention."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert self.inner is not None
        return super().forward(x) + self.inner(x)


class Adapted(nn.Module):
    """Two projections make a value, as with LoRA."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


class WithAdapters(Computed):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.query, self.value = Adapted(self.query), Adapted(self.value)  # type: ignore[assignment]


def plain(own: Any, x: Tensor, *parts: Tensor) -> Tensor:
    return attend(*parts)


def once(name: str, grad: str) -> Odd:
    found = {
        "one projection": lambda: odd(packed, inner=nn.Linear(WIDTH, 5 * WIDTH), projects=False),
        "convolution added": lambda: odd(plain, inner=Convolution(), kind=ConvolutionAdded),
        "in place": lambda: odd(in_place),
    }[name]()
    found.layer.requires_grad_(grad == "on")
    found.around = partial(torch.inference_mode, grad == "inference")
    return found


def checkpointed(again: bool, forward: Any) -> Any:
    return lambda x, mask: checkpoint(forward, x, use_reentrant=again)


TORCHS = {"function": functional.scaled_dot_product_attention}  # under a name that is no global name of this file


class OnModule(Projections):
    """Attention that calls torch's function as an attribute of the module."""

    def __init__(self, sharper: int = 1) -> None:
        super().__init__()
        torchs = TORCHS["function"]
        self.attend = torchs if sharper == 1 else lambda query, *rest, **more: torchs(sharper * query, *rest, **more)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(merged(self.attend(*self.heads(x), attn_mask=mask)))


class OnClass(Projections):
    """Attention that calls torch's function as an attribute of the class."""

    attend = staticmethod(TORCHS["function"])
    forward = OnModule.forward


def by_its_name(kind: type[nn.Module], masked: bool) -> Odd:
    x = sequences(2, LONG)
    return Odd(block_of(kind()), (x, mask_of_window(LONG, window=3)) if masked else x, token=2)


SWITCH = (False, True)
ATTENTIONS: Table = {
    **rows("torch's function", by_its_name, (ByName, InAMethod, OnModule, OnClass), (True,)),
    "torch's function: ByName: False": lambda: by_its_name(ByName, False),
    "torch's function: another of its name": lambda: Odd(
        block_of(OnModule(sharper=3)), sequences(2), "called no attention"
    ),
    **rows("heads", hidden_in_all_ways, OTHERS, (Computed,), (False,)),
    **rows("heads", hidden_in_all_ways, ("on five axes", "by hand"), (Fused,), (True,)),
    **rows("second attention", second_attention, OTHERS, (False,)),
    "second attention: on five axes: True": lambda: second_attention("on five axes", True),
    **rows("used twice", used_twice, USES, (False,), (False,)),
    **rows("used twice", used_twice, ("skip", *WITHOUT_GRADIENTS), (True,), (True,)),
    **rows("used twice", used_twice, ("skip", "convolved"), (False,), (True,), (torch.no_grad,)),
    **rows("checkpoint", lambda again: odd(plain, wrap=partial(checkpointed, again)), SWITCH),
    **rows("once", once, ("one projection", "convolution added"), ("on", "inference")),
    "once: in place: on": lambda: once("in place", "on"),
    "used before: a gate": lambda: odd(lambda own, x, q, k, v: (v > 0).to(v) * attend(q, k, v), USED),
    "used: one number": lambda: odd(lambda own, x, q, k, v: attend(q, k, v) + 0.1 * v.sum().item(), USED),
    "used: in two calls": lambda: odd(in_two_calls, USED),
    "used: written into": lambda: odd(lambda own, x, q, k, v: v.add_(attend(q, k, v).detach()), USED),
    "used: kept elsewhere": lambda: odd(kept_elsewhere, USED),
    "values are a context": lambda: odd(lambda own, x, q, k, v: attend(q, k, attend(q, k, v)), "a context as values"),
    "under vmap": lambda: odd(lambda own, x, *parts: torch.vmap(attend)(*parts), "called no attention"),
    "in an autograd function": lambda: odd(lambda own, x, *parts: AsFunction.apply(*parts)),
    "difference of two": lambda: odd(
        lambda own, x, q, k, v: attend(q.flip(-1), k.flip(-1), v) - 0.5 * attend(q.flip(2, 3), k.flip(-1), v)
    ),
    "from the end": lambda: odd(lambda own, x, *parts: attend(*(one.flip(2) for one in parts)).flip(2), twin=by_hook),
    "turned": lambda: odd(turned),
    "values of an adapter": lambda: odd(plain, kind=WithAdapters),
    "memory": lambda: odd(memory, inner=nn.ParameterList([torch.randn(1, HEADS, LONG, WIDTH // HEADS)])),
    "its input is its values": lambda: odd(itself, projects=False),
}
