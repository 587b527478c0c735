"""Layers with several vectors a token, in streams. The output of a token is all of its vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from captum_vz import LayerALTI, LayerAttentionNorm, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout
from tests.engine.blocks import WIDTH, Block, Convolution, SelfAttention, as_added, direction, zeroed_one_by_one
from tests.engine.compare import assert_same
from tests.engine.odd_changes import Does

STREAMS = 3


class Streams(nn.Module):
    """Mixes a token's streams to one vector, applies a block to it, and adds the block's change to each stream.

    The streams are along `axis`: (batch, tokens, stream, d), or (stream, batch, tokens, d).
    """

    def __init__(self, axis: int, after: nn.Module | None = None) -> None:
        super().__init__()
        self.axis = axis
        self.block = Block(after)
        self.read, self.write = (nn.Parameter(torch.randn(STREAMS, 1, dtype=torch.float64)) for _ in range(2))

    def forward(self, states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        streams = states.movedim(self.axis, 2)
        one = (self.read * streams).sum(2)
        changed = streams + self.write * (self.block(one, mask) - one)[:, :, None]
        return changed.movedim(2, self.axis), None


def states(axis: int, batch: int = 2, tokens: int = 5) -> Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.randn(batch, tokens, STREAMS, WIDTH, dtype=torch.float64, generator=random).movedim(2, axis)


@torch.no_grad()
def twin(layer: Streams, x: Tensor, groups: list[list[int]], mask: Tensor | None = None) -> Tensor:
    """The distance of each token's streams from clean when the values of a group of sources are zeroed."""

    def run(sources: list[int]) -> Tensor:
        def zero(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output.index_fill(1, torch.tensor(sources, dtype=torch.long), 0.0)

        with layer.block.attention.value.register_forward_hook(zero):
            output = layer(x, mask)[0]
        return direction(output.movedim(layer.axis, 2).flatten(2))

    clean = run([])
    return torch.stack([(run(group) - clean).square().sum(-1) / 2 for group in groups], dim=-1)


each_axis = pytest.mark.parametrize("axis", [2, 0])
each_kind = pytest.mark.parametrize("kind", ["alone", "convolution"])


def layer_of(kind: str, axis: int) -> Streams:
    torch.manual_seed(0)
    return Streams(axis, Convolution().double() if kind == "convolution" else None).eval()


@each_axis
@each_kind
def test_map_of_all_streams(kind: str, axis: int) -> None:
    layer, x = layer_of(kind, axis), states(axis)
    explain = ValueZeroing(layer, layer, normalize=False)
    expected = twin(layer, x, [[source] for source in range(5)])
    assert_same(explain.attribute(x), expected)
    assert_same(explain.attribute(x, token=3), expected[:, 3])
    assert_same(
        explain.attribute(x, token=[1, 4], perturbations_per_eval=2), torch.stack([expected[0, 1], expected[1, 4]])
    )
    words = torch.tensor([[0, 0, 1, 2, 2]])
    assert_same(explain.attribute(x, feature_mask=words), twin(layer, x, [[0, 1], [2], [3, 4]])[..., words[0]])


@each_axis
def test_padding_in_streams(axis: int) -> None:
    layer, x = layer_of("alone", axis), states(axis)
    hidden = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    mask = as_added(~hidden[:, None, None].expand(2, 1, 5, 5))
    layer_map = ValueZeroing(layer, layer, normalize=False).attribute((x, mask))
    assert_same(layer_map, twin(layer, x, [[source] for source in range(5)], mask) * ~hidden[:, :, None])


@each_axis
def test_half_precision_in_streams(axis: int) -> None:
    layer, x = layer_of("alone", axis).bfloat16(), states(axis).bfloat16()
    found = ValueZeroing(layer, layer).attribute(x)
    assert found.dtype == torch.float32
    assert_same(found, ValueZeroing(layer.float(), layer).attribute(x.float()), tolerance=1e-5)


class Grid(nn.Module):
    """A layer on `(batch, features, height, width)`. Here it has as many features as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])


def test_grid_is_not_taken_for_streams() -> None:
    grid, x = Grid().double().eval(), torch.randn(2, WIDTH, 4, 4, dtype=torch.float64)
    expected = zeroed_one_by_one(
        Does(lambda x: grid(x).flatten(2).mT, grid), x, value="inner.attention.value", sources=16
    )
    assert_same(ValueZeroing(grid, grid).attribute(x), expected)


class Blurred(Grid):
    """A grid whose values come from several positions each. Its shape could be that of streams."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.before(x).flatten(2).mT).mT.unflatten(2, x.shape[2:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blurred_grid_is_refused(dtype: torch.dtype) -> None:
    grid = Blurred().eval().to(dtype)
    with pytest.raises(AssertionError, match="Blurred cannot"):
        ValueZeroing(grid, grid).attribute(torch.randn(2, WIDTH, 4, 4, dtype=dtype))


@each_axis
def test_rollout_over_streams(axis: int) -> None:
    layers, x = [layer_of(kind, axis) for kind in ("alone", "alone", "convolution")], states(axis)

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x, _ = layer(x)
        return x

    maps = ValueZeroing(forward, layers[:2]).attribute(x)
    assert_same(ValueZeroingRollout(forward, layers[:2]).attribute(x), maps[1] @ maps[0])
    with pytest.raises(AssertionError, match="mix their tokens"):
        ValueZeroingRollout(forward, layers).attribute(x)


@pytest.mark.parametrize("method", [LayerAttentionNorm, LayerALTI, ValueZeroingEffect])
@each_axis
def test_methods_that_refuse_streams(method: type[ValueZeroing], axis: int) -> None:
    layer, x = layer_of("alone", axis), states(axis)
    with pytest.raises(AssertionError, match="carries several"):
        method(lambda x: layer(x)[0].flatten(1), layer).attribute(x)
    assert not layer._forward_hooks


def test_norms_and_axes_of_streams_are_refused() -> None:
    layer = layer_of("alone", 2)
    with pytest.raises(AssertionError, match="carries several"):
        ValueZeroing(layer, layer, final_norm=nn.LayerNorm(WIDTH)).attribute(states(2))
    with pytest.raises(AssertionError, match="be distinguished"):
        ValueZeroing(layer, layer).attribute(states(2, STREAMS, STREAMS))
