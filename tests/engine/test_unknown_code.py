"""Layers that use their values, or other heads, where the attention that is read does not show it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from captum_vz import LayerAttention, LayerAttentionGradient, ValueZeroing, ValueZeroingEffect
from captum_vz.errors import RefusedError, UnsupportedLayerError
from tests.engine.blocks import (
    HEADS,
    WIDTH,
    Block,
    Convolution,
    Projections,
    block_of,
    direction,
    sequences,
    zeroed_one_by_one,
)
from tests.engine.compare import assert_same

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def on_five_axes(*parts: Tensor) -> Tensor:
    return attend(*(one[:, None] for one in parts))[:, 0]


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def by_exponentials(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query[:, :, :, None] * key[:, :, None]).sum(-1).exp()
    return (scores[..., None] * value[:, :, None]).sum(3) / scores.sum(-1, keepdim=True)


def by_name(*parts: Tensor, function: Any = torch._C._nn.scaled_dot_product_attention) -> Any:
    """Calls torch's function under a name that is in no module's file."""
    return function(*parts)


class Kernel(torch.autograd.Function):
    """Attention by a kernel that has no backward pass."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        return by_hand(*parts)


def by_kernel(*parts: Tensor) -> Any:
    return Kernel.apply(*parts)


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.softmax(-1) @ (key.softmax(2).mT @ value)


def linear_by_last_axes(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.softmax(-1) @ (key.softmax(-2).mT @ value)


def merged(context: Tensor) -> Tensor:
    return context.transpose(1, 2).flatten(2)


class TwoKinds(Projections):
    """Half of the heads by the function that is read, the others by another one."""

    def __init__(self, other: Attend, first: bool) -> None:
        super().__init__()
        self.other, self.first = other, first

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        seen, others = zip(*(one.chunk(2, 1) for one in self.heads(x)), strict=True)
        both = [self.other(*others), attend(*seen)] if self.first else [attend(*seen), self.other(*others)]
        return self.output(torch.cat(list(map(merged, both)), -1))


class Fused(TwoKinds):
    """The same with queries, keys and values of one projection."""

    def __init__(self, other: Attend, first: bool) -> None:
        super().__init__(other, first)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        return list(self.inner(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4))


class OfItsOwn(Projections):
    """A second attention beside the first, with projections of its own."""

    def __init__(self, other: Attend, first: bool) -> None:
        super().__init__()
        self.other, self.first, self.inner = other, first, Projections()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        before = self.other(*self.inner.heads(x)) if self.first else 0
        context = attend(*self.heads(x))
        return self.output(merged(context + (before if self.first else self.other(*self.inner.heads(x)))))


def by_numpy(*parts: Tensor) -> Tensor:
    return torch.from_numpy(by_hand(*parts).detach().numpy())


def in_a_thread(*parts: Tensor) -> Tensor:
    with ThreadPoolExecutor() as pool:
        return pool.submit(torch.no_grad()(by_hand), *parts).result()


OTHERS = [on_five_axes, by_hand, by_exponentials, linear_attention, by_name, by_numpy, in_a_thread]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", [TwoKinds, Fused])
@pytest.mark.parametrize("other", OTHERS)
def test_heads_that_are_not_seen(other: Attend, kind: type[TwoKinds], first: bool) -> None:
    block, x = block_of(kind(other, first)), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="Block mixes its tokens by other features"):
        ValueZeroing(block, block).attribute(x)
    with pytest.raises(UnsupportedLayerError, match="Block mixes its tokens by other features"):
        LayerAttention(block, block).attribute(x)
    with pytest.raises(UnsupportedLayerError, match="Block mixes its tokens by other features"):
        LayerAttentionGradient(nn.Sequential(block), block, objective=lambda y: y[:, 0].sum(-1)).attribute(x)
    with pytest.raises(UnsupportedLayerError, match="Block mixes its tokens by other features"):
        ValueZeroingEffect(block, block).attribute(x, target=(1, 0))


@pytest.mark.parametrize("kind", [TwoKinds, Fused])
def test_heads_of_a_kernel_without_derivative(kind: type[TwoKinds]) -> None:
    block, x = block_of(kind(by_kernel, first=False)), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="Block mixes its tokens by other features"):
        ValueZeroing(block, block).attribute(x)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("other", [on_five_axes, by_hand, by_name, linear_attention, linear_by_last_axes])
def test_second_attention_that_is_not_seen(other: Attend, first: bool) -> None:
    block, x = block_of(OfItsOwn(other, first)), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="Block computes another attention"):
        ValueZeroing(block, block).attribute(x)
    with pytest.raises(UnsupportedLayerError, match="Block computes another attention"):
        LayerAttention(block, block).attribute(x)


class UsedTwice(Projections):
    """Uses its values once more, before or after the attention."""

    def __init__(self, use: Callable[[UsedTwice, Tensor, Tensor], Tensor], copied: bool, grouped: bool = False) -> None:
        super().__init__()
        self.use, self.copied, self.grouped = use, copied, grouped
        self.inner = Convolution()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.heads(x)
        if self.grouped:
            value = value[:, :1].expand(-1, HEADS, -1, -1)
        given = value.contiguous().clone() if self.copied else value
        return self.output(self.use(self, merged(attend(query, key, given)), merged(value)))


def without_own_direction(module: UsedTwice, context: Tensor, value: Tensor) -> Tensor:
    along = functional.normalize(value, dim=-1)
    return context - (context * along).sum(-1, keepdim=True) * along


USES: dict[str, Callable[[UsedTwice, Tensor, Tensor], Tensor]] = {
    "subtracted": without_own_direction,
    "skip": lambda module, context, value: context + value,
    "convolved": lambda module, context, value: context + module.inner(value),
    "gate": lambda module, context, value: context * value.sigmoid(),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("use", USES)
def test_values_that_are_used_twice(use: str, grouped: bool, copied: bool) -> None:
    block, x = block_of(UsedTwice(USES[use], copied, grouped)), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="Block uses its values outside the attention"):
        ValueZeroing(block, block).attribute(x)
    with pytest.raises(UnsupportedLayerError, match="Block uses its values outside the attention"):
        ValueZeroingEffect(block, block).attribute(x, target=(1, 0))


WITHOUT_GRADIENTS: dict[str, Callable[[UsedTwice, Tensor, Tensor], Tensor]] = {
    "detached": lambda module, context, value: context + value.detach(),
    "numpy": lambda module, context, value: context + torch.from_numpy(value.detach().numpy()),
    "threshold": lambda module, context, value: context * (value > 0),
    "place of the largest": lambda module, context, value: context + value.argmax(-1, keepdim=True),
    "rounded": lambda module, context, value: context + value.round(),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("use", WITHOUT_GRADIENTS)
def test_values_used_where_no_gradient_flows(use: str, grouped: bool, copied: bool) -> None:
    block, x = block_of(UsedTwice(WITHOUT_GRADIENTS[use], copied, grouped)), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="Block uses its values outside the attention"):
        ValueZeroing(block, block).attribute(x)


class Computed(Projections):
    """Attention whose context is computed by a function of the module, queries, keys and values."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(merged(self.compute(x, *self.heads(x))))


def gated_before(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    gate = (value > 0).to(value)
    return attend(query, key, value) * gate


def loudest_before(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    loudest = value.norm(dim=-1).mean(1).topk(3).indices
    marked = torch.zeros_like(x[..., 0]).scatter(1, loudest, 1)
    return attend(query, key, value) * (1 + marked)[:, None, :, None]


def one_number(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value) + 0.1 * value.sum().item()


def in_two_calls(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    first, second = (one.contiguous() for one in value.chunk(2, 1))
    seen = attend(query[:, :2], key[:, :2], first), attend(query[:, 2:], key[:, 2:], second)
    return torch.cat([seen[0] + first.detach(), seen[1]], 1)


def written_into_values(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    value += attend(query, key, value).detach()
    return value


KEPT: dict[str, Tensor] = {}


def kept_elsewhere(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    KEPT["values"] = value.contiguous()
    return attend(query, key, KEPT["values"]) + KEPT["values"].detach()


EARLY = [gated_before, loudest_before, one_number, in_two_calls, written_into_values, kept_elsewhere]


@pytest.mark.parametrize("compute", EARLY)
def test_values_used_before_and_beside_the_attention(compute: Callable[..., Tensor]) -> None:
    block, x = block_of(Computed(compute)), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="Block uses its values outside the attention"):
        ValueZeroing(block, block).attribute(x)


def only_without_gradients(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value) + (0 if torch.is_grad_enabled() else value)


def numpy_alone(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value) + torch.from_numpy(value.numpy())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("compute", "cause"),
    [(only_without_gradients, "returns other numbers under"), (numpy_alone, "fails under")],
)
def test_code_that_is_another_with_gradients(compute: Callable[..., Tensor], cause: str, inference: bool) -> None:
    block, x = block_of(Computed(compute)), sequences(2)
    message = rf"Block {cause} torch\.enable_grad, .*Make forward independent of torch\.is_grad_enabled"
    with torch.inference_mode(inference), pytest.raises(UnsupportedLayerError, match=message) as raised:
        ValueZeroing(block, block).attribute(x)
    assert "one call of" not in str(raised.value)


class Keeps(Projections):
    """Writes its values, times a factor, into a tensor that it keeps, and adds this tensor to the context."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.kept = factor, {"values": torch.zeros(2, 7, WIDTH, dtype=torch.float64)}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        context = attend(*(parts := self.heads(x)))
        kept = self.kept["values"]
        kept[:, : x.shape[1]] = self.factor * merged(parts[2])[: len(kept)]
        return self.output(merged(context) + kept[: len(x), : x.shape[1]])


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_values_written_into_kept_tensor(factor: float, inference: bool) -> None:
    """The decision is the same in inference mode, in which the kept tensor cannot be part of a graph."""
    with torch.inference_mode(inference):
        block, x = block_of(Keeps(factor)), sequences(2)
        if factor:
            with pytest.raises(UnsupportedLayerError, match="Block uses its values outside the attention"):
                ValueZeroing(block, block).attribute(x)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = ValueZeroing(block, block).attribute(x)
        assert_same(found, zeroed_one_by_one(block, x, value="attention.value"))


def test_values_used_in_inference_mode() -> None:
    """A part of the layer that no graph shows runs in a mode of its own."""

    def hidden(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.inference_mode():
            more = by_hand(query, key, x.unflatten(-1, (HEADS, -1)).transpose(1, 2))
        return attend(query, key, value) + more

    block, x = block_of(Computed(hidden)), sequences(2)
    with pytest.raises(UnsupportedLayerError, match=r"Block enters torch\.inference_mode.*Use torch\.no_grad there"):
        ValueZeroing(block, block).attribute(x)


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


def in_a_function(x: Tensor, *parts: Tensor) -> Any:
    return AsFunction.apply(*parts)


def checkpointed(reentrant: bool) -> Callable[..., Any]:
    return lambda x, *parts: checkpoint(attend, *parts, use_reentrant=reentrant)


def by_halves(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The difference of two attentions over the same values."""
    query, key = query.flip(-1), key.flip(-1)
    return attend(query, key, value) - 0.5 * attend(query.flip(2), key, value)


def gated_by_queries(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value) * query.sigmoid()


def from_the_end(x: Tensor, *parts: Tensor) -> Tensor:
    return attend(*(one.flip(2) for one in parts)).flip(2)


def turned(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Values are turned by an angle of their place."""
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    value = value * angle.cos() + torch.cat([-value[..., 2:], value[..., :2]], -1) * angle.sin()
    return attend(query, key, value)


ONCE = [in_a_function, checkpointed(True), checkpointed(False), by_halves, gated_by_queries, from_the_end, turned]


@pytest.mark.parametrize("compute", ONCE)
def test_values_used_once_in_odd_ways(compute: Callable[..., Tensor]) -> None:
    block, x = block_of(Computed(compute)), sequences(2)
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x, value="attention.value"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_projections(reentrant: bool) -> None:
    attention, x = Computed(lambda x, *parts: attend(*parts)), sequences(2)
    forward = attention.forward
    attention.forward = lambda x, mask=None: checkpoint(forward, x, use_reentrant=reentrant)  # type: ignore[method-assign]
    block = block_of(attention)
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x, value="attention.value"))


def test_values_of_an_adapter() -> None:
    """Two projections make a value, as with LoRA."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 2 * self.up(self.down(x))

    attention, x = Computed(lambda x, *parts: attend(*parts)), sequences(2)
    attention.query, attention.value = Adapted(attention.query), Adapted(attention.value)  # type: ignore[assignment]
    block = block_of(attention)
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x, value="attention.value"))


@pytest.mark.parametrize("use", USES)
def test_values_used_twice_without_gradients(use: str) -> None:
    """The attention's own code switches gradients off."""
    attention, x = UsedTwice(USES[use], copied=True), sequences(2)
    attention.forward = torch.no_grad()(attention.forward)  # type: ignore[method-assign]
    block = block_of(attention)
    with pytest.raises(UnsupportedLayerError, match="Block uses its values outside the attention"):
        ValueZeroing(block, block).attribute(x)
    attention.forward = torch.inference_mode()(attention.forward)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedLayerError, match=r"Block enters torch\.inference_mode"):
        ValueZeroing(block, block).attribute(x)


class WritesParameters(Projections):
    """Counts in a parameter, under `torch.no_grad`."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            self.query.bias += 0
        return self.output(merged(attend(*self.heads(x))))


class Memory(Projections):
    """Learned keys and values, which are no sequence's."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, HEADS, 6, WIDTH // HEADS))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        context = attend(self.heads(x)[0], self.slots.expand(len(x), -1, -1, -1), self.slots)
        return self.output(merged(context) + self.slots.mean())


class Itself(Projections):
    """Its input is its values, its keys and its queries."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.output(merged(attend(parts, parts, parts)) + x)


@pytest.mark.parametrize("kind", [WritesParameters, Memory, Itself])
def test_memory_of_values_is_left_alone(kind: type[Projections]) -> None:
    block, x = block_of(kind()), sequences(1)
    before = {name: one.clone() for name, one in block.state_dict().items()}
    found = ValueZeroing(block, block).attribute(x)
    if kind is WritesParameters:
        assert_same(found, zeroed_one_by_one(block, x, value="attention.value"))
    assert all(torch.equal(one, before[name]) for name, one in block.state_dict().items())
    assert torch.equal(x, sequences(1))


class MixedValues(Projections):
    """The values of two tokens are summed, after their projection."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.heads(x)
        return self.output(merged(attend(query, key, value + value.roll(1, 2))))


def test_values_that_are_mixed_before_the_attention() -> None:
    block, x = block_of(MixedValues()), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="Block mixes its projected values"):
        ValueZeroing(block, block).attribute(x)


class TwoHops(Projections):
    """The context of one attention is the values of the next one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.heads(x)
        return self.output(merged(attend(query, key, attend(query, key, value))))


def test_values_that_are_a_context() -> None:
    block, x = block_of(TwoHops()), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="Block uses a context as values"):
        ValueZeroing(block, block).attribute(x)


class Packed(Projections):
    """One projection makes queries, keys, values, a gate and the feed-forward layer's hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        *parts, gate, hidden = self.inner(x).chunk(5, -1)
        context = merged(attend(*(one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in parts)))
        return self.output(context * gate.sigmoid() + hidden.relu())


class Shared(Projections):
    """Keys are the values, after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, _, value = self.heads(x)
        return self.output(merged(attend(query, self.inner(value), value)))


class KeysApart(Shared):
    """The same with a projection for the keys alone."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.heads(x)
        return self.output(merged(attend(query, self.inner(key), value)))


class Beside(Projections):
    """A convolution of the layer's input outside the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Convolution()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(merged(attend(*self.heads(x)))) + self.inner(x)


class InPlaceOf(Projections):
    """Writes into what it holds, without gradients, where it may."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        context = merged(attend(*self.heads(x)))
        context *= 2
        x = x.clone()
        x.relu_()
        context += x
        return self.output(context)


@pytest.mark.parametrize("grad", ["on", "off", "inference"])
@pytest.mark.parametrize("kind", [Packed, Beside, InPlaceOf])
def test_layers_that_use_their_values_once(kind: type[Projections], grad: str) -> None:
    attention = kind()
    block, x = block_of(attention), sequences(2)
    value = "attention.value"
    if kind is Packed:
        with torch.no_grad():
            attention.inner.weight[2 * WIDTH : 3 * WIDTH] = attention.value.weight
            attention.inner.bias[2 * WIDTH : 3 * WIDTH] = attention.value.bias
        expected = zeroed_columns(block, x, slice(2 * WIDTH, 3 * WIDTH))
    else:
        expected = zeroed_one_by_one(block, x, value=value)
    block.requires_grad_(grad == "on")
    with torch.inference_mode(grad == "inference"):
        found = ValueZeroing(block, block).attribute(x.clone())
    assert_same(found.clone(), expected)
    assert all(one.grad is None for one in block.parameters())


@torch.no_grad()
def zeroed_columns(block: Block, x: Tensor, columns: slice) -> Tensor:
    """The map by its definition, with the values in some columns of a projection."""
    clean, scores = block(x), []
    for source in range(x.shape[1]):

        def zero(module: nn.Module, inputs: Any, values: Tensor, source: int = source) -> Tensor:
            values = values.clone()
            values[:, source, columns] = 0
            return values

        with block.get_submodule("attention.inner").register_forward_hook(zero):
            scores.append((direction(block(x)) - direction(clean)).square().sum(-1) / 2)
    found = torch.stack(scores, -1)
    return found / found.sum(-1, keepdim=True)


def test_keys_may_be_the_values() -> None:
    """The weights stay as they are: the definition zeroes the value, and not the key."""
    block, x = block_of(Shared()), sequences(2)
    twin = block_of(KeysApart())
    twin.load_state_dict(block.state_dict())
    twin.attention.key.load_state_dict(block.attention.value.state_dict())
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(twin, x))


class Unsteady(nn.Module):
    """Scales what it is given by what a function returns in each run."""

    def __init__(self, scale: Callable[[], float | Tensor]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale()


def draws(kind: str) -> Callable[[], float | Tensor]:
    """Drops now and then, by random numbers of torch, Python or numpy."""
    draw = {"torch": lambda: float(torch.rand(())), "python": random.random, "numpy": numpy.random.rand}[kind]
    return lambda: 1.0 if draw() < 0.999 else 0.0


@pytest.mark.parametrize("after", [None, Convolution])
@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_random_numbers_in_eval_mode(kind: str, after: Any) -> None:
    """The runs that check the layer mostly agree, so only the generators show it."""
    block, x = Block(after=nn.Sequential(*([after()] if after else []), Unsteady(draws(kind)))), sequences(2)
    for method, target in ((ValueZeroing, None), (ValueZeroingEffect, (1, 0))):
        with pytest.raises(RefusedError, match="Block draws random numbers also in eval mode"):
            method(block, block).attribute(x, target=target)


def test_numbers_drawn_for_gradients_only() -> None:
    def scale() -> float:
        return 1.0 + 0 * (random.random() if torch.is_grad_enabled() else 0.0)

    block, x = Block(after=Unsteady(scale)), sequences(2)
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x))


def test_numbers_that_others_draw() -> None:
    """Random numbers that the model draws before its layer say nothing of the layer."""
    block, x = Block(after=Unsteady(lambda: 1.0)), sequences(2)
    found = ValueZeroing(lambda x: block(x + 0 * torch.rand(())), block).attribute(x)
    assert_same(found, zeroed_one_by_one(block, x))


def test_counter_is_not_taken_for_a_use() -> None:
    runs: list[int] = []

    def scale() -> float:
        runs.append(0)
        return 0.5 if len(runs) % 2 else 1.0

    block = Block(after=Unsteady(scale))
    with pytest.raises(UnsupportedLayerError, match="Block cannot be replayed"):
        ValueZeroing(block, block).attribute(sequences(1))


@pytest.mark.parametrize("period", [2, 3])
@pytest.mark.parametrize("late", [12, 20])
def test_counter_that_runs_change(late: int, period: int) -> None:
    """A number outside the layer that changes its output after some runs. Copies run one by one."""
    runs: list[int] = []

    def scale() -> float:
        runs.append(0)
        return 0.5 if len(runs) > late and len(runs) % period else 1.0

    block, x = Block(after=nn.Sequential(Convolution(), Unsteady(scale))), sequences(1, 24)
    with pytest.raises(UnsupportedLayerError, match="Block cannot be replayed"):
        ValueZeroing(block, block).attribute(x, perturbations_per_eval=1)


class SomePlaces(nn.Module):
    """Changes some positions beyond those of the clean pass."""

    def __init__(self, longest: int, every: int) -> None:
        super().__init__()
        self.longest, self.every = longest, every

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1])
        return torch.where(((index % self.every == 0) & (index >= self.longest))[:, None], x.flip(-1), x)


@pytest.mark.parametrize(("tokens", "longest", "every"), [(5, 5, 16), (6, 6, 16), (8, 8, 16), (40, 40, 640)])
def test_places_beyond_the_sequence(tokens: int, longest: int, every: int) -> None:
    """Rows that no check sees are changed: the pairs alone fall on these places."""
    block, x = Block(after=SomePlaces(longest, every)), sequences(1, tokens)
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x))


def test_attention_under_vmap_is_not_read() -> None:
    block, x = block_of(Computed(lambda x, *parts: torch.vmap(attend)(*parts))), sequences(2)
    with pytest.raises(UnsupportedLayerError, match="Block called no attention that can be read"):
        ValueZeroing(block, block).attribute(x)
