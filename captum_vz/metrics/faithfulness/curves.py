"""The deletion curve of an order of the tokens: its area, its bounds, and whether it only falls."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz.metrics.faithfulness.eraser import without_highest
from captum_vz.metrics.faithfulness.orders import Bounds, extremes
from captum_vz.metrics.prediction import Prediction

# A rise of the probability by less is rounding.
_ROUNDING = 1e-6


def deletion_curve(prediction: Prediction, scores: Tensor) -> Tensor:
    r"""The probability of the model's prediction without the k tokens of the highest scores, for each k.

    .. math:: c_k = p(\hat y \mid x \setminus r_k), \qquad k = 0, \dots, n

    where :math:`\hat y` is the most likely form in the whole sentence and n the number of content tokens (`Petsiuk et
    al. 2018 <https://arxiv.org/abs/1806.07421>`_, RISE).

    Args:
        prediction: Model, sentences and the way of removal.
        scores: `(batch, tokens)`, highest for the most important tokens. If scores are equal, the earlier token comes
            first.

    Returns:
        `(batch, 1 + most content tokens)` in float64. Shorter sentences repeat their last value. NaN for an example
        without content tokens, or with scores that give no order.

    Raises:
        ArgumentError: Shapes do not fit, or scores are infinite.
    """
    counts = prediction.content.sum(-1)
    steps = torch.arange(int(counts.max()) + 1)
    curve, unknown = without_highest(prediction, scores, torch.minimum(steps, counts[:, None]))
    return curve.masked_fill(unknown[:, None], torch.nan)


def deletion_area(prediction: Prediction, scores: Tensor) -> Tensor:
    r"""The area under the deletion curve. Lower is better; divide it by its bounds to compare sentences.

    .. math:: \tfrac1n \textstyle\sum_{k=1}^n \tfrac12 (c_{k-1} + c_k)

    See :func:`deletion_curve`, and :func:`normalized` with :func:`deletion_bounds`. It looks at the order of all
    tokens, so it favours methods whose low scores are in order too. A sparse row leaves most of the order to ties.

    Args:
        prediction: Model, sentences and the way of removal.
        scores: `(batch, tokens)`, highest for the most important tokens.

    Returns:
        `(batch,)` in float64, from 0 to 1; NaN where the curve is.

    Raises:
        ArgumentError: Shapes do not fit, or scores are infinite.

    >>> from captum_vz.metrics import MaskedSentences, Prediction
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> text = "the pictures of some hat [MASK] scaring marcus."
    >>> sentences = MaskedSentences.of_text(tokenizer, text, "are", "is")
    >>> prediction = Prediction(model, sentences, tokenizer.mask_token_id)
    >>> cue = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    >>> bounds = deletion_bounds(prediction)
    >>> bool(bounds.best <= deletion_area(prediction, cue) <= bounds.worst)
    True
    """
    curve, counts = deletion_curve(prediction, scores), prediction.content.sum(-1)
    steps = (curve[:, 1:] + curve[:, :-1]) / 2
    beyond = torch.arange(steps.shape[1]) >= counts[:, None]
    area = steps.masked_fill(beyond, 0).sum(-1) / counts.clamp_min(1)
    return area.masked_fill(curve[:, 0].isnan(), torch.nan)


def deletion_bounds(prediction: Prediction) -> Bounds:
    """The areas under the deletion curve of the best order of the tokens (the lowest) and of the worst.

    Exact for up to :data:`EXHAUSTIVE` content tokens; otherwise each step greedily removes the token that changes the
    prediction most.

    Args:
        prediction: Model, sentences and the way of removal.
    """

    def weights(count: int) -> Tensor:
        inner = torch.full((count + 1,), 1 / max(count, 1), dtype=torch.float64)
        inner[[0, -1]] /= 2
        return inner

    best, worst, exact = extremes(prediction, weights, kept=False)
    nothing = ~prediction.content.any(-1)
    return Bounds(best.masked_fill(nothing, torch.nan), worst.masked_fill(nothing, torch.nan), exact)


def monotonicity(prediction: Prediction, scores: Tensor) -> Tensor:
    r"""Whether the probability never falls while tokens are added in the order of rising scores.

    .. math:: \big[\,c_n \le c_{n-1} \le \dots \le c_0\,\big]

    with the deletion curve :math:`c_k` read backwards, from the sentence without its content tokens to the whole one
    (`Arya et al. 2019 <https://arxiv.org/abs/1909.03012>`_, AIX360). The answer is yes or no for the whole order: most
    sentences with more than a few tokens get 0, whatever the method. A fall of less than 1e-6 counts as rounding.

    Args:
        prediction: Model, sentences and the way of removal.
        scores: `(batch, tokens)`, highest for the most important tokens.

    Returns:
        `(batch,)` in float64: 1 or 0; NaN where the curve is.

    Raises:
        ArgumentError: Shapes do not fit, or scores are infinite.
    """
    curve = deletion_curve(prediction, scores)
    never = (curve.diff(dim=-1) <= _ROUNDING).all(-1).double()
    return never.masked_fill(curve[:, 0].isnan(), torch.nan)
