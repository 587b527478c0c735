"""What a model with a head says about a text, and which rows explain it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.result.explanation import Predictions
from captum_vz.subjects.heads import (
    ANSWER,
    AUDIO,
    CAUSAL,
    IMAGE,
    MASKED,
    SEQUENCE,
    SPEECH,
    TOKENS,
    class_number,
    label_names,
    label_number,
    predicts_next,
)
from captum_vz.visualization import readable_tokens

SHOWN = 5  # predictions that are kept
LONGEST_ANSWER = 30  # tokens


@dataclass(frozen=True)
class Question:
    """One row of an explanation.

    Attributes:
        name: What is explained: a label, a word and its label, the start of an answer.
        token: The position of the token whose row methods with maps show.
        field: The tensor of the model's output that holds the explained number; empty for a model without a head.
        entry: The class in that tensor. None: the tensor has one number for each token.
        foil: The class whose number is subtracted.
        of_token: Whether the tensor has an axis of tokens.
        read: A function that reads the explained number from an output, `(batch,)`. None: it is in the tensor.
        value: The explained number. None: nobody asked the model.
    """

    name: str
    token: int
    field: str = "logits"
    entry: int | None = None
    foil: int | None = None
    of_token: bool = True
    read: Callable[[Any], Tensor] | None = None
    value: float | None = None

    @property
    def is_logit(self) -> bool:
        """Whether the explained number is an entry of the output's logits."""
        return self.field == "logits" and self.read is None

    def index(self, place: int, entry: int | None) -> tuple[int, ...]:
        """The index of a number in one example's part of the tensor, if the token stands at `place`."""
        own = () if entry is None else (entry,)
        return (place, *own) if self.of_token else own

    def reader(self, place: int) -> Callable[[Any], Tensor]:
        """A function that reads the explained number from an output, `(batch,)`."""

        def of_field(output: Any) -> Tensor:
            numbers = getattr(output, self.field)
            found: Tensor = numbers[(slice(None), *self.index(place, self.entry))]
            return found if self.foil is None else found - numbers[(slice(None), *self.index(place, self.foil))]

        return of_field if self.read is None else self.read


@dataclass(frozen=True)
class Asked:
    """What is known about the input when the rows are chosen.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer; None for images and sound.
        numbers: The tensors of the output for the only example, by their names.
        ids: The ids of the tokens.
        labels: The tokens, as a person reads them.
        words: The number of each token's word.
        word_texts: The words.
        special: Whether each token is a special token.
        second: Whether each token belongs to the second text.
        token: The position of the explained token.
        chosen: Whether the user chose it.
        is_mask: Whether it is a mask.
        target: What the user wants to be explained: a label or a word.
        foil: What is subtracted.
        every_word: Whether each word has a row, also those that the model does not label.
    """

    model: Any
    tokenizer: Any
    numbers: dict[str, Tensor]
    ids: Sequence[int]
    labels: Sequence[str]
    words: Sequence[int]
    word_texts: Sequence[str]
    special: Sequence[bool]
    second: Sequence[bool]
    token: int
    chosen: bool
    is_mask: bool
    target: int | str | None = None
    foil: int | str | None = None
    every_word: bool = False

    @cached_property
    def labels_of_classes(self) -> dict[int, str]:
        """The names of the classes by their numbers."""
        return label_names(self.model.config)

    def label(self, number: int) -> str:
        """The name of a class."""
        return self.labels_of_classes.get(number, str(number))

    def word(self, number: int) -> str:
        """A word of the vocabulary."""
        return readable_tokens(self.tokenizer, [number])[0]

    def classes(self) -> tuple[int | None, int | None]:
        """The numbers of the target's label and of the foil's."""
        names = self.labels_of_classes
        return (
            None if self.target is None else label_number(self.target, names, "target"),
            None if self.foil is None else label_number(self.foil, names, "foil"),
        )

    def vocabulary(self, size: int) -> tuple[int | None, int | None]:
        """The ids of the target's word and of the foil's, of a vocabulary of this size."""
        found: list[int | None] = []
        for name, word in (("target", self.target), ("foil", self.foil)):
            if isinstance(word, int) and not 0 <= word < size:
                raise ArgumentError(
                    f"{name} is {word}, but the model knows the words 0 to {size - 1}: pass one of them.", name
                )
            found.append(None if word is None else class_number(self.model, self.tokenizer, word, name))
        return found[0], found[1]

    def contrast(self, target: int, foil: int | None, name: Callable[[int], str]) -> str:
        """What is explained, from the numbers of the target and of the foil, and a function that names a number.

        Raises:
            ArgumentError: Both are the same.
        """
        if target == foil:
            raise ArgumentError(
                f"foil is {self.foil!r}, which is what is explained: all scores would be 0. Pass another foil, or "
                "another target=.",
                "foil",
            )
        return name(target) if foil is None else f"{name(target)} rather than {name(foil)}"


def questions(task: str, asked: Asked) -> tuple[Predictions, list[Question]]:
    """What the model predicts, and the rows that explain it, with their numbers."""
    predictions, rows = _questions(task, asked)
    output = SimpleNamespace(**{name: one[None] for name, one in asked.numbers.items()})
    return predictions, [
        replace(row, value=row.reader(row.token)(output).item()) if row.field and row.read is None else row
        for row in rows
    ]


def _questions(task: str, asked: Asked) -> tuple[Predictions, list[Question]]:
    if task in (SEQUENCE, IMAGE, AUDIO):
        return _sequence(asked)
    if task == TOKENS:
        return _tokens(asked)
    if task == ANSWER:
        return _answer(asked)
    if task == SPEECH:
        return _speech(asked)
    if task in (MASKED, CAUSAL):
        return _words(asked)
    if asked.target is not None or asked.foil is not None:
        raise ArgumentError(
            f"target names a label or a word, but {type(asked.model).__name__} has no head that predicts one. Leave it "
            "out, or pass a model with a head.",
            "target",
        )
    return [], [Question(asked.labels[asked.token], asked.token, "")]


def _sequence(asked: Asked) -> tuple[Predictions, list[Question]]:
    """The predicted label, or the target's."""
    logits = asked.numbers["logits"]
    numbers = _probabilities(logits, asked.model.config)
    order = numbers.argsort(descending=True, stable=True)[:SHOWN].tolist()
    predictions = [(asked.label(number), numbers[number].item()) for number in order]
    target, foil = asked.classes()
    target = order[0] if target is None else target
    name = asked.contrast(target, foil, asked.label)
    return predictions, [Question(name, asked.token, entry=target, foil=foil, of_token=False)]


def _probabilities(logits: Tensor, config: Any) -> Tensor:
    """Probabilities of labels. A regression has no probabilities: its numbers stay."""
    kind = getattr(config, "problem_type", None)
    if kind == "regression" or (kind is None and len(logits) == 1):
        return logits
    return logits.sigmoid() if kind == "multi_label_classification" else logits.softmax(-1)


def _tokens(asked: Asked) -> tuple[Predictions, list[Question]]:
    """One row for each labelled word, the label of its first token. For every word if asked, or if none is labelled."""
    logits = asked.numbers["logits"]
    probabilities = logits.softmax(-1)
    firsts = [i for i, word in enumerate(asked.words) if not asked.special[i] and word not in asked.words[:i]]
    best = logits.argmax(-1).tolist()
    labelled = [] if asked.every_word else [i for i in firsts if asked.label(best[i]) != "O"]
    chosen = [asked.token] if asked.chosen else labelled or firsts
    target, foil = asked.classes()
    rows, predictions = [], []
    for place in chosen:
        word, number = asked.word_texts[asked.words[place]], best[place] if target is None else target
        predictions.append((f"{word}: {asked.label(best[place])}", probabilities[place, best[place]].item()))
        name = asked.contrast(number, foil, asked.label)
        rows.append(Question(f"{word}: {name}", place, entry=number, foil=foil))
    return predictions, rows


def _answer(asked: Asked) -> tuple[Predictions, list[Question]]:
    """The first and the last token of the answer."""
    start, end = asked.numbers["start_logits"], asked.numbers["end_logits"]
    allowed = [i for i, of_second in enumerate(asked.second) if of_second and not asked.special[i]]
    if asked.foil is not None:
        raise ArgumentError("foil has no meaning for an answer: leave it out.", "foil")
    if not allowed:
        raise ArgumentError(
            "the second text has no token that an answer could begin with: pass a text that is not empty."
        )
    if asked.target is None:
        spans = [(i, j) for i in allowed for j in allowed if i <= j < i + LONGEST_ANSWER]
        first, last = max(spans, key=lambda span: (start[span[0]] + end[span[1]]).item())
    else:
        first, last = _span(asked, str(asked.target), allowed)
    probability = start[allowed].softmax(0)[allowed.index(first)] * end[allowed].softmax(0)[allowed.index(last)]
    text = _text_of(asked, first, last)
    rows = [
        Question(f"start: {asked.labels[first]}", first, "start_logits"),
        Question(f"end: {asked.labels[last]}", last, "end_logits"),
    ]
    if asked.chosen:  # for methods with maps
        rows = [Question(asked.labels[asked.token], asked.token, "start_logits")]
    return [(text, probability.item())], rows


def _text_of(asked: Asked, first: int, last: int) -> str:
    """The text of some tokens. With the token before them, a part of a word has no mark such as "##"."""
    start = max(first - 1, 0)
    before, text = (str(asked.tokenizer.decode(list(asked.ids[start:stop]))) for stop in (first, last + 1))
    if not text.startswith(before):
        text, before = str(asked.tokenizer.decode(list(asked.ids[first : last + 1]))), ""
    return text[len(before) :].strip()


def _span(asked: Asked, answer: str, allowed: Sequence[int]) -> tuple[int, int]:
    """The tokens of an answer that the user names."""

    def plain(text: str) -> str:
        return "".join(text.split()).casefold()

    for first in allowed:
        for last in (one for one in allowed if first <= one < first + LONGEST_ANSWER):
            if plain(_text_of(asked, first, last)) == plain(answer):
                return first, last
    raise ArgumentError(f"target is {answer!r}, which is no part of the second text: pass a part of it.", "target")


def _words(asked: Asked) -> tuple[Predictions, list[Question]]:
    """The word at a mask, or the next word of a causal model."""
    logits = asked.numbers["logits"][asked.token]
    predictions: Predictions = []
    if asked.is_mask or predicts_next(asked.model):
        likeliest = logits.softmax(-1).topk(3)
        predictions = list(zip(map(asked.word, likeliest.indices.tolist()), likeliest.values.tolist(), strict=True))
    target, foil = asked.vocabulary(len(logits))
    target = int(logits.argmax()) if target is None else target
    name = asked.contrast(target, foil, asked.word)
    return predictions, [Question(name, asked.token, entry=target, foil=foil)]


def _speech(asked: Asked) -> tuple[Predictions, list[Question]]:
    """One row for each letter that a CTC model writes, or for the target: its first frame."""
    logits = asked.numbers["logits"]
    best, probabilities = logits.argmax(-1).tolist(), logits.softmax(-1)
    blank = getattr(asked.model.config, "pad_token_id", 0)
    starts = [i for i, one in enumerate(best) if one != blank and (i == 0 or best[i - 1] != one)]
    chosen = [asked.token] if asked.chosen else starts or [0]
    letter = str if asked.tokenizer is None else asked.tokenizer.convert_ids_to_tokens
    names = {number: str(letter(number)) for number in range(logits.shape[-1])}
    target, foil = (
        None if wanted is None else label_number(wanted, names, name)
        for name, wanted in (("target", asked.target), ("foil", asked.foil))
    )
    rows = []
    for i in chosen:
        entry = best[i] if target is None else target
        rows.append(Question(f"frame {i}: {asked.contrast(entry, foil, names.__getitem__)}", i, entry=entry, foil=foil))
    return [(names[best[i]], probabilities[i, best[i]].item()) for i in starts], rows
