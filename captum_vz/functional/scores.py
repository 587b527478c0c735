"""Scores: distances between two representations, rows of scores, and their form as attributions to embeddings."""

from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError

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
        b: `(..., d)` of the same d, broadcast against `a`.

    Returns:
        `(...)` in at least float32, between 0 and 2. A zero vector has no direction, so its :math:`\hat a` is 0. Its
        distance is 0 to another zero vector, and 1/2 to any other vector.

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
        b: `(..., d)` of the same d, broadcast against `a`.

    Returns:
        `(...)` in at least float32, not negative.

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
        b: `(..., d)` of the same d, broadcast against `a`.

    Returns:
        `(...)` in at least float32, not negative.

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
        b: `(..., d)` of the same d, broadcast against `a`.

    Returns:
        `(...)` in at least float32, not negative.

    >>> l1_distance(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]))
    tensor(7.)
    """
    a, b = _same_width(a, b)
    return (a - b).abs().sum(-1)


_DISTANCES: dict[str, Distance] = {"cosine": cosine_distance, "euclidean": euclidean_distance, "l1": l1_distance}


def get_distance(distance: str | Distance) -> Distance:
    """The distance with this name: "cosine", "euclidean" or "l1". A function is returned unchanged.

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


def widen(values: Tensor) -> Tensor:
    r"""Values in at least float32. Half precision and integers are converted, float32 and float64 are not.

    Half precision is too coarse for the sums and differences in a score. Near 1, the numbers of bfloat16 are
    :math:`2^{-7}` apart, and scores differ by a thousandth of that.

    Args:
        values: Any shape, any real type.

    Returns:
        The same shape, float32 or float64.

    >>> widen(torch.tensor([1.0], dtype=torch.bfloat16)).dtype
    torch.float32
    """
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.to(torch.promote_types(values.dtype, torch.float32))


def normalize_rows(scores: Tensor) -> Tensor:
    r"""Divides each row by its sum, so that it sums to 1.

    .. math:: \hat C_{ij} = C_{ij} \big/ \textstyle\sum_k C_{ik}

    This is the last step of Value Zeroing (`Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_).
    Scores should not be negative, because signed scores may cancel in the sum.

    Args:
        scores: `(..., in)`. A row is the last axis.

    Returns:
        `(..., in)` in at least float32. Rows sum to 1, except for rows of zeros, which stay zero (not NaN).

    >>> normalize_rows(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[0.2500, 0.7500],
            [0.0000, 0.0000]])
    """
    scores = widen(scores)
    total = scores.sum(-1, keepdim=True)
    return scores / (total + (total == 0))


Embeddings = TypeVar("Embeddings", Tensor, tuple[Tensor, ...])


def token_scores(attributions: Tensor, reduce: Literal["sum", "l1", "l2"] = "sum") -> Tensor:
    r"""Reduces attributions to embeddings, as Captum's gradient methods return them, to one score for each token.

    .. math:: s_{bj} = \textstyle\sum_k a_{bjk} \quad\text{or}\quad \sum_k |a_{bjk}| \quad\text{or}\quad
        \big(\textstyle\sum_k a_{bjk}^2\big)^{1/2}

    The sum keeps the sign and therefore completeness: the scores of `IntegratedGradients
    <https://proceedings.mlr.press/v70/sundararajan17a.html>`_ still add up to the difference of the outputs. The norms
    measure how much a token matters, in either direction. `Atanasova et al. 2020
    <https://aclanthology.org/2020.emnlp-main.263>`_ compare the mean with the L2 norm.

    Args:
        attributions: `(batch, tokens, d)`, one number for each entry of each token's embedding.
        reduce: "sum" (signed), "l1" or "l2" (not negative).

    Returns:
        `(batch, tokens)`, the shape of token ids, in at least float32. Rows are not normalised. Use
        :func:`normalize_rows` for scores without a sign.

    Raises:
        ArgumentError: `attributions` has another shape, or `reduce` is unknown.

    >>> attributions = torch.tensor([[[3.0, -4.0], [1.0, 1.0]]])  # one example, two tokens, d = 2
    >>> token_scores(attributions), token_scores(attributions, "l1"), token_scores(attributions, "l2")
    (tensor([[-1., 2.]]), tensor([[7., 2.]]), tensor([[5.0000, 1.4142]]))
    """
    if reduce not in ("sum", "l1", "l2"):
        raise ArgumentError(f"reduce is {reduce!r}: pass 'sum', 'l1' or 'l2'.")
    if not isinstance(attributions, Tensor):
        raise ArgumentError(
            f"attributions is of type {type(attributions).__name__}: pass a tensor (batch, tokens, d). "
            "For a tuple of inputs, Captum returns a tuple with one such tensor for each input."
        )
    if attributions.ndim != 3:
        raise ArgumentError(
            f"attributions is {_shape(attributions)}: pass (batch, tokens, d), one number for each entry of each "
            "token's embedding. Scores (batch, tokens) need no reduction."
        )
    values = widen(attributions)
    if reduce == "sum":
        return values.sum(-1)
    return torch.linalg.vector_norm(values, ord=int(reduce[1]), dim=-1)


def to_embeddings(row: Tensor, inputs: Embeddings) -> Embeddings:
    r"""Spreads one score for each token evenly over the entries of its embedding.

    .. math:: a_{bjk} = s_{bj} / d, \qquad \textstyle\sum_k a_{bjk} = s_{bj}

    Captum's `infidelity` and `sensitivity_max` expect attributions in the shape of the inputs. This function gives a
    row this shape, and :func:`token_scores` returns the row again. A row says nothing about single entries of a vector,
    so all entries of a token have the same score.

    Args:
        row: `(batch, tokens)`, one score for each token, of any method.
        inputs: The embeddings `(batch, tokens, d)` that the row explains. Or a tuple that holds only these, as Captum
            passes them to functions.

    Returns:
        The shape of `inputs`, and a tuple if `inputs` is one, in at least float32.

    Raises:
        ArgumentError: `inputs` are not embeddings, or have other tokens than the row.

    >>> row = torch.tensor([[0.75, 0.25]])  # one example, two tokens
    >>> to_embeddings(row, torch.zeros(1, 2, 3))
    tensor([[[0.2500, 0.2500, 0.2500],
             [0.0833, 0.0833, 0.0833]]])
    """
    if isinstance(inputs, tuple) and len(inputs) != 1:
        raise ArgumentError(f"inputs is a tuple of {len(inputs)}: pass a tuple of one tensor, the embeddings.")
    embeddings = inputs[0] if isinstance(inputs, tuple) else inputs
    if not isinstance(embeddings, Tensor) or embeddings.ndim != 3 or not embeddings.is_floating_point():
        dtype = f" of {embeddings.dtype}" if isinstance(embeddings, Tensor) else ""
        raise ArgumentError(
            f"inputs is {_shape(embeddings)}{dtype}: pass embeddings (batch, tokens, d), such as "
            "model.get_input_embeddings()(ids)."
        )
    if not isinstance(row, Tensor) or row.shape != embeddings.shape[:2]:
        raise ArgumentError(
            f"row is {_shape(row)}: pass {_shape(embeddings[..., 0])}, one score for each of the embeddings "
            f"{_shape(embeddings)}. For a map, pass token= or target= to attribute."
        )
    spread = (widen(row) / embeddings.shape[2])[..., None].expand_as(embeddings).contiguous()  # Captum views it
    return (spread,) if isinstance(inputs, tuple) else spread


def deciding_layer(rows: Tensor, relevance: Tensor, token: int = -1) -> tuple[int, Tensor]:
    r"""The layer in which a token reads the tokens that a decision rests on.

    .. math:: \operatorname*{argmax}_l \textstyle\sum_j V_{lj} R_j, \qquad \textstyle\sum_j R_j = 1

    :math:`V_l` is the row of the token in layer l, by :class:`~captum_vz.ValueZeroing` or another method of layers.
    :math:`R` says what the decision at the token rests on: the positive part of an effect
    (:class:`~captum_vz.ValueZeroingEffect`) or a relevance (:class:`~captum_vz.AttnLRP`). The first token has no part
    in it, because many layers read the first token without need. Neither has the token itself, which each layer keeps.

    Args:
        rows: The token's rows `(layers, tokens)`. Columns of padding before the text are 0.
        relevance: `(tokens)`, with signs, in any unit.
        token: The position of the token; negative from the end.

    Returns:
        The layer, and the products of all layers `(layers)`, between 0 and 1 if the rows sum to 1. The layers that come
        next are `products.argsort(descending=True)[1:]`.

    Raises:
        ArgumentError: Wrong shapes or a wrong position. Or no token has positive relevance, except the first one and
            the token itself, so no layer can be chosen.

    >>> rows = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.6, 0.2], [0.5, 0.1, 0.4]])
    >>> deciding_layer(rows, torch.tensor([3.0, 1.0, 2.0]))
    (1, tensor([0.1000, 0.6000, 0.1000]))
    """
    if rows.ndim != 2 or relevance.shape != rows.shape[1:]:
        raise ArgumentError(
            f"rows is {_shape(rows)} and relevance {_shape(relevance)}: pass (layers, tokens) and (tokens,)."
        )
    if not -len(relevance) <= token < len(relevance):
        raise ArgumentError(f"token is {token}, but there are {len(relevance)} tokens.", "token")
    rows, share = widen(rows), widen(relevance).clamp_min(0).clone()
    share[[int((rows != 0).any(0).int().argmax()), token]] = 0
    if not share.any():
        raise ArgumentError(
            "relevance is positive for no token but the first one and the explained one, so no layer can be chosen."
        )
    products = rows @ (share / share.sum()).to(rows)
    return int(products.argmax()), products


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def kendall_tau(one: Tensor, other: Tensor, keep: Tensor | None = None) -> Tensor:
    """Kendall's rank correlation of rows `(..., tokens)`. NaN if one row has no order.

    The tokens that count are those of the booleans `keep`. None: those for which both scores are finite.

    >>> kendall_tau(torch.tensor([0.1, 0.2, 0.7]), torch.tensor([1.0, 3.0, 2.0]))
    tensor(0.3333, dtype=torch.float64)
    """
    known = one.isfinite() & other.isfinite() if keep is None else keep
    pairs = known[..., :, None] & known[..., None, :]
    first, second = (
        ((row[..., :, None] > row[..., None, :]).double() - (row[..., :, None] < row[..., None, :]).double()) * pairs
        for row in (one, other)
    )
    product, squares = (first * second).sum((-2, -1)), (first**2).sum((-2, -1)) * (second**2).sum((-2, -1))
    return (product / squares.sqrt()).masked_fill(squares == 0, torch.nan)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    r"""How much of two rows `(..., tokens)` lies on the same tokens, as shares of the sizes of the entries.

    .. math:: 1 - \tfrac12 \textstyle\sum_j |s_j - t_j| = \textstyle\sum_j \min(s_j, t_j)

    1 if the shares are the same, 0 if the rows share no token. NaN counts as 0. NaN if a row is 0 everywhere.

    >>> overlap(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.8, float("nan")]))
    tensor(0.5000, dtype=torch.float64)
    """
    sizes = [row.double().nan_to_num(nan=0.0).abs() for row in (one, other)]
    first, second = (row / row.sum(-1, keepdim=True) for row in sizes)
    return (1 - (first - second).abs().sum(-1) / 2).round(decimals=12)
