"""Faithfulness: does an attribution find the tokens that the prediction needs?"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics._rows import scores_and_tokens, undefined
from captum_vz.metrics.prediction import Prediction

#: The shares of tokens that ERASER removes or keeps.
FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)


def blank_out(prediction: Prediction) -> Tensor:
    r"""How much the probability of the right form falls when one token is removed, for each content token.

    .. math:: b_j = p(y \mid x) - p(y \mid x \setminus x_j)

    The blank-out scores of `Abnar & Zuidema 2020 <https://aclanthology.org/2020.acl-main.385>`_ and `Mohebbi et al.
    2023 <https://aclanthology.org/2023.eacl-main.245>`_. A method is faithful if its scores rank the tokens in the
    same order: `summarize(spearman(scores, blank_out(prediction), prediction.content))`. For methods whose scores have
    no sign, take `blank_out(prediction).abs()`.

    Args:
        prediction: Model, sentences and the way of removal. The right form y is the first one. Without forms, y is the
            model's prediction.

    Returns:
        `(batch, tokens)` in float64, the shape of the ids; 0 for tokens that are not content. The model runs once for
        each token, in batches.

    >>> from captum_vz.metrics import MaskedSentences, Prediction, content_tokens
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> content = content_tokens(inputs["input_ids"], [tokenizer.cls_token_id, tokenizer.sep_token_id])
    >>> forms = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> sentences = MaskedSentences(inputs["input_ids"], inputs["attention_mask"], 6, content, forms)
    >>> prediction = Prediction(model, sentences, tokenizer.unk_token_id)
    >>> inputs.tokens()[blank_out(prediction).argmax()]
    'pictures'
    """
    answer = prediction.best() if prediction.forms is None else prediction.forms[:, 0]
    examples, tokens = prediction.content.nonzero().unbind(1)
    removed = torch.arange(prediction.ids.shape[1]) == tokens[:, None]
    whole = prediction.probability(answer)
    effects = torch.zeros(prediction.content.shape, dtype=torch.float64)
    effects[examples, tokens] = whole[examples] - prediction.probability(answer, examples, removed)
    return effects


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

    >>> from captum_vz.metrics import MaskedSentences, Prediction, content_tokens
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> content = content_tokens(inputs["input_ids"], [tokenizer.cls_token_id, tokenizer.sep_token_id])
    >>> forms = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> sentences = MaskedSentences(inputs["input_ids"], inputs["attention_mask"], 6, content, forms)
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
        prediction: Model, sentences and the way of removal.
        scores: `(batch, tokens)`, highest for the most important tokens. Take absolute values if both signs count.
            If scores are equal, the earlier token comes first.
        fractions: Shares q of the content tokens, between 0 and 1.

    Returns:
        `(batch, fractions)` in float64. NaN for an example without content tokens, or with scores that give no order:
        a NaN, or all equal. :func:`summarize` counts these examples.

    Raises:
        ArgumentError: Shapes do not fit, or fractions are not between 0 and 1.

    >>> from captum_vz.metrics import MaskedSentences, Prediction, content_tokens
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> content = content_tokens(inputs["input_ids"], [tokenizer.cls_token_id, tokenizer.sep_token_id])
    >>> forms = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> sentences = MaskedSentences(inputs["input_ids"], inputs["attention_mask"], 6, content, forms)
    >>> prediction = Prediction(model, sentences, tokenizer.mask_token_id)
    >>> cue = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    >>> bool(sufficiency(prediction, cue).mean() < 0.2)
    True
    """
    return _drop(prediction, scores, fractions, left=True)


def _drop(prediction: Prediction, scores: Tensor, fractions: tuple[float, ...], left: bool) -> Tensor:
    """How much the prediction's probability falls without the highest tokens, or, if `left`, with only them."""
    content = prediction.content
    if not fractions or not all(0 < q <= 1 for q in fractions):
        raise ArgumentError(f"fractions is {fractions!r}: pass shares of the content tokens, above 0 and up to 1.")
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
    count = content.sum(-1)
    # Rounded first, because 0.07 * 100 is a little more than 7, but must not become 8.
    highest = torch.stack([(count.double() * q).round(decimals=9).ceil() for q in fractions], dim=1)
    high = rank[:, None, :] < highest[..., None]  # (batch, fractions, tokens)
    removed = (~high if left else high) & content[:, None, :]
    answer = prediction.best()
    examples = torch.arange(len(content)).repeat_interleave(len(fractions))
    after = prediction.probability(answer, examples, removed.flatten(0, 1)).view(len(content), len(fractions))
    fall = prediction.probability(answer)[:, None] - after
    unknown = (count == 0) | ((count > 1) & undefined(values, kept)) | (values.isnan() & kept).any(-1)
    return fall.masked_fill(unknown[:, None], torch.nan)
