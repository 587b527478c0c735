"""The baselines that use no model: scores by position, and random scores."""

from __future__ import annotations

import hashlib
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
        forward_func, layer, causal: See :class:`~captum_vz.attr.ModelFreeAttribution`.
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


class RandomAttribution(ModelFreeAttribution):
    r"""Random scores for each output *token* and each source token, the baseline at chance level.

    .. math:: C_{ij} = U_{ij} \big/ \textstyle\sum_k U_{ik}, \qquad U_{ij} \sim \operatorname{Uniform}(0, 1)

    The random numbers depend on the seed, on the index of the layer and *on the sentence*. A sentence has the same
    scores in any batch, and different sentences have different scores. With the seed alone, sentences that are
    explained one by one would have the same scores, and their average would not be at chance level.

    Args:
        forward_func, layer, causal: See :class:`~captum_vz.attr.ModelFreeAttribution`.
        seed: The seed. Different seeds give different scores.

    >>> from captum_vz import RandomAttribution
    >>> ids = torch.tensor([[101, 7592, 2088, 102]])
    >>> row = RandomAttribution(seed=0).attribute(ids, token=1)  # (batch, in)
    >>> row.shape == ids.shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    def __init__(
        self, forward_func: Callable[..., Any] | None = None, layer: Any = None, *, causal: bool = False, seed: int = 0
    ) -> None:
        super().__init__(forward_func, layer, causal=causal)
        self.seed = seed

    def scores(self, tokens: Tensor, index: int) -> Tensor:
        """Random numbers, `(out, in)`."""
        content = f"{self.seed} {index} {tokens.tolist()}".encode()
        drawn = torch.Generator("cpu").manual_seed(int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1)
        # The numbers do not depend on torch's default dtype and device. They are in (0, 1], so no row is zero.
        return 1 - torch.rand(len(tokens), len(tokens), generator=drawn, dtype=torch.float32, device="cpu")
