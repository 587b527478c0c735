"""Scores by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.attr._base.model_free import ModelFreeAttribution
from captum_vz.errors import ArgumentError

# The distance of source j from the position with the highest score, for output token i of n tokens.
_DISTANCES: Final[dict[str, Callable[[Tensor, Tensor, int], Tensor]]] = {
    "nearest": lambda i, j, n: (i - j).abs(),
    "first": lambda i, j, n: j,
    "last": lambda i, j, n: n - 1 - j,
    "uniform": lambda i, j, n: 0 * j,
}


class PositionAttribution(ModelFreeAttribution):
    r"""Scores for each output *token* that depend on the positions of the source tokens only.

    .. math:: C_{ij} = \frac{1}{1 + \delta_{ij}} \Big/ \textstyle\sum_k \frac{1}{1 + \delta_{ik}}, \qquad
        \delta_{ij} = \begin{cases} |i - j| & \text{nearest} \\ j & \text{first} \\ n - 1 - j & \text{last} \\
        0 & \text{uniform} \end{cases}

    where positions count from 0 among the n tokens that are not padding. Cues are often near the words that depend on
    the cues, and much attention goes to the ends of a sentence. A method should find more than these positions.

    Args:
        forward_func: Not called, and may be omitted. The argument exists because all other classes have it.
        layer: Not run. For a list of layers, `attribute` returns a list with one map for each layer, which
            :class:`~captum_vz.Rollout` can join.
        causal: Whether each token attends only to itself and earlier tokens, as in a causal model.
        highest: The tokens with the highest score: the "nearest" to the output token, the "first" or the "last".
            "uniform": all tokens have the same score.

    Raises:
        RefusedError: `highest` has another value.

    >>> from captum_vz import PositionAttribution
    >>> PositionAttribution(highest="first").attribute(torch.tensor([[101, 7592, 102]]), token=1)
    tensor([[0.5455, 0.2727, 0.1818]])
    """

    def __init__(
        self,
        forward_func: Callable[..., Any] | None = None,
        layer: Any = None,
        *,
        causal: bool = False,
        highest: str = "nearest",
    ) -> None:
        super().__init__(forward_func, layer, causal=causal)
        if highest not in _DISTANCES:
            raise ArgumentError(f"highest is {highest!r}: pass one of {', '.join(map(repr, _DISTANCES))}.")
        self.highest = highest

    def scores(self, tokens: Tensor, index: int) -> Tensor:
        """Scores by distance, `(out, in)`."""
        places = torch.arange(len(tokens), device="cpu")
        out, source = torch.meshgrid(places, places, indexing="ij")
        return 1 / (1 + _DISTANCES[self.highest](out, source, len(tokens))).float()
