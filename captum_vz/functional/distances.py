"""Distances between two representations of a token."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from captum_vz.functional.rows import widen

Distance: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    r"""One minus the cosine of the angle between two vectors, computed without loss.

    .. math:: 1 - \cos(a, b) = \tfrac12 \lVert \hat a - \hat b \rVert_2^2,
        \qquad \hat a = a / \lVert a \rVert_2

    The distance of Value Zeroing (`Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_).
    The left side subtracts two numbers near 1 and so loses, in float32, three digits of the distances that one zeroed
    value causes (1e-3 to 1e-6); the right side keeps them.

    Args:
        a: `(..., d)`.
        b: `(..., d)`, broadcast against `a`.

    Returns:
        `(...)` in at least float32, between 0 and 2. A zero vector has no direction and is its own :math:`\hat a`: two
        of them are 0 apart, and one is 1/2 from every other vector.

    Raises:
        AssertionError: The vectors differ in width.

    >>> east, north = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    >>> cosine_distance(torch.stack([east, north, -east]), east)
    tensor([0., 1., 2.])
    """
    a, b = _same_width(a, b)
    return half_squared_distance(unit_vectors(a), unit_vectors(b))


def half_squared_distance(a: Tensor, b: Tensor) -> Tensor:
    r"""Half the squared length of the difference of two vectors: of unit vectors, one minus their cosine.

    .. math:: \tfrac12 \lVert a - b \rVert_2^2

    Args:
        a: `(..., d)`.
        b: `(..., d)`, broadcast against `a`.

    Returns:
        `(...)` in at least float32, not negative.

    Raises:
        AssertionError: The vectors differ in width.

    >>> half_squared_distance(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]))
    tensor(12.5000)
    """
    a, b = _same_width(a, b)
    return torch.linalg.vector_norm(a - b, dim=-1).square() / 2


def euclidean_distance(a: Tensor, b: Tensor) -> Tensor:
    r"""The length of the difference of two vectors.

    .. math:: \lVert a - b \rVert_2

    Args:
        a: `(..., d)`.
        b: `(..., d)`, broadcast against `a`.

    Returns:
        `(...)` in at least float32, not negative.

    Raises:
        AssertionError: The vectors differ in width.

    >>> euclidean_distance(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]))
    tensor(5.)
    """
    a, b = _same_width(a, b)
    return torch.linalg.vector_norm(a - b, dim=-1)


def l1_distance(a: Tensor, b: Tensor) -> Tensor:
    r"""The sum of the absolute differences of two vectors.

    .. math:: \lVert a - b \rVert_1

    Args:
        a: `(..., d)`.
        b: `(..., d)`, broadcast against `a`.

    Returns:
        `(...)` in at least float32, not negative.

    Raises:
        AssertionError: The vectors differ in width.

    >>> l1_distance(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]))
    tensor(7.)
    """
    a, b = _same_width(a, b)
    return (a - b).abs().sum(-1)


DISTANCES: dict[str, Distance] = {
    "cosine": cosine_distance,
    "euclidean": euclidean_distance,
    "l1": l1_distance,
}


def get_distance(distance: str | Distance) -> Distance:
    """The distance of that name; a function is taken as it is.

    Args:
        distance: "cosine", "euclidean", "l1", or a function `(..., d), (..., d) -> (...)` that broadcasts.

    Raises:
        AssertionError: Neither a known name nor a function.

    >>> get_distance("l1") is l1_distance
    True
    """
    if callable(distance):
        return distance
    assert isinstance(distance, str) and distance in DISTANCES, (
        f"distance is {distance!r}: pass one of {', '.join(map(repr, DISTANCES))}, "
        "or a function of two tensors, (..., d), (..., d) -> (...)."
    )
    return DISTANCES[distance]


def _same_width(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    assert a.ndim and b.ndim and a.shape[-1] == b.shape[-1], (  # a width of 1 would broadcast into a wrong number
        f"A distance needs two tensors (..., d) of the same d, got {tuple(a.shape)} and {tuple(b.shape)}."
    )
    return widen(a), widen(b)


def unit_vectors(vectors: Tensor) -> Tensor:
    r"""Each vector scaled to length 1.

    .. math:: \hat a = a / \lVert a \rVert_2

    Args:
        vectors: `(..., d)`, of any size: no square overflows or underflows on the way.

    Returns:
        `(..., d)` in at least float32; zero stays zero.

    >>> unit_vectors(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    vectors = widen(vectors)
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    number = torch.finfo(vectors.dtype)
    if bool(((length > number.tiny**0.25) & (length < number.max**0.25)).all()):
        return vectors / length
    # Scaled to a largest entry of 1 first.
    vectors = vectors / vectors.abs().amax(-1, keepdim=True).clamp_min(number.tiny)
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(number.tiny)
