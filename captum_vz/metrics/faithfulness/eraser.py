"""ERASER: what a prediction loses without the best tokens, and with nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics._rows import scores_and_tokens, without_order
from captum_vz.metrics.faithfulness.orders import Bounds, extremes
from captum_vz.metrics.prediction import Prediction

#: The shares of tokens that ERASER removes or keeps.
FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)


def comprehensiveness(prediction: Prediction, scores: Tensor, fractions: tuple[float, ...] = FRACTIONS) -> Tensor:
    r"""How much the probability of the model's prediction falls without the tokens with the highest scores.

    .. math:: p(\hat y \mid x) - p(\hat y \mid x \setminus r_q), \qquad |r_q| = \lceil q n \rceil

    where :math:`r_q` are the highest of the n content tokens and :math:`\hat y` is the most likely form in the
    whole sentence (`DeYoung et al. 2020 <https://aclanthology.org/2020.acl-main.408>`_, ERASER). Higher is better. The
    mean over the fractions, `comprehensiveness(...).mean(-1)`, is the area over the perturbation curve (AOPC).

    Args:
        prediction: Model, sentences and the way of removal.
        scores: `(batch, tokens)`, highest for the most important tokens. Take absolute values if both signs count.
            If scores are equal, the earlier token comes first.
        fractions: Shares q of the content tokens, between 0 and 1.

    Returns:
        `(batch, fractions)` in float64. NaN for an example without content tokens, or with scores that give no order:
        a NaN, or all equal. :func:`summarize` counts these examples.

    Raises:
        ArgumentError: Shapes do not fit, or fractions are not between 0 and 1.

    >>> from captum_vz.metrics import MaskedSentences, Prediction
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> text = "the pictures of some hat [MASK] scaring marcus."
    >>> sentences = MaskedSentences.of_text(tokenizer, text, "are", "is")
    >>> prediction = Prediction(model, sentences, "delete")
    >>> cue = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    >>> bool(comprehensiveness(prediction, cue).mean() > 0.2)
    True
    """
    return _drop(prediction, scores, fractions, left=False)


def sufficiency(prediction: Prediction, scores: Tensor, fractions: tuple[float, ...] = FRACTIONS) -> Tensor:
    r"""How much the probability of the model's prediction falls if only the tokens with the highest scores are kept.

    .. math:: p(\hat y \mid x) - p(\hat y \mid r_q), \qquad |r_q| = \lceil q n \rceil

    where :math:`r_q` are the highest of the n content tokens and :math:`\hat y` is the most likely form in the whole
    sentence (`DeYoung et al. 2020 <https://aclanthology.org/2020.acl-main.408>`_, ERASER). Lower is better. Special
    tokens and the target are kept. This is the counterpart of :func:`comprehensiveness`.

    Args:
        prediction: See :func:`comprehensiveness`, like the two arguments after it.
        scores: See there.
        fractions: See there.

    Returns:
        `(batch, fractions)` in float64, NaN as in :func:`comprehensiveness`.

    Raises:
        ArgumentError: Shapes do not fit, or fractions are not between 0 and 1.

    >>> from captum_vz.metrics import MaskedSentences, Prediction
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> text = "the pictures of some hat [MASK] scaring marcus."
    >>> sentences = MaskedSentences.of_text(tokenizer, text, "are", "is")
    >>> prediction = Prediction(model, sentences, tokenizer.mask_token_id)
    >>> cue = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    >>> bool(sufficiency(prediction, cue).mean() < 0.2)
    True
    """
    return _drop(prediction, scores, fractions, left=True)


def comprehensiveness_bounds(prediction: Prediction, fractions: tuple[float, ...] = FRACTIONS) -> Bounds:
    r"""The mean comprehensiveness over the fractions that the best and the worst order of the tokens give.

    .. math:: \max_\pi / \min_\pi \tfrac1{|Q|} \textstyle\sum_{q \in Q}
        \big[p(\hat y \mid x) - p(\hat y \mid x \setminus \pi_{1..\lceil qn \rceil})\big]

    Exact for up to :data:`EXHAUSTIVE` content tokens, by all their sets. In longer sentences, each step greedily
    removes the token that changes the prediction most, so a better order may exist.

    Args:
        prediction: Model, sentences and the way of removal.
        fractions: As in :func:`comprehensiveness`.

    Raises:
        ArgumentError: Fractions are not between 0 and 1.

    >>> from captum_vz.metrics import MaskedSentences, Prediction, normalized
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> text = "the pictures of some hat [MASK] scaring marcus."
    >>> sentences = MaskedSentences.of_text(tokenizer, text, "are", "is")
    >>> prediction = Prediction(model, sentences, tokenizer.unk_token_id)
    >>> cue = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    >>> bounds = comprehensiveness_bounds(prediction)
    >>> bool(normalized(comprehensiveness(prediction, cue).mean(-1), bounds) > 0.8), bounds.exact
    (True, tensor([True]))
    """
    return _bounds(prediction, fractions, left=False)


def sufficiency_bounds(prediction: Prediction, fractions: tuple[float, ...] = FRACTIONS) -> Bounds:
    r"""The mean sufficiency over the fractions that the best (lowest) and the worst order of the tokens give.

    As :func:`comprehensiveness_bounds`, with the first tokens kept and all others removed. The greedy search keeps the
    token that helps the prediction most.

    Args:
        prediction: Model, sentences and the way of removal.
        fractions: As in :func:`sufficiency`.

    Raises:
        ArgumentError: Fractions are not between 0 and 1.
    """
    return _bounds(prediction, fractions, left=True)


def _bounds(prediction: Prediction, fractions: tuple[float, ...], left: bool) -> Bounds:
    _check_fractions(fractions)

    def weights(count: int) -> Tensor:
        sizes = _sizes(torch.tensor([count]), fractions)[0]
        return torch.bincount(sizes, minlength=count + 1).double() / len(fractions)

    lowest, highest, exact = extremes(prediction, weights, kept=left)
    whole = prediction.probability(prediction.best())
    best, worst = (whole - highest, whole - lowest) if left else (whole - lowest, whole - highest)
    nothing = ~prediction.content.any(-1)
    return Bounds(best.masked_fill(nothing, torch.nan), worst.masked_fill(nothing, torch.nan), exact)


def _check_fractions(fractions: tuple[float, ...]) -> None:
    if not fractions or not all(0 < q <= 1 for q in fractions):
        raise ArgumentError(f"fractions is {fractions!r}: pass shares of the content tokens, above 0 and up to 1.")


def _sizes(count: Tensor, fractions: tuple[float, ...]) -> Tensor:
    """How many of `count` tokens each fraction is, `(batch, fractions)`."""
    # Rounded first, because 0.07 * 100 is a little more than 7, but must not become 8.
    return torch.stack([(count.double() * q).round(decimals=9).ceil().long() for q in fractions], dim=1)


def _drop(prediction: Prediction, scores: Tensor, fractions: tuple[float, ...], left: bool) -> Tensor:
    """How much the prediction's probability falls without the highest tokens, or, if `left`, with only them."""
    _check_fractions(fractions)
    after, unknown = without_highest(prediction, scores, _sizes(prediction.content.sum(-1), fractions), left)
    fall = prediction.probability(prediction.best())[:, None] - after
    return fall.masked_fill(unknown[:, None], torch.nan)


def without_highest(prediction: Prediction, scores: Tensor, sizes: Tensor, left: bool = False) -> tuple[Tensor, Tensor]:
    """The prediction's probability without the tokens of the highest scores.

    Args:
        prediction: Model, sentences and the way of removal.
        scores: `(batch, tokens)`. If scores are equal, the earlier token comes first.
        sizes: How many tokens, `(batch, steps)`.
        left: Whether they are kept, and the other content tokens removed.

    Returns:
        `(batch, steps)`, and for which examples the scores give no order, `(batch,)`.

    Raises:
        ArgumentError: Shapes do not fit, or scores are infinite.
    """
    content = prediction.content
    if not isinstance(scores, Tensor) or scores.shape != content.shape:
        raise ArgumentError(
            f"scores is {tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__}, but the ids "
            f"are {tuple(content.shape)}: pass one score for each token."
        )
    values, kept = scores_and_tokens(scores, content)
    if values.isinf().any():
        raise ArgumentError("scores holds infinities: pass finite scores.")
    order = values.masked_fill(~kept, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)  # of each token, from 0
    high = rank[:, None, :] < sizes[..., None]  # (batch, steps, tokens)
    removed = (~high if left else high) & content[:, None, :]
    examples = torch.arange(len(content)).repeat_interleave(sizes.shape[1])
    after = prediction.probability(prediction.best(), examples, removed.flatten(0, 1)).view(sizes.shape)
    return after, without_order(values, kept)
