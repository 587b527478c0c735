"""What blanking out the tokens of one text does to the model's prediction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from captum_vz.metrics import MaskedSentences, Prediction, content_tokens
from captum_vz.study.examples.text import PreparedText
from captum_vz.study.metrics import removal_of


def blank_out_shares(
    model: Any, tokenizer: Any, text: PreparedText, target: list[int] | None = None, foil: list[int] | None = None
) -> Tensor:
    r"""How much the probability of the answer changes when a token is replaced, as shares of all changes.

    .. math:: t_j = |b_j| \big/ \textstyle\sum_k |b_k|, \qquad b_j = p(y \mid x) - p(y \mid x \setminus x_j)

    Tokens are replaced by the unknown token of the tokenizer, or else by its mask, or else deleted.

    Args:
        model: A model with logits `(batch, tokens, vocabulary)`.
        tokenizer: Its tokenizer.
        text: The text, with the position at which the logits are read. This token is never replaced.
        target: The id of the answer y. None: the model's prediction.
        foil: The id of a second answer. If given, the model chooses between the two only.

    Returns:
        `(tokens,)` in float64, summing to 1. NaN for the token itself and for special tokens. Zero if nothing changes.

    Raises:
        RefusedError: The model returns no such logits.

    >>> from captum_vz.study.examples.text import prepare_text
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> text = prepare_text(model, tokenizer, "the pictures of some hat [MASK] scaring marcus.")
    >>> forms = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> shares = blank_out_shares(model, tokenizer, text, forms[:1], forms[1:])
    >>> text.tokens[int(shares.nan_to_num().argmax())]
    'pictures'
    """
    ids = text.inputs["input_ids"]
    numbers = (tokenizer.unk_token_id, tokenizer.mask_token_id)
    special = [number for number in tokenizer.all_special_ids if number not in numbers]
    forms = None if target is None or foil is None else [*target, *foil]
    sentences = MaskedSentences(ids, text.inputs.get("attention_mask"), text.token, content_tokens(ids, special), forms)
    way = next((name for name, number in zip(("unk", "mask"), numbers, strict=True) if number is not None), "delete")
    prediction = Prediction(model, sentences, removal_of(tokenizer, way))
    answer = prediction.best() if target is None else torch.tensor(target)
    places = prediction.content[0].nonzero()[:, 0]
    removed = torch.arange(ids.shape[1]) == places[:, None]
    without = prediction.probability(answer, torch.zeros_like(places), removed)
    changes = (prediction.probability(answer) - without).abs()
    shares = torch.full((ids.shape[1],), float("nan"), dtype=torch.float64)
    shares[places] = changes / changes.sum() if changes.any() else changes
    return shares
