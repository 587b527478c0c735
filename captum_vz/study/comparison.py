"""Several methods on one text, and what blanking out its tokens does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from captum_vz.app.explain import explained_by
from captum_vz.app.wish import Wish
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.methods import COMPARED_METHODS, DEFAULT_METHODS, given_methods
from captum_vz.result import Explanation
from captum_vz.subjects import Subject, check_order, text_subject_of
from captum_vz.subjects.heads import ANSWER, SENTENCE, TOKENS, class_labels, class_numbers, reads_whole_text
from captum_vz.subjects.texts import content_specials, prepare_text
from captum_vz.testbed.grammar import other_number
from captum_vz.testbed.models import EMBEDDED

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
    layers: list[nn.Module] | None = None,
    token: int | str | None = None,
    truth: bool = False,
    advance: Callable[[str], object] | None = None,
) -> Explanation:
    """How much a token of a text draws on each of its tokens, by several methods: one table, tokens by methods.

    The table shows shares, which are not negative and sum to 1. The result also holds raw scores, with their signs.

    Args:
        model: What :func:`captum_vz.explain` takes. Of a model with encoder and decoder, the encoder is explained.
        text: A text, in which ``[MASK]`` stands for the tokenizer's own mask token, or what the tokenizer returned
            for one text, with tensors `(1, tokens)`.
        methods: Names of :data:`~captum_vz.study.METHODS`, classes, objects or functions, see
            :func:`~captum_vz.study.as_method`, or a mapping from names to these. None: the five of
            :data:`~captum_vz.study.COMPARED_METHODS`. "all": those of :data:`~captum_vz.study.DEFAULT_METHODS`. Of None
            and of "all", methods that refuse this model are left out, and the table lists them with the reason.
        target: What is explained by the methods that explain the output: a word of the vocabulary or its id, or for a
            model with a head for labels a label or its number. None: the model's prediction.
        text_pair: A second text, see :func:`captum_vz.explain`.
        tokenizer: The tokenizer of a model that is passed alone.
        foil: The word or label whose logit is subtracted from the target's logit. None: none.
        layer: The layer of methods with a map for each layer, from 0; the last layer of rollouts. Negative numbers
            count from the end. Methods without layers ignore it. "deciding": for each method with a map for each layer
            the one that decides, see :func:`captum_vz.explain`; the others have their last layer.
        layers: The layers of the model, if :func:`~captum_vz.find_layers` does not find them.
        token: The token that is explained, by its position (negative ones count from the end) or as it is written.
            Logits of words, and labels of tokens, are read there. None: the mask or, without a mask, the last token
            that is no special token; for labels of the whole text the token that the head reads, such as `[CLS]`.
        truth: Whether to add what blanking out each token does to the prediction at `token`, and how far each method
            agrees with it. It needs the extra `study`, and one forward pass for each token. Without a `foil` it also
            counts which of two words fits better that are both right: pass one that differs in what you ask.
        advance: Called with the name of each method before it runs, for a progress bar.

    Returns:
        An :class:`~captum_vz.result.Explanation`: its `shares` for each method, `truth`, `plot()`, `view()`,
        `to_pandas()`, `to_csv()`, `to_json()`, `to_markdown()`.

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
    check_order("compare", text)
    several = {"None": COMPARED_METHODS, "all": DEFAULT_METHODS}.get(str(methods)) if methods in (None, "all") else None
    given = given_methods(methods if several is None else several)
    subject = text_subject_of(model, tokenizer)
    told = list[str]()
    if subject.task not in (ANSWER, SENTENCE):  # also if no method explains the output
        told = _numbers(subject.model, subject.tokenizer, target, foil)[1]
    subject = subject if layers is None else replace(subject, layers=layers)
    if subject.task == TOKENS and token is None:  # a table has one row
        token = prepare_text(subject.model, subject.tokenizer, text).token
    wish = Wish(target=target, foil=foil, token=token, layer=layer)
    chosen = {name: method.of(subject) for name, method in given.items()}
    found = explained_by(subject, text, text_pair, wish, chosen, several is not None, advance)
    found.told += [one for one in told if one not in found.told]
    if truth:
        blanked = blanked_out(text, subject, token, target, foil)
        found.truth, found.falls = blanked.shares, blanked.falls
    return found


def _numbers(
    model: Any, tokenizer: Any, target: int | str | None, foil: int | str | None
) -> tuple[tuple[int | None, int | None], list[str]]:
    """The numbers of the target's label or word, and of the foil's, which differ; and remarks about them."""
    numbers, told = class_numbers(model, tokenizer, target, foil)
    if target is not None and numbers[0] == numbers[1]:
        raise ArgumentError(f"foil is {foil!r}, which is the target: pass another foil.", "foil")
    return numbers, told


class Truth(NamedTuple):
    """What blanking out each token of one text does to the model's prediction.

    `answer` is the word whose probability is measured, such as "are", or "are rather than is". `falls` say how much
    this probability falls without each token, `(tokens,)` in float64. They are negative if it rises, and NaN for the
    explained token and for special tokens, which are not blanked out.
    """

    answer: str
    falls: Tensor

    @property
    def shares(self) -> Tensor:
        """The sizes of the falls as shares of their sum, `(tokens,)`. Zero if nothing changes."""
        sizes = self.falls.abs()
        return sizes / sizes.nansum() if sizes.nan_to_num().any() else sizes


def blanked_out(
    text: str | Mapping[str, Any],
    subject: Subject,
    token: int | str | None = None,
    target: int | str | None = None,
    foil: int | str | None = None,
) -> Truth:
    r"""How much the probability of the answer falls when a token is replaced; the arguments are those of `compare`.

    .. math:: b_j = p(y \mid x) - p(y \mid x \setminus x_j)

    Tokens are replaced by the tokenizer's unknown token. A tokenizer without one replaces them by its mask. Without a
    mask, they are deleted. An unknown token that also begins or ends each text, such as GPT-2's, is not used. With a
    foil, the model chooses between the two answers only.

    Raises:
        RefusedError: The model returns no logits `(batch, tokens, vocabulary)` or `(batch, tokens, labels)`.
        ModuleNotFoundError: The extra `study` is not installed.
    """
    from captum_vz.metrics import MaskedSentences, Prediction, content_tokens
    from captum_vz.study.scoring import removal_of

    model, tokenizer = subject.model, subject.tokenizer
    wanted, other = _numbers(model, tokenizer, target, foil)[0]
    prepared = prepare_text(model, tokenizer, text, token)
    if reads_whole_text(model):
        raise UnsupportedLayerError(
            f"{type(model).__name__} has one label for the whole text: only words and labels of tokens are measured "
            "by blanking out. Leave the truth out: value-zeroing-effect shows how far the label's logit falls."
        )
    ids, mask = prepared.inputs["input_ids"], prepared.inputs.get("attention_mask")
    blanks = content_specials(tokenizer)
    special = [number for number in tokenizer.all_special_ids if number not in blanks.values()]
    content, removal = content_tokens(ids, special), removal_of(tokenizer, next(iter(blanks), "delete"))

    def predicted(forms: list[int] | None) -> Prediction:
        return Prediction(model, MaskedSentences(ids, mask, prepared.token, content, forms), removal)

    answer = predicted(None).best() if wanted is None else torch.tensor([wanted])
    forms = None if other is None else [*answer.tolist(), other]
    prediction = predicted(forms)
    places = prediction.content[0].nonzero()[:, 0].cpu()
    removed = torch.arange(ids.shape[1]) == places[:, None]
    falls = torch.full((ids.shape[1],), float("nan"), dtype=torch.float64)
    falls[places] = prediction.probability(answer) - prediction.probability(answer, torch.zeros_like(places), removed)
    return Truth(" rather than ".join(_names(subject, forms or answer.tolist())), falls)


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
