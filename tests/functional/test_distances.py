"""The distances equal loops over Python floats, and the cosine distance keeps its digits."""

import math

import pytest
import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional import Distance, cosine_distance, euclidean_distance, l1_distance
from captum_vz.functional.scores import get_distance


def naive_cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return 1 - dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


def naive_euclidean(a: list[float], b: list[float]) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def naive_l1(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True))


DISTANCES = {"cosine": cosine_distance, "euclidean": euclidean_distance, "l1": l1_distance}
NAIVE = {"cosine": naive_cosine, "euclidean": naive_euclidean, "l1": naive_l1}
every_distance = pytest.mark.parametrize("distance", DISTANCES.values(), ids=DISTANCES.keys())


def close_pair(d: int = 768, step: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Two float64 vectors about `step ** 2 / 2` apart, as after zeroing one value in a large model."""
    a = torch.randn(d, dtype=torch.float64)
    return a, a + step * torch.randn(d, dtype=torch.float64)


@pytest.mark.parametrize("name", DISTANCES)
def test_distance_equals_naive_twin(name: str) -> None:
    a, b = torch.randn(2, 4, 3, 7, dtype=torch.float64)
    expected = [[NAIVE[name](a[i, j].tolist(), b[i, j].tolist()) for j in range(3)] for i in range(4)]
    torch.testing.assert_close(DISTANCES[name](a, b), torch.tensor(expected, dtype=torch.float64))


@every_distance
def test_distance_broadcasts_second_vector(distance: Distance) -> None:
    a, b = torch.randn(5, 3, 7), torch.randn(3, 7)
    torch.testing.assert_close(distance(a, b), torch.stack([distance(one, b) for one in a]))


@every_distance
def test_distance_of_half_precision(distance: Distance) -> None:
    a, b = torch.randn(2, 9, 16, dtype=torch.bfloat16)
    result = distance(a, b)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, distance(a.float(), b.float()), rtol=0, atol=0)


@every_distance
def test_distance_of_equal_vectors(distance: Distance) -> None:
    a = torch.randn(6, 16)
    assert torch.equal(distance(a, a.clone()), torch.zeros(6))


@pytest.mark.parametrize("step", [1e-2, 1e-4])
def test_cosine_keeps_digits(step: float) -> None:
    a, b = close_pair(step=step)
    # The same float32 vectors, computed in float64, so that only the arithmetic differs.
    exact = 1 - torch.cosine_similarity(a.float().double(), b.float().double(), dim=-1)
    safe = cosine_distance(a.float(), b.float()).double()
    lossy = (1 - torch.cosine_similarity(a.float(), b.float(), dim=-1)).double()
    assert (safe / exact - 1).abs() < 1e-4
    assert (lossy / exact - 1).abs() > 10 * (safe / exact - 1).abs()


@pytest.mark.parametrize("scale", [1e-40, 1e38])
def test_cosine_ignores_scale(scale: float) -> None:
    a, b = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, 0.5])
    expected = cosine_distance(a, b).expand(2)
    result = torch.stack([cosine_distance(a * scale, b), cosine_distance(a, b * scale)])
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=0)


def test_cosine_of_zero_nan_and_infinity() -> None:
    zero, other = torch.zeros(4), torch.randn(4)
    assert cosine_distance(zero, zero) == 0
    torch.testing.assert_close(cosine_distance(zero, other), torch.tensor(0.5))
    torch.testing.assert_close(cosine_distance(other, zero), torch.tensor(0.5))
    for bad in (math.nan, math.inf):
        assert cosine_distance(torch.tensor([bad, 1.0]), torch.ones(2)).isnan()


@pytest.mark.parametrize("shapes", [((4, 7), (4, 1)), ((7,), (8,)), ((), (3,))])
@every_distance
def test_distance_of_different_widths(distance: Distance, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ArgumentError, match=r"same d, got \("):
        distance(a, b)


def test_get_distance_by_name_or_function() -> None:
    def chebyshev(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).abs().amax(-1)

    assert {name: get_distance(name) for name in DISTANCES} == DISTANCES
    assert get_distance(chebyshev) is chebyshev


@pytest.mark.parametrize("wrong", ["Cosine", "l2", None, 3])
def test_get_distance_of_unknown_name(wrong: object) -> None:
    with pytest.raises(ArgumentError, match=f"is {wrong!r}"):
        get_distance(wrong)
