"""Distances between two representations of a token."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional.scores import widen

Distance: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    r"""One minus the cosine of the angle between two vectors, computed without cancellation.

    .. math:: 1 - \cos(a, b) = \tfrac12 \lVert \hat a - \hat b \rVert_2^2,
        \qquad \hat a = a / \lVert a \rVert_2

    This is the distance of Value Zeroing (`Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_).
    One zeroed value causes distances of 1e-3 to 1e-6. The left side subtracts two numbers near 1, and so loses three
    digits of such a distance in float32. The right side keeps them.

    Args:
        a: `(..., d)`.
        b: `(..., d)`, broadcast against `a`.

    Returns:
        `(...)` in at least float32, between 0 and 2. A zero vector has no direction, so its :math:`\hat a` is 0. Its
        distance is 0 to another zero vector, and 1/2 to any other vector.

    Raises:
        ArgumentError: The vectors differ in width.

    >>> east, north = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    >>> cosine_distance(torch.stack([east, north, -east]), east)
    tensor([0., 1., 2.])
    """
    a, b = _same_width(a, b)
    return half_squared_distance(unit_vectors(a), unit_vectors(b))


def half_squared_distance(a: Tensor, b: Tensor) -> Tensor:
    r"""Half the squared Euclidean distance between two vectors.

    .. math:: \tfrac12 \lVert a - b \rVert_2^2

    For unit vectors, this is one minus their cosine.

    Args:
        a: `(..., d)`.
        b: `(..., d)`, broadcast against `a`.

    Returns:
        `(...)` in at least float32, not negative.

    Raises:
        ArgumentError: The vectors differ in width.

    >>> half_squared_distance(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]))
    tensor(12.5000)
    """
    a, b = _same_width(a, b)
    return torch.linalg.vector_norm(a - b, dim=-1).square() / 2


def euclidean_distance(a: Tensor, b: Tensor) -> Tensor:
    r"""The Euclidean distance between two vectors.

    .. math:: \lVert a - b \rVert_2

    Args:
        a: `(..., d)`.
        b: `(..., d)`, broadcast against `a`.

    Returns:
        `(...)` in at least float32, not negative.

    Raises:
        ArgumentError: The vectors differ in width.

    >>> euclidean_distance(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]))
    tensor(5.)
    """
    a, b = _same_width(a, b)
    return torch.linalg.vector_norm(a - b, dim=-1)


def l1_distance(a: Tensor, b: Tensor) -> Tensor:
    r"""The sum of the absolute differences between the entries of two vectors.

    .. math:: \lVert a - b \rVert_1

    Args:
        a: `(..., d)`.
        b: `(..., d)`, broadcast against `a`.

    Returns:
        `(...)` in at least float32, not negative.

    Raises:
        ArgumentError: The vectors differ in width.

    >>> l1_distance(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]))
    tensor(7.)
    """
    a, b = _same_width(a, b)
    return (a - b).abs().sum(-1)


_DISTANCES: dict[str, Distance] = {
    "cosine": cosine_distance,
    "euclidean": euclidean_distance,
    "l1": l1_distance,
}


def get_distance(distance: str | Distance) -> Distance:
    """The distance with this name. A function is returned unchanged.

    Args:
        distance: "cosine", "euclidean", "l1", or a function `(..., d), (..., d) -> (...)` that broadcasts.

    Raises:
        ArgumentError: `distance` is neither a known name nor a function.

    >>> get_distance("l1") is l1_distance
    True
    """
    if callable(distance):
        return distance
    if not isinstance(distance, str) or distance not in _DISTANCES:
        raise ArgumentError(
            f"distance is {distance!r}: pass one of {', '.join(map(repr, _DISTANCES))}, "
            "or a function of two tensors, (..., d), (..., d) -> (...)."
        )
    return _DISTANCES[distance]


def _same_width(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    # Vectors of width 1 would broadcast, and the distance would be wrong.
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-1]:
        raise ArgumentError(
            f"A distance needs two tensors (..., d) of the same d, got {tuple(a.shape)} and {tuple(b.shape)}."
        )
    return widen(a), widen(b)


def is_safe_length(shortest: float, longest: float, dtype: torch.dtype) -> bool:
    """Whether the squares of vectors of these lengths neither overflow nor underflow."""
    number = torch.finfo(dtype)
    return shortest > number.tiny**0.25 and longest < number.max**0.25


def unit_vectors(vectors: Tensor) -> Tensor:
    r"""Each vector scaled to length 1.

    .. math:: \hat a = a / \lVert a \rVert_2

    Args:
        vectors: `(..., d)`. Very large and very small vectors are safe: no square overflows or underflows.

    Returns:
        `(..., d)` in at least float32. A zero vector stays zero.

    >>> unit_vectors(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    vectors = widen(vectors)
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    shortest, longest = (one.item() for one in length.aminmax()) if length.numel() else (1.0, 1.0)
    if is_safe_length(shortest, longest, vectors.dtype):
        return vectors / length
    number = torch.finfo(vectors.dtype)
    # Scale the largest entry to 1 first, so that no square overflows or underflows.
    vectors = vectors / vectors.abs().amax(-1, keepdim=True).clamp_min(number.tiny)
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(number.tiny)
