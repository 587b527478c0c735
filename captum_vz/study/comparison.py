"""Several methods on one text, and what blanking out or patching its tokens does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from captum_vz.app import explained_by
from captum_vz.app.inputs import Wish
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.methods import COMPARED_METHODS, DEFAULT_METHODS, given_methods
from captum_vz.result import Explanation
from captum_vz.subjects import Subject, text_subject_of
from captum_vz.subjects.heads import ANSWER, SENTENCE, TOKENS, class_labels, class_numbers, reads_whole_text
from captum_vz.subjects.texts import PreparedText, content_specials, prepare_text
from captum_vz.testbed.grammar import other_number
from captum_vz.testbed.models import EMBEDDED

if TYPE_CHECKING:
    from captum_vz.metrics import Prediction

CLEAR: Final = 0.9  # the probability of an answer without a rival


def compare(
    model: Any,
    text: str | Mapping[str, Any],
    methods: Any = None,
    target: int | str | None = None,
    *,
    text_pair: Any = None,
    tokenizer: Any = None,
    foil: int | str | None = None,
    layer: int | Literal["deciding"] = -1,
    token: int | str | None = None,
    truth: bool = False,
    patch: tuple[str, str] | None = None,
    advance: Callable[[str], object] | None = None,
) -> Explanation:
    """How much a token of a text draws on each of its tokens, by several methods: one table, tokens by methods.

    The table shows shares, which are not negative and sum to 1. The result also holds raw scores, with their signs.

    Args:
        model: What :func:`captum_vz.explain` takes. In a model with encoder and decoder, the encoder is explained.
        text: A text, in which ``[MASK]`` stands for the tokenizer's own mask token, or what the tokenizer returned
            for one text, with tensors `(1, tokens)`.
        methods: What :func:`~captum_vz.study.as_method` takes, several, or a mapping from names to these. None: the
            five of :data:`~captum_vz.study.COMPARED_METHODS`. "all": :data:`~captum_vz.study.DEFAULT_METHODS`. With
            None and "all", methods that refuse this model are left out, and the table lists them with the reason.
        target: The label or word that is explained, by methods that explain the output, see
            :func:`captum_vz.explain`. None: the model's prediction.
        text_pair: A second text.
        tokenizer: The tokenizer of a model that is passed alone.
        foil: The word or label whose logit is subtracted from the target's logit. None: none.
        layer: The layer of methods with a map for each layer, from 0; the last layer of rollouts. Negative numbers
            count from the end. Methods without layers ignore it. "deciding": for each method with a map for each layer
            the one that decides, see :func:`captum_vz.explain`; the others have their last layer.
        token: The token that is explained, by its position (negative ones count from the end) or as it is written.
            Logits of words, and labels of tokens, are read there. None: the mask or, without a mask, the last token
            that is no special token; for labels of the whole text the token that the head reads, such as `[CLS]`.
        truth: Whether to add how far the answer's log-probability, or with a `foil` the difference of both, falls if a
            token is blanked out, and how far each method agrees with this. It needs the extra `study`, and one forward
            pass for each token. Without a `foil` it also counts which of two right words fits better.
        patch: A word of the text, and a word of as many tokens: another truth, see
            :func:`~captum_vz.study.value_patching`. Each token has its values in all layers from the text with the
            other word. Without a `foil`, it is what the model predicts for the other text.
        advance: Called with the name of each method before it runs, for a progress bar.

    Returns:
        An :class:`~captum_vz.result.Explanation`: its `shares` for each method, `truth`, `plot()`, `view()`,
        `to_pandas()`, `to_csv()`, `to_json()`.

    Raises:
        ArgumentError: A method is unknown; there is no such token, layer or target; or the text is too long or empty.
        RefusedError: A method that was named, or each of the default methods, refuses the model.

    >>> print(compare("agreement", "the pictures of some hat [MASK].", ["value-zeroing", "attention", "position"]))
                     value
                   zeroing  attention  position
    ...
    > 6  [MASK]      0...
    ...
    """
    subject = text_subject_of(model, tokenizer)
    several = {"None": COMPARED_METHODS, "all": DEFAULT_METHODS}.get(str(methods)) if methods in (None, "all") else None
    given = given_methods(methods if several is None else several)
    told = list[str]()
    if subject.task not in (ANSWER, SENTENCE):  # also if no method explains the output
        told = _numbers(subject.model, subject.tokenizer, target, foil)[1]
    if subject.task == TOKENS and token is None:  # a table has one row
        token = prepare_text(subject.model, subject.tokenizer, text).token
    taken = truth_of(text, subject, token, target, foil, patch) if truth or patch else None
    wish = Wish(target=target, foil=taken.foil if taken else foil, token=token, layer=layer)
    chosen = {name: method.of(subject) for name, method in given.items()}
    found = explained_by(subject, text, text_pair, wish, chosen, several is not None, advance)
    found.told += [one for one in told if one not in found.told]
    return with_truth(found, taken) if taken else found


def with_truth(found: Explanation, truth: Truth) -> Explanation:
    """The result with a truth."""
    return replace(found, truth=truth.shares, falls=truth.falls, truth_name=truth.name)


def _numbers(
    model: Any, tokenizer: Any, target: int | str | None, foil: int | str | None
) -> tuple[tuple[int | None, int | None], list[str]]:
    """The numbers of the target's label or word, and of the foil's, which differ; and remarks about them."""
    numbers, told = class_numbers(model, tokenizer, target, foil)
    if target is not None and numbers[0] == numbers[1]:
        raise ArgumentError(f"foil is {foil!r}, which is the target: pass another foil.", "foil")
    return numbers, told


class Truth(NamedTuple):
    """What taking away each token of one text does to the model's prediction."""

    name: str  # "blank-out" or "patching"
    how: str  # what was done, such as "blanking out ([UNK] in its place)"
    answer: str  # what is measured, such as "log-probability of are" or "lead of are over is"
    falls: Tensor  # how much it falls, `(tokens,)`, negative where it rises, NaN where nothing was taken away
    shares: Tensor  # their sizes as shares, `(tokens,)`, 0 if nothing changes; of patching, only falls count
    foil: int | str | None  # the foil that was given or, for patching, chosen


def truth_of(
    text: str | Mapping[str, Any],
    subject: Subject,
    token: int | str | None = None,
    target: int | str | None = None,
    foil: int | str | None = None,
    patch: tuple[str, str] | None = None,
) -> Truth:
    r"""How much the log-probability of the answer falls when a token is replaced; the arguments are those of `compare`.

    .. math:: b_j = \ell(x) - \ell(x \setminus x_j), \qquad \ell(x) = \log p(y \mid x) - \log p(y' \mid x)

    Without a foil y', the log-probability of y alone. :func:`captum_vz.study.scoring.removal_of` says what replaces
    a token. The explained token and special tokens are not replaced. With `patch`, each token has its
    values in all layers from the other text instead, see :func:`~captum_vz.study.value_patching`.

    Raises:
        RefusedError: The model returns no logits `(batch, tokens, vocabulary)` or `(batch, tokens, labels)`. The texts
            of `patch` have not as many tokens, or differ too little.
        ModuleNotFoundError: The extra `study` is not installed.
    """
    from captum_vz.metrics import MaskedSentences, Prediction, blank_out, content_tokens
    from captum_vz.study.scoring import removal_of

    model, tokenizer = subject.model, subject.tokenizer
    wanted, other = _numbers(model, tokenizer, target, foil)[0]
    prepared = prepare_text(model, tokenizer, text, token)
    if reads_whole_text(model):
        raise UnsupportedLayerError(
            f"{type(model).__name__} has one label for the whole text: only words and labels of tokens are measured "
            "by blanking out. Leave the truth out: value-zeroing-effect shows how far the label's logit falls."
        )
    special = [number for number in tokenizer.all_special_ids if number not in content_specials(tokenizer).values()]
    removal, filler = removal_of(tokenizer)

    def predicted(of: PreparedText, forms: list[int] | None = None) -> Prediction:
        ids, mask = of.inputs["input_ids"], of.inputs.get("attention_mask")
        return Prediction(model, MaskedSentences(ids, mask, of.token, content_tokens(ids, special), forms), removal)

    answer = predicted(prepared).best() if wanted is None else torch.tensor([wanted])
    if patch is not None:
        return _patched(text, prepared, subject, patch, int(answer), other, predicted)
    numbers = [*answer.tolist(), *([] if other is None else [other])]
    prediction = predicted(prepared, None if other is None else numbers)
    falls = blank_out(prediction, answer)[0].masked_fill(~prediction.content[0], torch.nan)
    sizes = falls.abs()
    shares = sizes / sizes.nansum() if sizes.nan_to_num().any() else sizes
    names = _names(subject, numbers)
    measured = f"log-probability of {names[0]}" if other is None else f"lead of {names[0]} over {names[1]}"
    return Truth("blank-out", f"blanking out ({filler} in its place)", measured, falls, shares, foil)


def _patched(
    text: str | Mapping[str, Any],
    prepared: PreparedText,
    subject: Subject,
    patch: tuple[str, str],
    answer: int,
    foil: int | None,
    predicted: Callable[[PreparedText], Prediction],
) -> Truth:
    """What is lost if a token has its values from the text with the other word in all layers."""
    from captum_vz.study.examples.patching import LEAST_DIFFERENCE, Pair

    word, new = patch
    parts = re.split(rf"\b{re.escape(word)}\b", text) if isinstance(text, str) else []
    if len(parts) != 2:
        times = f"{len(parts) - 1} times in the text" if parts else "not in a text"
        raise ArgumentError(
            f"patch names {word!r}, which is {times}. Pass a text and a word that is there once.", "patch"
        )
    other = prepare_text(subject.model, subject.tokenizer, new.join(parts), prepared.token)
    count, others = len(prepared.tokens), len(other.tokens)
    if count != others:
        raise ArgumentError(f"the text has {count} tokens, and {others} with {new!r}: pass a word of as many.", "patch")
    foil = int(predicted(other).best()) if foil is None else foil
    good, bad = _names(subject, [answer, foil])
    if answer == foil:
        raise ArgumentError(f"the model predicts {good} with {new} too. Pass a foil, or another word.", "patch")
    pair = Pair(subject.model, subject.layers, (prepared.inputs, other.inputs), prepared.token, (answer, foil))
    found = pair.values(together=True, first=-1)
    if found.shares.isnan().any():
        raise ArgumentError(
            f"the lead of {good} over {bad} is {found.difference:.2f}, and {found.other:.2f} with {new}. Pass a word "
            f"that takes away at least {LEAST_DIFFERENCE:g} of a lead that is as large.",
            "patch",
        )
    how = f"patching (values with {new} for {word})"
    return Truth("patching", how, f"lead of {good} over {bad}", found.falls[-1], found.shares[-1], foil)


def _names(subject: Subject, numbers: Sequence[int]) -> list[str]:
    """The labels or words of some entries of the logits."""
    labels = class_labels(subject.model)
    return [labels[one] if labels else subject.tokenizer.decode([one]).strip() for one in numbers]


def choose_foil(text: str, subject: Subject, token: str | None) -> tuple[str | None, str]:
    """A foil for an embedded model, whose question is known, and a sentence about it.

    For other models the foil is None, and the sentence says which answers compete. It is empty if none do.
    """
    prepared = prepare_text(subject.model, subject.tokenizer, text, token)
    with torch.no_grad():
        logits = getattr(subject.model(**prepared.inputs), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[-1] < 2:
        return None, ""
    shares, ids = logits[0, prepared.token].float().softmax(-1).sort(descending=True)
    words = _names(subject, ids.tolist())
    if subject.name in EMBEDDED:
        forms = other_number(words[0])
        foil = next((word for word in words if word in forms), None)
        if foil is not None:
            question = f"why {words[0]} and not {foil}, its likeliest form of the other number?"
            return foil, f"{question} foil= asks for another word"
    if shares[0] >= CLEAR:
        return None, ""
    rivals = f"{words[0]} {shares[0]:.2f} competes with {words[1]} {shares[1]:.2f}"
    return None, f"{rivals}: foil={words[1]} asks why {words[0]} and not {words[1]}"
