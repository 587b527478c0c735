"""Results of `explain` that are more than one explanation: a text that a model writes, and a list of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from captum_vz.app.inputs import check_texts
from captum_vz.app.wish import Wish
from captum_vz.errors import ArgumentError
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.result import Explanation, Explanations
from captum_vz.subjects import Subject, heads


def is_list_of_texts(text: Any) -> TypeGuard[Sequence[str]]:
    """Whether several texts were passed, or the files of several images or sounds."""
    return isinstance(text, (list, tuple)) and all(isinstance(one, str) for one in text)


def each_text(
    explained: Callable[[str, Any], Explanation], subject: Subject, texts: Sequence[str], pair: Any
) -> Explanations:
    """The explanation of each text, with its own second text or the same for all."""
    if not texts:
        raise ArgumentError("the list of texts is empty: pass at least one text.", "text")
    if subject.task == heads.SEQ2SEQ:
        raise ArgumentError("an encoder-decoder explains what it writes for one text: pass one at a time.", "text")
    own = isinstance(pair, (list, tuple)) and subject.task != heads.CHOICE
    if own and len(pair) != len(texts):
        raise ArgumentError(f"there are {len(texts)} texts and {len(pair)} second ones: pass as many.", "text_pair")
    pairs = pair if own else [pair] * len(texts)
    return Explanations([explained(*both) for both in zip(texts, pairs, strict=True)])


def written(subject: Subject, text: Any, pair: Any, wish: Wish, method: Any) -> GenerationAttribution:
    """Each token that an encoder-decoder writes, by the tokens of the text."""
    if pair is not None or wish.words or wish.window or (wish.target, wish.token) != (None, None):
        raise ArgumentError(
            "an encoder-decoder explains each token that it writes: leave text_pair=, target=, token=, words=, window= "
            "out. Or use captum_vz.generation.attribute_generation, or stack='encoder'."
        )
    check_texts(text, pair)
    asked: Any = {"layer": wish.layer, "foil": wish.foil}
    found: GenerationAttribution = attribute_generation((subject.model, subject.tokenizer), text, method, **asked)
    found.task, found.predictions = subject.task, [(found.text, 1.0)]
    found.told.insert(0, f"the model writes: {found.text}")
    return found
