"""The best and the worst order in which tokens can be removed or kept: the bounds of metrics that follow an order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Final, NamedTuple

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics._rows import describe
from captum_vz.metrics.prediction import Prediction

#: Up to how many content tokens all sets of tokens are tried. In longer sentences, the search is greedy.
EXHAUSTIVE: Final = 8

# A smaller distance between best and worst is rounding: the order does not matter.
_SAME: Final = 1e-6


class Bounds(NamedTuple):
    """What the best and the worst order of the tokens give, for each example.

    Attributes:
        best: `(batch,)` in float64.
        worst: `(batch,)` in float64.
        exact: Booleans `(batch,)`: whether all orders were considered. Otherwise, the search was greedy.
    """

    best: Tensor
    worst: Tensor
    exact: Tensor


def normalized(values: Tensor, bounds: Bounds) -> Tensor:
    r"""Values on the scale of their bounds: 0 for the worst order of the tokens, 1 for the best.

    .. math:: (v - v_{\text{worst}}) \big/ (v_{\text{best}} - v_{\text{worst}})

    Raw values of sentences are not comparable: in some sentences, no order changes the prediction. The value can leave
    the interval from 0 to 1 where the search of the bounds was greedy.

    Args:
        values: `(batch,)`, the mean over fractions of :func:`comprehensiveness` or :func:`sufficiency`, or
            :func:`deletion_area`.
        bounds: Of the same metric and sentences.

    Returns:
        `(batch,)` in float64; NaN where best and worst are the same.

    >>> bounds = Bounds(torch.tensor([0.5, 0.1]), torch.tensor([0.1, 0.1]), torch.tensor([True, True]))
    >>> normalized(torch.tensor([0.4, 0.1]), bounds)
    tensor([0.7500,    nan], dtype=torch.float64)
    """
    if not isinstance(values, Tensor) or values.shape != bounds.best.shape:
        raise ArgumentError(f"values is {describe(values)}: pass one value for each of {len(bounds.best)} examples.")
    best, worst = bounds.best.double(), bounds.worst.double()
    apart = best - worst
    return ((values.double().cpu() - worst) / apart).masked_fill(apart.abs() < _SAME, torch.nan)


def extremes(prediction: Prediction, weights: Callable[[int], Tensor], kept: bool) -> tuple[Tensor, Tensor, Tensor]:
    r"""The lowest and the highest weighted sum of the probabilities along an order, over all orders of the tokens.

    .. math:: \min_\pi / \max_\pi \textstyle\sum_k w_k\, p(\hat y \mid x \setminus \pi_{1..k})

    All orders together ask only for the :math:`2^n` sets of tokens. The optimal order is the shortest path from the
    empty set to the whole, so that it is found exactly. With more than :data:`EXHAUSTIVE` content tokens, the search is
    greedy: each step takes the token with the lowest (highest) probability.

    Args:
        prediction: Model, sentences and the way of removal.
        weights: For a number n of content tokens the weights of the sets of 0 to n tokens, `(n + 1,)`.
        kept: Whether the first tokens of an order are kept, and all others removed.

    Returns:
        Lowest and highest `(batch,)`, NaN for an example without content tokens; and whether they are exact.
    """
    answer, content = prediction.best(), prediction.content
    counts = content.sum(-1).tolist()
    lowest = torch.full((len(content),), torch.nan, dtype=torch.float64)
    highest = lowest.clone()
    for count in sorted({*counts} - {0}):
        examples = torch.tensor([b for b, n in enumerate(counts) if n == count])
        search = _every_order if count <= EXHAUSTIVE else _greedily
        values = partial_values(prediction, answer, examples, kept)
        lowest[examples] = search(values, len(examples), weights(count), 1)
        highest[examples] = -search(values, len(examples), weights(count), -1)
    return lowest, highest, torch.tensor([n <= EXHAUSTIVE for n in counts])


#: The probability for sets of an order's first tokens, booleans `(examples, sets, n)`, as `(examples, sets)`.
Values = Callable[[Tensor], Tensor]


def partial_values(prediction: Prediction, answer: Tensor, examples: Tensor, kept: bool) -> Values:
    """The probabilities of the answers with sets of content tokens removed or, if `kept`, with the others removed."""
    content = prediction.content[examples]

    def values(sets: Tensor) -> Tensor:
        removed = torch.zeros(*sets.shape[:2], content.shape[1], dtype=torch.bool)
        spread = content[:, None, :].expand_as(removed)
        removed[spread] = (~sets if kept else sets).flatten()
        found = prediction.probability(answer, examples.repeat_interleave(sets.shape[1]), removed.flatten(0, 1))
        return found.view(sets.shape[:2])

    return values


def _every_order(values: Values, examples: int, weights: Tensor, sign: int) -> Tensor:
    """The lowest sum over all orders, times `sign`, `(examples,)`."""
    count = len(weights) - 1
    total = torch.zeros(examples, 1, dtype=torch.float64)
    for size, (sets, without) in enumerate(_sets(count)):
        reached = total[:, without].amin(-1) if size else total
        if weights[size]:
            reached = reached + sign * weights[size] * values(sets.expand(examples, -1, -1))
        total = reached
    return total[:, 0]


@cache
def _sets(count: int) -> list[tuple[Tensor, Tensor]]:
    """For each size the sets, booleans `(sets, count)`, and the places of their subsets of one token less."""
    found: list[tuple[Tensor, Tensor]] = []
    before: dict[tuple[int, ...], int] = {(): 0}
    for size in range(count + 1):
        chosen = list(combinations(range(count), size))
        sets = torch.zeros(len(chosen), count, dtype=torch.bool)
        for place, one in enumerate(chosen):
            sets[place, list(one)] = True
        less = [[before[(*one[:at], *one[at + 1 :])] for at in range(size)] for one in chosen]
        found.append((sets, torch.tensor(less, dtype=torch.long)))
        before = {one: place for place, one in enumerate(chosen)}
    return found


def _greedily(values: Values, examples: int, weights: Tensor, sign: int) -> Tensor:
    """The sum along the order whose every step has the lowest probability, times `sign`, `(examples,)`."""
    count = len(weights) - 1
    chosen = torch.zeros(examples, 1, count, dtype=torch.bool)
    total = sign * weights[0] * values(chosen)[:, 0]
    for size in range(1, count + 1):
        tried = chosen | torch.eye(count, dtype=torch.bool)
        # A token that was chosen before makes no new set.
        found = (sign * values(tried)).masked_fill(chosen[:, 0], torch.inf)
        best = found.argmin(-1)
        total = total + weights[size] * found[torch.arange(examples), best]
        chosen = tried[torch.arange(examples), best][:, None]
    return total
