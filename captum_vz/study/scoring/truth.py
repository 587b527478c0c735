"""What blanking out the tokens of one text does to the model's prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import UnsupportedLayerError
from captum_vz.metrics import MaskedSentences, Prediction, content_tokens
from captum_vz.study.scoring.measuring import removal_of
from captum_vz.subjects.heads import class_labels, reads_whole_text
from captum_vz.subjects.texts import PreparedText, content_specials


@dataclass(frozen=True)
class Truth:
    """What blanking out each token of one text does to the model's prediction.

    Attributes:
        answer: The word whose probability is measured, such as "are", or "are rather than is".
        falls: How much this probability falls without each token, `(tokens,)` in float64, negative if it rises. NaN for
            the explained token and for special tokens, which are not blanked out.
    """

    answer: str
    falls: Tensor

    @property
    def shares(self) -> Tensor:
        """The sizes of the falls as shares of their sum, `(tokens,)`. Zero if nothing changes."""
        sizes = self.falls.abs()
        return sizes / sizes.nansum() if sizes.nan_to_num().any() else sizes


def blank_out_text(
    model: Any, tokenizer: Any, text: PreparedText, target: list[int] | None = None, foil: list[int] | None = None
) -> Truth:
    r"""How much the probability of the answer falls when a token is replaced.

    .. math:: b_j = p(y \mid x) - p(y \mid x \setminus x_j)

    Tokens are replaced by the tokenizer's unknown token. A tokenizer without one replaces them by its mask. Without a
    mask, they are deleted. An unknown token that also begins or ends each text, such as GPT-2's, is not used.

    Args:
        model: A model with logits `(batch, tokens, vocabulary)`, or `(batch, tokens, labels)`.
        tokenizer: Its tokenizer.
        text: The text, with the position at which the logits are read. This token is never replaced.
        target: The id of the answer y. None: the model's prediction.
        foil: The id of a second answer. The model then chooses between the two only.

    Raises:
        RefusedError: The model returns no such logits.

    >>> from captum_vz.subjects.texts import prepare_text
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> text = prepare_text(model, tokenizer, "the pictures of some hat [MASK] scaring marcus.")
    >>> forms = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> truth = blank_out_text(model, tokenizer, text, forms[:1], forms[1:])
    >>> truth.answer, text.tokens[int(truth.shares.nan_to_num().argmax())]
    ('are rather than is', 'pictures')
    """
    if reads_whole_text(model):
        raise UnsupportedLayerError(
            f"{type(model).__name__} has one label for the whole text: only words and labels of tokens are measured "
            "by blanking out. Leave the truth out: value-zeroing-effect shows how far the label's logit falls."
        )
    ids = text.inputs["input_ids"]
    blanks = content_specials(tokenizer)
    special = [number for number in tokenizer.all_special_ids if number not in blanks.values()]
    content, removal = content_tokens(ids, special), removal_of(tokenizer, next(iter(blanks), "delete"))

    def predicted(forms: list[int] | None) -> Prediction:
        mask = text.inputs.get("attention_mask")
        return Prediction(model, MaskedSentences(ids, mask, text.token, content, forms), removal)

    answer = predicted(None).best() if target is None else torch.tensor(target)
    forms = None if foil is None else [*answer.tolist(), *foil]
    prediction = predicted(forms)
    places = prediction.content[0].nonzero()[:, 0].cpu()
    removed = torch.arange(ids.shape[1]) == places[:, None]
    without = prediction.probability(answer, torch.zeros_like(places), removed)
    falls = torch.full((ids.shape[1],), float("nan"), dtype=torch.float64)
    falls[places] = prediction.probability(answer) - without
    labels = class_labels(model)
    words = [labels[one] if labels else tokenizer.decode([one]).strip() for one in forms or answer.tolist()]
    return Truth(" rather than ".join(words), falls)
