"""Random scores."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from captum_vz.attr._model_free import ModelFreeAttribution


class RandomAttribution(ModelFreeAttribution):
    r"""Random scores, for each output *token* and each source token: the level of a method that knows nothing.

    .. math:: C_{ij} = U_{ij} \big/ \textstyle\sum_k U_{ik}, \qquad U_{ij} \sim \operatorname{Uniform}(0, 1)

    The numbers are drawn from the seed, the number of the layer *and the sentence*: the same sentence gets the same
    scores in whatever batch, and other sentences get others. (From the seed alone, sentences that are explained one by
    one would all get the same scores, and the average over them would not be that of chance.)

    Args:
        forward_func: Not called; it may be left out. It is there so that all classes are built alike.
        layer: Not run. A list of layers gives a list of as many maps, so that :class:`~captum_vz.Rollout` can join
            them.
        causal: Whether tokens see only themselves and those before them, as in a causal model.
        seed: The seed. Another seed gives other scores.

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
        # The same lot whatever torch's default type and device are, and of (0, 1]: no row is all zero.
        return 1 - torch.rand(len(tokens), len(tokens), generator=drawn, dtype=torch.float32, device="cpu")
