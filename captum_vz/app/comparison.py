"""Several methods on one text, and what blanking out each token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz.app.models import Loaded
from captum_vz.errors import ArgumentError
from captum_vz.metrics import MaskedSentences, Prediction, blank_out, content_tokens, kendall
from captum_vz.study import Table, compare
from captum_vz.study.examples.text import prepare_text, word_id


@dataclass(frozen=True)
class Truth:
    """What the model's prediction loses if one token of a text is blanked out.

    Attributes:
        answer: The word whose probability is measured, such as "are", or "are rather than is".
        effects: For each token how much this probability falls, `(tokens,)`. 0 for the explained token and for special
            tokens, which are not blanked out.
        content: The tokens that were blanked out, booleans `(tokens,)`.
    """

    answer: str
    effects: Tensor
    content: Tensor

    def tau(self, scores: Tensor) -> float:
        """Kendall's rank correlation of a method's scores with the size of these effects. NaN: one has no order."""
        return kendall(scores[None].double(), self.effects.abs()[None], self.content[None]).item()


def compared(
    text: str,
    loaded: Loaded,
    methods: Sequence[str] | None,
    token: str | None,
    layer: int,
    target: str | None = None,
    foil: str | None = None,
    advance: Callable[[str], object] | None = None,
) -> Table:
    """:func:`~captum_vz.study.compare` for a model that was loaded by its name.

    Raises:
        ArgumentError: A method is unknown; there is no such token, layer or target; or the text is empty or too long.
    """
    model, tokenizer, layers = loaded
    try:
        return compare(
            model,
            tokenizer,
            text,
            methods,
            target,
            foil=foil,
            layer=layer,
            layers=layers,
            token=token,
            advance=advance,
        )
    except ValueError as error:
        raise ArgumentError(str(error)) from error


@torch.no_grad()
def blanked_out(
    text: str, loaded: Loaded, token: str | None, target: str | None = None, foil: str | None = None
) -> Truth:
    """Blank out each token of a text, and measure the probability of a word at the explained token.

    A token is replaced by the tokenizer's unknown token, or deleted if it has none.

    Args:
        text: The text.
        loaded: The model, which predicts words.
        token: The explained token, at which the word is predicted.
        target: The word. None: the model's prediction.
        foil: The word with which the target shares the probability. None: the whole vocabulary.

    Raises:
        ArgumentError: The model predicts no words there, or a word is not one token.
    """
    model, tokenizer, _ = loaded
    try:
        prepared = prepare_text(model, tokenizer, text, token)
        words = [None if word is None else word_id(tokenizer, word) for word in (target, foil)]
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    inputs = prepared.inputs
    logits = getattr(model(**inputs), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ArgumentError(f"{type(model).__name__} predicts no words, so blanking out has no effect to measure.")
    answer = int(logits[0, prepared.token].argmax()) if words[0] is None else words[0]
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    content = content_tokens(ids.cpu(), _special(tokenizer))
    content[0, prepared.token] = False
    removal: Any = "delete" if tokenizer.unk_token_id in (None, *_special(tokenizer)) else tokenizer.unk_token_id
    sentences = MaskedSentences(
        ids, mask, prepared.token, content, [answer] if words[1] is None else [answer, words[1]]
    )
    prediction = Prediction(model, sentences, removal, over="vocabulary" if words[1] is None else "forms")
    name = " rather than ".join(tokenizer.decode([word]).strip() for word in (answer, words[1]) if word is not None)
    return Truth(name, blank_out(prediction)[0], prediction.content[0].cpu())


def _special(tokenizer: Any) -> list[int | None]:
    names = ("cls", "sep", "bos", "eos", "pad")
    return [getattr(tokenizer, f"{name}_token_id", None) for name in names]
