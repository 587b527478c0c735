"""Blank-out: what a prediction loses with each token."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz.metrics.prediction import Prediction


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

    >>> from captum_vz.metrics import MaskedSentences, Prediction
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> text = "the pictures of some hat [MASK] scaring marcus."
    >>> sentences = MaskedSentences.of_text(tokenizer, text, "are", "is")
    >>> prediction = Prediction(model, sentences, tokenizer.unk_token_id)
    >>> tokenizer.tokenize(text)[blank_out(prediction).argmax() - 1]
    'pictures'
    """
    answer = prediction.best() if prediction.forms is None else prediction.forms[:, 0]
    examples, tokens = prediction.content.nonzero().unbind(1)
    removed = torch.arange(prediction.ids.shape[1]) == tokens[:, None]
    whole = prediction.probability(answer)
    effects = torch.zeros(prediction.content.shape, dtype=torch.float64)
    effects[examples, tokens] = whole[examples] - prediction.probability(answer, examples, removed)
    return effects
