"""The baselines that use no model: their base class, scores by position, and random scores."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from captum.attr import Attribution
from torch import Tensor, nn

from captum_vz._private import TargetType
from captum_vz.attr._base import MapRun
from captum_vz.attr._call import Described, as_layers, logged
from captum_vz.attr._call.arguments import Arguments, Inputs, token_input
from captum_vz.attr._call.target import FeatureGroups, WantedTokens
from captum_vz.errors import ArgumentError
from captum_vz.functional import normalize_rows

# The distance of source j from the position with the highest score, for output token i of n tokens.
_DISTANCES: Final[dict[str, Callable[[Tensor, Tensor, int], Tensor]]] = {
    "nearest": lambda i, j, n: (i - j).abs(),
    "first": lambda i, j, n: j,
    "last": lambda i, j, n: n - 1 - j,
    "uniform": lambda i, j, n: 0 * j,
}


class ModelFreeAttribution(Described, Attribution):
    """Base of the baselines that use the tokens only. A baseline returns maps `(batch, out, in)`, as other methods do.

    A subclass defines the map of one example in :meth:`scores`.

    Args:
        forward_func: Not called, and may be omitted. The argument exists because all other classes have it.
        layer: Not run. For a list of layers, `attribute` returns a list with one map for each layer, which
            :class:`~captum_vz.Rollout` can join. For one layer, or None, `attribute` returns one map.
        causal: Whether each token attends only to itself and earlier tokens, as in a causal model.

    >>> from captum_vz.attr import ModelFreeAttribution
    >>> class ById(ModelFreeAttribution):
    ...     def scores(self, tokens, index):
    ...         return tokens.float().expand(len(tokens), -1)
    >>> ById().attribute(torch.tensor([[1, 3]]))
    tensor([[[0.2500, 0.7500],
             [0.2500, 0.7500]]])
    """

    device_ids: list[int] | None = None

    def __init__(
        self, forward_func: Callable[..., Any] | None = None, layer: Any = None, *, causal: bool = False
    ) -> None:
        """See the class for the arguments."""
        super().__init__(forward_func)
        self.layer = layer
        self.causal = causal

    @logged
    def attribute(
        self,
        inputs: Inputs,
        target: TargetType = None,
        additional_forward_args: Any = None,
        feature_mask: Tensor | None = None,
        *,
        token: Any = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | list[Tensor]:
        """The score of each source token for each output *token*, without a model.

        Args:
            inputs: Token ids `(batch, tokens)` or embeddings `(batch, tokens, d)`. Or a tuple whose first entry is one
                of these. Or a mapping with `input_ids` or `inputs_embeds`, and the attention mask.
            target: `(token, entry)`, as for methods that run the model. The row of the token is returned. A single
                index is refused, because it may name a class.
            additional_forward_args: Ignored, because no `forward_func` is called.
            feature_mask: Integers `(1 or batch, tokens)`. Tokens with the same number form one feature. All tokens of a
                feature have the score of its first token, and rows sum to 1 over features.
            token: The output tokens whose rows are returned, as in :meth:`LayerMaps.attribute`.
            attention_mask: 1 for tokens and 0 for padding, `(batch, tokens)`. None: there is no padding.

        Returns:
            A map `(batch, out, in)`, or `(batch, in)` with one output token for each example, in float32. A list of
            maps if `layer` is a list. Rows sum to 1. Rows and columns of padding are 0.

        Raises:
            RefusedError: Inputs or a mask of another shape, or a target that is not a token.
        """
        wanted = WantedTokens.parse(token, target)
        wanted.check_without_output(self.get_name())
        several = isinstance(self.layer, (list, tuple, nn.ModuleList))
        count = len(as_layers(self.layer)) if several else 1
        maps = self._all_maps(count, inputs, attention_mask, feature_mask)
        results = [wanted.select(wanted.rows_of(one)) for one in maps]
        return results if several else results[0]

    @abstractmethod
    def scores(self, tokens: Tensor, index: int) -> Tensor:
        """Scores `(out, in)` of one example in layer `index`, without padding. Positive, not normalised."""

    def _wanted(self, token: Any, target: Any) -> WantedTokens:
        """The rows that `token` or `target` names."""
        return WantedTokens.parse(token, target)

    def _run(self, wanted: WantedTokens, arguments: Arguments, *flags: bool) -> MapRun:
        """The maps that :class:`Rollout` joins, in the form that a :class:`LayerMaps` gives."""
        maps = self._all_maps(len(as_layers(self.layer)), arguments.inputs, None, arguments.feature_mask)
        return MapRun([(index, wanted.rows_of(one)) for index, one in enumerate(maps)], {})

    def _all_maps(self, count: int, inputs: Inputs, attention_mask: Any, feature_mask: Any) -> list[Tensor]:
        """The maps `(batch, out, in)` of `count` layers."""
        if isinstance(inputs, Mapping):
            attention_mask = inputs.get("attention_mask", attention_mask)
        text = token_input(inputs)
        ids = isinstance(text, Tensor) and text.ndim == 2
        if not (isinstance(text, Tensor) and text.numel() and (ids or (text.ndim == 3 and text.is_floating_point()))):
            raise ArgumentError(
                f"inputs is {tuple(text.shape) if isinstance(text, Tensor) else type(text).__name__}: pass token ids "
                "(batch, tokens) or embeddings (batch, tokens, d), or a mapping with input_ids or inputs_embeds."
            )
        batch, tokens = text.shape[:2]
        mask = text.new_ones(batch, tokens) if attention_mask is None else attention_mask
        if not (isinstance(mask, Tensor) and mask.shape == (batch, tokens)):
            raise ArgumentError(
                f"attention_mask is {tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}: pass 1 "
                f"for tokens and 0 for padding, ({batch}, {tokens})."
            )
        groups = FeatureGroups(feature_mask)
        groups.check(batch, tokens)
        features = torch.arange(tokens, device="cpu")[None] if groups.mask is None else groups.mask
        rows, there = text.detach().cpu(), mask.detach().cpu().bool()
        features = features.detach().cpu().expand(batch, tokens)
        maps = torch.zeros(count, batch, tokens, tokens, dtype=torch.float32, device="cpu")
        for index in range(count):
            for example in range(batch):
                places = there[example].nonzero()[:, 0]
                scores = self.scores(rows[example, places], index)
                scores = _by_feature(scores.tril() if self.causal else scores, features[example, places])
                maps[index, example, places[:, None], places] = scores
        return list(maps.to(text.device))


def _by_feature(scores: Tensor, features: Tensor) -> Tensor:
    """Scores `(out, in)` of features, normalised over features. All tokens of a feature have its score."""
    names, member = features.unique(return_inverse=True)
    places = torch.arange(len(member), device="cpu")
    first = places.new_full((len(names),), len(member)).scatter_reduce(0, member, places, "amin")
    return normalize_rows(scores[:, first])[:, member]


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
