"""Attention flow equals the smallest cut, a naive maximum flow and closed forms, and keeps its bounds."""

from itertools import chain, combinations, product

import pytest
import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional import Residual, add_residual, attention_flow, normalize_rows, rollout
from tests.reference.attention import naive_flow

every_residual = pytest.mark.parametrize("residual", [None, 0.5, "renormalize", "add"])


def random_maps(layers: int = 3, batch: int = 2, tokens: int = 4, sharpness: float = 2.0) -> Tensor:
    """Maps (layers, batch, tokens, tokens). Rows sum to 1, with most weight on few tokens, as in attention."""
    return torch.softmax(sharpness * torch.randn(layers, batch, tokens, tokens, dtype=torch.float64), dim=-1)


def smallest_cut(capacities: Tensor, out: int, source: int) -> float:
    """The smallest capacity from the part of `out` to the part of `source`, over all partitions of the nodes."""
    layers, tokens, _ = capacities.shape
    top, bottom = (layers, out), (0, source)
    others = [node for node in product(range(layers + 1), range(tokens)) if node not in (top, bottom)]
    parts = chain.from_iterable(combinations(others, size) for size in range(len(others) + 1))
    return min(
        sum(
            capacities[layer, i, j].item()
            for layer, i, j in product(range(layers), range(tokens), range(tokens))
            if (layer + 1, i) in inside and (layer, j) not in inside
        )
        for inside in ({top, *part} for part in parts)
    )


def test_flow_equals_smallest_cut() -> None:
    maps = random_maps(layers=2, batch=1, tokens=3)
    capacities = add_residual(maps[:, 0], 0.5)
    expected = [[smallest_cut(capacities, out, source) for source in range(3)] for out in range(3)]
    flow = attention_flow(maps, normalize=False)[0]
    torch.testing.assert_close(flow, torch.tensor(expected, dtype=torch.float64))


@every_residual
def test_flow_equals_naive_twin(residual: Residual) -> None:
    maps = random_maps()
    maps[:, 1] = normalize_rows(maps[:, 1].tril())
    maps[:, 1, 3:] = 0  # the second example is causal, and its last token is padding
    for layer, naive in enumerate(naive_flow(list(maps), residual)):
        torch.testing.assert_close(attention_flow(maps[: layer + 1], residual=residual), naive, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0])
def test_flow_bounds(sharpness: float) -> None:
    maps = random_maps(layers=5, tokens=6, sharpness=sharpness)
    flow = attention_flow(maps, normalize=False)
    into_source = add_residual(maps[0], 0.5).sum(-2, keepdim=True)
    assert (flow >= rollout(maps, 0.5)[-1] - 1e-12).all()
    assert (flow <= into_source.clamp(max=1) + 1e-12).all()


@pytest.mark.parametrize("rows", [[2], [-1], [3, 0], [1, 1], []])
def test_flow_of_some_rows(rows: list[int]) -> None:
    maps = random_maps()
    assert torch.equal(attention_flow(maps, rows), attention_flow(maps)[:, rows])


def test_flow_of_half_precision() -> None:
    maps = random_maps().bfloat16()
    flow = attention_flow(maps, normalize=False)
    assert flow.dtype == torch.float64
    assert torch.equal(flow, attention_flow(maps.double(), normalize=False))


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_flow_of_invalid_weights(weight: float) -> None:
    maps = random_maps()
    maps[1, 0, 2, 3] = weight
    with pytest.raises(ArgumentError, match="must be finite"):
        attention_flow(maps)


@pytest.mark.parametrize("row", [4, -5])
def test_flow_of_row_out_of_range(row: int) -> None:
    with pytest.raises(ArgumentError, match=f"is \\[{row}"):
        attention_flow(random_maps(), rows=[row])


def test_flow_of_no_or_unequal_maps() -> None:
    with pytest.raises(ArgumentError, match="one layer, got none"):
        attention_flow([])
    with pytest.raises(ArgumentError, match="one shape, got"):
        attention_flow([torch.ones(1, 3, 3), torch.ones(1, 2, 2)])
