"""How an input is read: its tokens, what each of them is, what the model says about it, and which rows explain it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from captum_vz.app.computing import Computing, position
from captum_vz.app.tasks import Asked, Question, questions
from captum_vz.app.windows import Cut, Piece, cut, fixed_tokens, window_size
from captum_vz.app.windows import joined as joined_numbers
from captum_vz.app.wish import BY_MAPS, Wish, check_texts
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.methods import Method
from captum_vz.result import Explanation, Part, TokenText
from captum_vz.result.explanation import Predictions
from captum_vz.subjects import Subject
from captum_vz.subjects.heads import (
    ANSWER,
    CAUSAL,
    CHOICE,
    ENCODER,
    MASKED,
    SENTENCE,
    SPEECH,
    TOKENS,
    label_number,
    max_tokens,
)
from captum_vz.subjects.signals import check_runs, read_input, source_names
from captum_vz.subjects.texts import PreparedText, content_specials, encode, prepare_text, remarks, second_text

#: What a user passes as `token` for a row of each word.
EVERY_WORD = "*"
#: What is wrong with a model that reads more tokens than the text has.
ADDED = "it adds its own, as prompt tuning does. Use the classes, such as ValueZeroing, whose rows count them."
#: The tensors of an output that tasks read.
FIELDS = ("logits", "start_logits", "end_logits")


@dataclass
class Reading:
    """A text as a model reads it, for all methods that explain it.

    Attributes:
        subject: The model.
        ids: The ids of the tokens.
        read: The tokens, and the words that they form.
        prepared: The inputs, and the explained token.
        pieces: The text in pieces: one, or windows.
        special: Whether each token begins, ends or pads texts.
        second: Whether each token is of the second text.
        every_word: Whether each word has a row, also those that the model does not label.
        by_words: Whether the tokens of a word are explained together.
    """

    subject: Subject
    ids: list[int]
    read: TokenText
    prepared: PreparedText
    pieces: Cut
    special: list[bool]
    second: list[bool]
    every_word: bool
    by_words: bool

    @classmethod
    def of(cls, subject: Subject, text: str | Mapping[str, Any], pair: str | None, wish: Wish) -> Reading:
        """Read a text, or what the tokenizer returned for one. Warnings name what a user may not have meant.

        Raises:
            ArgumentError: The text is empty or too long, or there is no such token.
        """
        tokenizer = subject.tokenizer
        encoding = encode(tokenizer, text, pair) if isinstance(text, str) else text
        every_word = subject.task == TOKENS and wish.token == EVERY_WORD
        token = None if every_word else wish.token
        count = encoding["input_ids"].shape[-1] if isinstance(encoding, Mapping) and "input_ids" in encoding else 0
        # First, because everything else takes longer for a longer text.
        size, overlap = window_size(wish.window, max_tokens(subject.model, tokenizer), count)
        prepared = prepare_text(subject.model, tokenizer, encoding, None, any_length=True)
        ids = prepared.inputs["input_ids"][0].tolist()
        read = TokenText.of(tokenizer, ids)
        if isinstance(token, str) and token not in read.labels and read.word_texts.count(token) == 1:
            token = read.words.index(read.word_texts.index(token))  # a word of several tokens: its first one
        if token is not None:
            prepared = prepare_text(subject.model, tokenizer, encoding, token, any_length=True)
        told = token if subject.task in BY_MAPS else prepared.token
        shown = text if isinstance(text, str) else ""
        for remark in remarks(shown, subject, prepared, None if told is None else str(told)):
            warnings.warn(remark, stacklevel=5)
        content = content_specials(tokenizer).values()
        special = [mark and number not in content for number, mark in zip(ids, read.special, strict=True)]
        second = second_text(tokenizer, encoding, pair)
        pieces = cut(prepared.inputs, fixed_tokens(special, second), size, overlap)
        return cls(subject, ids, read, prepared, pieces, special, second, every_word, wish.words)

    @property
    def names(self) -> list[str]:
        """The name of each token: as a person reads it, or its word."""
        if self.by_words:
            return [self.read.word_texts[word] for word in self.read.words]
        return list(self.prepared.tokens)

    @cached_property
    def numbers(self) -> dict[str, Tensor]:
        """The tensors that a task reads from the output, for the whole text."""
        return numbers_of(self.subject, self.pieces, len(self.ids))

    def asked(self, wish: Wish) -> Asked:
        """What is known about the text when rows are chosen."""
        kind, logits = type(self.subject.model).__name__, self.numbers.get("logits")
        if logits is not None and self.subject.task in (TOKENS, MASKED, CAUSAL) and len(logits) != len(self.ids):
            raise UnsupportedLayerError(f"{kind} reads {len(logits)} tokens, but the text has {len(self.ids)}: {ADDED}")
        return Asked(
            self.subject.model,
            self.subject.tokenizer,
            self.numbers,
            self.ids,
            self.names,
            self.read.words,
            self.read.word_texts,
            self.special,
            self.second,
            self.prepared.token,
            wish.token is not None and not self.every_word,
            self.prepared.is_mask,
            wish.target,
            wish.foil,
            self.every_word,
        )


@torch.no_grad()
def numbers_of(subject: Subject, text: Cut, count: int) -> dict[str, Tensor]:
    """The tensors that a task reads from the output, for the whole text."""
    if subject.task == ENCODER:
        return {}
    outputs = [subject.forward(**piece.inputs) for piece in text.pieces]
    numbers = [
        {name: one[0].float() for name in FIELDS if isinstance(one := getattr(output, name, None), Tensor)}
        for output in outputs
    ]
    return joined_numbers(numbers, text, count, subject.task in (TOKENS, ANSWER, MASKED, CAUSAL))


@dataclass
class Input:
    """One input as methods take it.

    Attributes:
        computing: Runs methods.
        ask: Says what the model predicts, and which rows explain a wish.
        names: The names of its tokens, for rows of tokens.
        tokens: The tokens that are shown.
        words: The word of each token; empty: the input is no text.
        special: Whether each token begins, ends or pads texts.
        raw: The tokens as the vocabulary writes them.
        windows: The tokens that were read together, if the text was cut.
    """

    computing: Computing
    ask: Callable[[Wish], tuple[Predictions, list[Question]]]
    names: list[str]
    tokens: list[str]
    words: list[int]
    special: list[bool]
    raw: list[str]
    windows: list[tuple[int, int]]

    def part(self, name: str, method: Method, wish: Wish, rows: list[Question]) -> Part:
        """What a method computes for rows."""
        subject = self.computing.subject
        if not self.names and method.maps is not None and not method.explains_output:
            count = len(method.layer_maps(subject, self.computing.read[0].question)[0][0])
            rows = [replace(one, token=position(one.token, count)) for one in rows]
        part = self.computing.part(name, method, -1 if wish.layer is None else wish.layer, rows)
        sources, known = part.scores.shape[-1], len(self.tokens)
        if known and sources != known:
            kind = type(subject.model).__name__
            raise UnsupportedLayerError(f"{kind} reads {sources} tokens, but the text has {known}: {ADDED}")
        if not known:  # an image or a sound: only now the number of sources is known
            self.tokens = source_names(subject, sources, self.computing.text.pieces[0].inputs)
            self.special, self.raw, self.words = [False] * sources, self.tokens, list(range(sources))
        if not method.explains_output:  # the row is that of a token
            names = self.names or self.tokens
            part.rows = [replace(row, name=self.tokens[row.token or 0]) for row in part.rows] if names else part.rows
        return part

    def explanation(self, parts: dict[str, Part], predictions: Predictions) -> Explanation:
        """The parts with what is known about the input."""
        task = self.computing.subject.task
        return Explanation(self.tokens, parts, task, predictions, self.words, self.special, self.raw, self.windows)


def read_input_of(subject: Subject, text: Any, pair: Any, wish: Wish) -> Input:
    """The input of any task."""
    kind = type(subject.model).__name__
    if not subject.reads_text:
        return _signal(subject, text, pair, wish)
    check_texts(text, pair)
    if subject.task == CHOICE:
        return _choice(subject, text, pair, wish)
    if not isinstance(pair, (str, type(None))):
        raise ArgumentError(
            f"text_pair is {len(pair)} texts, but {kind} reads one second text: pass a string.", "text_pair"
        )
    if subject.task == ANSWER and pair is None:
        raise ArgumentError(f"{kind} answers a question from a text: pass the text as text_pair=.")
    if subject.task == ENCODER and pair is not None:
        told = f"{kind} has no head: both texts are read as one input. Pass a SentenceTransformer for a similarity."
        warnings.warn(told, stacklevel=4)
    if subject.task == SENTENCE:
        return _sentences(subject, text, pair, wish)
    return _text(subject, text, pair, wish)


def _text(
    subject: Subject, text: Any, pair: str | None, wish: Wish, given: tuple[Predictions, Question] | None = None
) -> Input:
    """A text, or two. `given` are the predictions and the question, if they do not follow from the output."""
    read = Reading.of(subject, text, pair, wish)

    def ask(own: Wish) -> tuple[Predictions, list[Question]]:
        if given is None:
            return questions(subject.task, read.asked(own))
        return given[0], [replace(given[1], token=read.prepared.token)]

    words = read.read.words
    raw = [str(one) for one in subject.tokenizer.convert_ids_to_tokens(read.ids)]
    windows = read.pieces.windows if len(read.pieces.pieces) > 1 else []
    computing = Computing(subject, read.pieces, words if wish.words else None)
    if not wish.words:
        tokens = list(read.prepared.tokens)
        return Input(computing, ask, tokens, tokens, list(words), read.special, raw, windows)
    texts = list(read.read.word_texts)
    firsts = [words.index(word) for word in range(len(texts))]
    raw = ["".join(one for one, word in zip(raw, words, strict=True) if word == k) for k in range(len(texts))]
    windows = [(words[start], words[stop - 1] + 1) for start, stop in windows]
    special = [read.special[place] for place in firsts]
    return Input(computing, ask, texts, texts, list(range(len(texts))), special, raw, windows)


def _choice(subject: Subject, text: str, answers: Any, wish: Wish) -> Input:
    """The chosen answer of several. Each answer has a logit of its own, from the text and this answer alone."""
    if isinstance(answers, str) or not isinstance(answers, Sequence) or len(answers) < 2:
        raise ArgumentError(
            f"{type(subject.model).__name__} chooses among answers: pass two or more as text_pair=, a list."
        )
    if wish.foil is not None or wish.window:
        raise ArgumentError("each answer is read alone, with the whole text: leave foil= and window= out.")
    alone = replace(subject, forward=_OneChoice(subject.model))
    with torch.no_grad():
        logits = [alone.forward(**_whole(subject, text, answer))[0, 0] for answer in answers]
    shares = torch.stack(logits).float().softmax(0)
    order = shares.argsort(descending=True, stable=True).tolist()
    predictions = [(str(answers[place]), shares[place].item()) for place in order]
    chosen = order[0]
    if wish.target is not None:
        chosen = label_number(wish.target, dict(enumerate(answers)), "target")
    question = Question(str(answers[chosen]), 0, read=_first_column, of_token=False, value=logits[chosen].item())
    return _text(alone, text, answers[chosen], wish, (predictions, question))


def _whole(subject: Subject, text: Any, pair: str | None = None) -> dict[str, Tensor]:
    """The inputs of a text that is not read in windows."""
    made = encode(subject.tokenizer, text, pair) if isinstance(text, str) else text
    count, most = made["input_ids"].shape[1], max_tokens(subject.model, subject.tokenizer)
    if most is not None and count > most:
        raise ArgumentError(
            f"the text is {count} tokens long, but the model takes at most {most}, and cannot read it in windows: pass "
            "a shorter text."
        )
    return {name: one.to(subject.device) for name, one in made.items() if isinstance(one, Tensor)}


class _OneChoice:
    """The logit of one answer, `(batch, 1)`, from inputs `(batch, tokens)`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Tensor) -> Tensor:
        found: Tensor = self.model(**{name: one[:, None] for name, one in inputs.items()}).logits
        return found


def _first_column(output: Tensor) -> Tensor:
    return output[:, 0]


def _sentences(subject: Subject, text: Any, other: str | None, wish: Wish) -> Input:
    """The cosine similarity of two embeddings, or of an embedding with itself before values are zeroed."""
    if wish.target is not None or wish.foil is not None or wish.window:
        raise ArgumentError(
            "an encoder of sentences has one embedding and no labels: leave target=, foil= and window= out."
        )

    def embedding(sentence: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = subject.forward(**_whole(subject, sentence))
        return found

    reference = embedding(text if other is None else other)
    predictions: Predictions = []
    value = None
    if other is not None:
        value = cosine_similarity(embedding(text), reference).item()
        predictions = [("cosine similarity", value)]
    name = "the embedding" if other is None else f"similarity to {other}"

    def read(output: Tensor) -> Tensor:
        return cosine_similarity(output, reference)

    question = Question(name, 0, read=read, of_token=False, value=value)
    return _text(subject, text, None, wish, (predictions, question))


def _signal(subject: Subject, given: Any, pair: Any, wish: Wish) -> Input:
    """An image or a sound."""
    if pair is not None or wish.words or wish.window:
        raise ArgumentError(f"{type(subject.model).__name__} takes one input: leave text_pair=, words=, window= out.")
    piece = Piece(None, read_input(subject, given))
    check_runs(subject, piece.inputs)
    pieces = Cut([piece], [(0, 0)])
    numbers = numbers_of(subject, pieces, 0)
    count = len(next(iter(numbers.values()))) if subject.task == SPEECH else 1
    token = wish.token
    if token is not None and not re.fullmatch(r"-?\d+", str(token)):
        raise ArgumentError(f"token is {token!r}: pass the position of a patch or a frame.", "token")
    place = 0 if token is None else int(token)
    if subject.task == SPEECH:
        place = position(place, count)
    labels = [str(i) for i in range(count)]

    def ask(own: Wish) -> tuple[Predictions, list[Question]]:
        chosen = own.token is not None
        of_tokens: dict[str, Any] = dict.fromkeys(("ids", "words", "word_texts", "special", "second"), ())
        of_wish: dict[str, Any] = {"chosen": chosen, "is_mask": False, "target": own.target, "foil": own.foil}
        about: dict[str, Any] = {"numbers": numbers, "labels": labels, "token": place} | of_tokens | of_wish
        return questions(subject.task, Asked(subject.model, subject.tokenizer, **about))

    return Input(Computing(subject, pieces), ask, [], [], [], [], [], [])
