"""Scores by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.attr._model_free import ModelFreeAttribution
from captum_vz.errors import ArgumentError

# How far source j is from where it would score highest, for output token i of n.
_DISTANCES: Final[dict[str, Callable[[Tensor, Tensor, int], Tensor]]] = {
    "nearest": lambda i, j, n: (i - j).abs(),
    "first": lambda i, j, n: j,
    "last": lambda i, j, n: n - 1 - j,
    "uniform": lambda i, j, n: 0 * j,
}


class PositionAttribution(ModelFreeAttribution):
    r"""Scores that know nothing of a sentence but the positions of its tokens, for each output *token*.

    .. math:: C_{ij} = \frac{1}{1 + \delta_{ij}} \Big/ \textstyle\sum_k \frac{1}{1 + \delta_{ik}}, \qquad
        \delta_{ij} = \begin{cases} |i - j| & \text{nearest} \\ j & \text{first} \\ n - 1 - j & \text{last} \\
        0 & \text{uniform} \end{cases}

    with positions counted from 0 among the n tokens that are no padding. Cues often stand near what depends on them,
    and much attention goes to the ends of a sentence: a method should find more than that.

    Args:
        forward_func: Not called; it may be left out. It is there so that all classes are built alike.
        layer: Not run. A list of layers gives a list of as many maps, so that :class:`~captum_vz.Rollout` can join
            them.
        causal: Whether tokens see only themselves and those before them, as in a causal model.
        highest: Which tokens score highest: the "nearest" to the output token, the "first", the "last", or all alike
            ("uniform").

    Raises:
        RefusedError: Another `highest`.

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
