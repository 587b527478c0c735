r"""Faithfulness: what does the prediction lose without the tokens that an attribution finds?

Tokens are removed one at a time, or in the order of their scores. A number on its own says little: in some sentences no
order changes the prediction. `*_bounds` give the best and the worst order of the tokens, and :func:`normalized` the
share between them. :mod:`~captum_vz.metrics.sampled` removes at random.

>>> from captum_vz.metrics import MaskedSentences, Prediction
>>> from captum_vz.testbed import load_model
>>> model, tokenizer = load_model()
>>> text = "the pictures of some hat [MASK] scaring marcus."
>>> sentences = MaskedSentences.of_text(tokenizer, text, "are", "is")
>>> prediction = Prediction(model, sentences, tokenizer.unk_token_id)
>>> tokenizer.tokenize(text)[blank_out(prediction).argmax() - 1]
'pictures'
>>> cue = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
>>> bool(sufficiency(prediction, cue).mean() < 0.2 < comprehensiveness(prediction, cue).mean())
True
>>> bounds = comprehensiveness_bounds(prediction)
>>> bool(normalized(comprehensiveness(prediction, cue).mean(-1), bounds) > 0.8), bounds.exact
(True, tensor([True]))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics.agreement import describe, scores_of_ids, without_order
from captum_vz.metrics.prediction import Prediction

FRACTIONS: Final = (0.01, 0.05, 0.1, 0.2, 0.5)  #: the shares of tokens that ERASER removes or keeps
#: Up to how many content tokens all sets of tokens are tried. In longer sentences, the search is greedy.
EXHAUSTIVE: Final = 8

# A smaller rise of the probability, and a smaller distance between best and worst, is rounding.
_ROUNDING: Final = 1e-6
#: The probability for sets of an order's first tokens, booleans `(examples, sets, n)`, as `(examples, sets)`.
_Values = Callable[[Tensor], Tensor]


class Bounds(NamedTuple):
    """What the best and the worst order of the tokens give, for each example."""

    best: Tensor  #: `(batch,)` in float64
    worst: Tensor  #: `(batch,)` in float64
    exact: Tensor  #: booleans `(batch,)`: whether all orders were considered; otherwise, the search was greedy


def blank_out(prediction: Prediction, answer: Tensor | None = None) -> Tensor:
    r"""How much the right form's lead falls when one token is removed, for each content token.

    .. math:: b_j = \ell(y, x) - \ell(y, x \setminus x_j)

    The lead of one of two forms is the difference of their log-probabilities. Without forms it is the log-probability
    of y. The papers have probabilities, which hide what a sure model loses. The order of the tokens is the same (`Abnar
    & Zuidema 2020 <https://aclanthology.org/2020.acl-main.385>`_, `Mohebbi et al. 2023
    <https://aclanthology.org/2023.eacl-main.245>`_). A method is faithful if its scores rank the tokens in the same
    order: `summarize(spearman(scores, blank_out(prediction), prediction.content))`. For methods whose scores have no
    sign, take `blank_out(prediction).abs()`.

    Args:
        prediction: Model, sentences and the way of removal. The right form y is the first one. Without forms, y is the
            model's prediction.
        answer: The ids of other answers y, `(batch,)`.

    Returns:
        `(batch, tokens)` in float64, the shape of the ids; 0 for tokens that are not content. The model runs once for
        each token, in batches.
    """
    if answer is None:
        answer = prediction.best() if prediction.forms is None else prediction.forms[:, 0]
    examples, tokens = prediction.content.nonzero().unbind(1)
    removed = torch.arange(prediction.ids.shape[1]) == tokens[:, None]
    whole = prediction.lead(answer)
    effects = torch.zeros(prediction.content.shape, dtype=torch.float64)
    effects[examples, tokens] = whole[examples] - prediction.lead(answer, examples, removed)
    return effects


def comprehensiveness(prediction: Prediction, scores: Tensor) -> Tensor:
    r"""How much the probability of the model's prediction falls without the tokens with the highest scores.

    .. math:: p(\hat y \mid x) - p(\hat y \mid x \setminus r_q), \qquad |r_q| = \lceil q n \rceil

    for each q of :data:`FRACTIONS`, where :math:`r_q` are the highest of the n content tokens and :math:`\hat y` is the
    most likely form in the whole sentence (`DeYoung et al. 2020 <https://aclanthology.org/2020.acl-main.408>`_,
    ERASER). Higher is better. The mean over the fractions, `comprehensiveness(...).mean(-1)`, is the area over the
    perturbation curve (AOPC).

    Args:
        prediction: Model, sentences and the way of removal.
        scores: `(batch, tokens)`, highest for the most important tokens. Take absolute values if both signs count.
            If scores are equal, the earlier token comes first.

    Returns:
        `(batch, fractions)` in float64. NaN for an example without content tokens, or with scores that give no order:
        a NaN, or all equal.
    """
    return _drop(prediction, scores, left=False)


def sufficiency(prediction: Prediction, scores: Tensor) -> Tensor:
    r"""How much the probability of the model's prediction falls if only the tokens with the highest scores are kept.

    .. math:: p(\hat y \mid x) - p(\hat y \mid r_q), \qquad |r_q| = \lceil q n \rceil

    Lower is better. Special tokens and the target are kept. This is the counterpart of :func:`comprehensiveness`.

    Args:
        prediction: See :func:`comprehensiveness`.
        scores: See there.

    Returns:
        `(batch, fractions)` in float64, NaN as in :func:`comprehensiveness`.
    """
    return _drop(prediction, scores, left=True)


def comprehensiveness_bounds(prediction: Prediction) -> Bounds:
    r"""The mean comprehensiveness over the fractions that the best and the worst order of the tokens give.

    .. math:: \max_\pi / \min_\pi \tfrac1{|Q|} \textstyle\sum_{q \in Q}
        \big[p(\hat y \mid x) - p(\hat y \mid x \setminus \pi_{1..\lceil qn \rceil})\big]

    Exact for up to :data:`EXHAUSTIVE` content tokens. In longer sentences, each step greedily removes the token that
    changes the prediction most, so a better order may exist.

    Args:
        prediction: See :func:`comprehensiveness`.
    """
    return _bounds(prediction, left=False)


def sufficiency_bounds(prediction: Prediction) -> Bounds:
    """The mean sufficiency over the fractions that the best (lowest) and the worst order of the tokens give.

    As :func:`comprehensiveness_bounds`, with the first tokens kept and all others removed.

    Args:
        prediction: See :func:`comprehensiveness`.
    """
    return _bounds(prediction, left=True)


def _bounds(prediction: Prediction, left: bool) -> Bounds:
    def weights(count: int) -> Tensor:
        sizes = _sizes(torch.tensor([count]))[0]
        return torch.bincount(sizes, minlength=count + 1).double() / len(FRACTIONS)

    lowest, highest, exact = _extremes(prediction, weights, kept=left)
    whole = prediction.probability(prediction.best())
    best, worst = (whole - highest, whole - lowest) if left else (whole - lowest, whole - highest)
    return Bounds(best, worst, exact)


def _sizes(count: Tensor) -> Tensor:
    """How many of `count` tokens each fraction is, `(batch, fractions)`."""
    # Rounded first, because 0.07 * 100 is a little more than 7, but must not become 8.
    return torch.stack([(count.double() * q).round(decimals=9).ceil().long() for q in FRACTIONS], dim=1)


def _drop(prediction: Prediction, scores: Tensor, left: bool) -> Tensor:
    """How much the prediction's probability falls without the highest tokens, or, if `left`, with only them."""
    after = _without_highest(prediction, scores, _sizes(prediction.content.sum(-1)), left)
    return prediction.probability(prediction.best())[:, None] - after


def deletion_curve(prediction: Prediction, scores: Tensor) -> Tensor:
    r"""The probability of the model's prediction without the k tokens of the highest scores, for each k.

    .. math:: c_k = p(\hat y \mid x \setminus r_k), \qquad k = 0, \dots, n

    where :math:`\hat y` is the most likely form in the whole sentence and n the number of content tokens (`Petsiuk et
    al. 2018 <https://arxiv.org/abs/1806.07421>`_, RISE).

    Args:
        prediction: See :func:`comprehensiveness`.
        scores: See there.

    Returns:
        `(batch, 1 + most content tokens)` in float64. Shorter sentences repeat their last value. NaN for an example
        without content tokens, or with scores that give no order.
    """
    counts = prediction.content.sum(-1)
    steps = torch.arange(int(counts.max()) + 1)
    return _without_highest(prediction, scores, torch.minimum(steps, counts[:, None]))


def deletion_area(prediction: Prediction, scores: Tensor) -> Tensor:
    r"""The area under the deletion curve. Lower is better; divide it by its bounds to compare sentences.

    .. math:: \tfrac1n \textstyle\sum_{k=1}^n \tfrac12 (c_{k-1} + c_k)

    See :func:`deletion_curve`, and :func:`normalized` with :func:`deletion_bounds`. It looks at the order of all
    tokens, so it favours methods whose low scores are in order too. A sparse row leaves most of the order to ties.

    Args:
        prediction: See :func:`comprehensiveness`.
        scores: See there.

    Returns:
        `(batch,)` in float64, from 0 to 1; NaN where the curve is.
    """
    curve, counts = deletion_curve(prediction, scores), prediction.content.sum(-1)
    steps = (curve[:, 1:] + curve[:, :-1]) / 2
    beyond = torch.arange(steps.shape[1]) >= counts[:, None]
    area = steps.masked_fill(beyond, 0).sum(-1) / counts.clamp_min(1)
    return area.masked_fill(curve[:, 0].isnan(), torch.nan)


def deletion_bounds(prediction: Prediction) -> Bounds:
    """The areas under the deletion curve of the best order of the tokens (the lowest) and of the worst.

    Args:
        prediction: See :func:`comprehensiveness_bounds`, also for when they are exact.
    """

    def weights(count: int) -> Tensor:
        inner = torch.full((count + 1,), 1 / max(count, 1), dtype=torch.float64)
        inner[[0, -1]] /= 2
        return inner

    return Bounds(*_extremes(prediction, weights, kept=False))


def monotonicity(prediction: Prediction, scores: Tensor) -> Tensor:
    r"""Whether the probability never falls while tokens are added in the order of rising scores.

    .. math:: \big[\,c_n \le c_{n-1} \le \dots \le c_0\,\big]

    with the deletion curve :math:`c_k` read backwards, from the sentence without its content tokens to the whole one
    (`Arya et al. 2019 <https://arxiv.org/abs/1909.03012>`_, AIX360). The answer is yes or no for the whole order: most
    sentences with more than a few tokens get 0, whatever the method. A fall of less than 1e-6 counts as rounding.

    Args:
        prediction: See :func:`comprehensiveness`.
        scores: See there.

    Returns:
        `(batch,)` in float64: 1 or 0; NaN where the curve is.
    """
    curve = deletion_curve(prediction, scores)
    never = (curve.diff(dim=-1) <= _ROUNDING).all(-1).double()
    return never.masked_fill(curve[:, 0].isnan(), torch.nan)


def _without_highest(prediction: Prediction, scores: Tensor, sizes: Tensor, left: bool = False) -> Tensor:
    """The probability without (or, if `left`, with only) as many tokens of the highest scores as `sizes` says.

    `(batch, steps)`; NaN where the scores give no order.
    """
    content = prediction.content
    values, kept = scores_of_ids(scores, content)
    if values.isinf().any():
        raise ArgumentError("scores holds infinities: pass finite scores.")
    order = values.masked_fill(~kept, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)  # of each token, from 0
    high = rank[:, None, :] < sizes[..., None]  # (batch, steps, tokens)
    removed = (~high if left else high) & content[:, None, :]
    examples = torch.arange(len(content)).repeat_interleave(sizes.shape[1])
    after = prediction.probability(prediction.best(), examples, removed.flatten(0, 1)).view(sizes.shape)
    return after.masked_fill(without_order(values, kept)[:, None], torch.nan)


def normalized(values: Tensor, bounds: Bounds) -> Tensor:
    r"""Values on the scale of their bounds: 0 for the worst order of the tokens, 1 for the best.

    .. math:: (v - v_{\text{worst}}) \big/ (v_{\text{best}} - v_{\text{worst}})

    The value can leave the interval from 0 to 1 where the search of the bounds was greedy.

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
    return ((values.double().cpu() - worst) / apart).masked_fill(apart.abs() < _ROUNDING, torch.nan)


def _extremes(prediction: Prediction, weights: Callable[[int], Tensor], kept: bool) -> tuple[Tensor, Tensor, Tensor]:
    r"""The lowest and the highest weighted sum of the probabilities along an order, over all orders of the tokens.

    .. math:: \min_\pi / \max_\pi \textstyle\sum_k w_k\, p(\hat y \mid x \setminus \pi_{1..k})

    All orders together ask only for the :math:`2^n` sets of tokens, so the optimal order is the shortest path from the
    empty set to the whole. `weights` gives those of the sets of 0 to n tokens. If `kept`, the first tokens of an order
    are kept, and all others removed. Lowest, highest, and whether they are exact, `(batch,)`; NaN without content.
    """
    answer, content = prediction.best(), prediction.content
    counts = content.sum(-1).tolist()
    lowest = torch.full((len(content),), torch.nan, dtype=torch.float64)
    highest = lowest.clone()
    for count in sorted({*counts} - {0}):
        examples = torch.tensor([b for b, n in enumerate(counts) if n == count])
        search = _every_order if count <= EXHAUSTIVE else _greedily
        values = partial(_of_sets, prediction, answer, examples, kept)
        lowest[examples] = search(values, len(examples), weights(count), 1)
        highest[examples] = -search(values, len(examples), weights(count), -1)
    return lowest, highest, torch.tensor([n <= EXHAUSTIVE for n in counts])


def _of_sets(prediction: Prediction, answer: Tensor, examples: Tensor, kept: bool, sets: Tensor) -> Tensor:
    """The probabilities of the answers with sets of content tokens removed or, if `kept`, with the others removed."""
    content = prediction.content[examples, None].expand(-1, sets.shape[1], -1)
    removed = torch.zeros_like(content)
    removed[content] = (~sets if kept else sets).flatten()
    found = prediction.probability(answer, examples.repeat_interleave(sets.shape[1]), removed.flatten(0, 1))
    return found.view(sets.shape[:2])


def _every_order(values: _Values, examples: int, weights: Tensor, sign: int) -> Tensor:
    """The lowest sum over all orders, times `sign`, `(examples,)`."""
    count = len(weights) - 1
    tokens, numbers = torch.arange(count), torch.arange(2**count)  # the bits of its number say what a set holds
    sets = (numbers[:, None] >> tokens) % 2 == 1
    total = torch.full((examples, len(sets)), torch.inf, dtype=torch.float64)  # of the orders that begin with a set
    total[:, 0] = 0
    for size in range(count + 1):
        now = numbers[sets.sum(1) == size]
        if size:  # a set with one token more, which is not known yet, is never the lowest
            total[:, now] = total[:, now[:, None] ^ 2**tokens].amin(-1)
        if weights[size]:
            total[:, now] += sign * weights[size] * values(sets[now].expand(examples, -1, -1))
    return total[:, -1]


def _greedily(values: _Values, examples: int, weights: Tensor, sign: int) -> Tensor:
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
