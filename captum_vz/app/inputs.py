"""What a user asks about an input, and how it is read: its tokens, what they are, and windows of a long text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import pool_groups
from captum_vz.methods import DECIDING, DEEP, MAPS, Method
from captum_vz.result import TokenText
from captum_vz.result.explanation import Predictions
from captum_vz.subjects import Subject, heads
from captum_vz.subjects.signals import read_input
from captum_vz.subjects.texts import encode, find_token, prepare_text, second_text, warn_of_text

#: The methods that explain a label, and the part of a layer in it.
EFFECT, EFFECT_OF_LAYER = "value-zeroing-effect", "value-zeroing-effect-layer"
#: Tasks whose rows explain the state of a token, unless the user chooses a method, a target or a foil.
BY_MAPS: Final = (heads.MASKED, heads.CAUSAL, heads.SEQ2SEQ, heads.ENCODER)
#: Tasks whose prediction is of the whole input, so that no token chooses what is predicted.
OF_WHOLE: Final = (heads.SEQUENCE, heads.CHOICE, heads.ANSWER, heads.IMAGE, heads.AUDIO, heads.SENTENCE)
EVERY_WORD = "*"  #: what a user passes as `token` for a row of each word
GROUPS: Final = (False, True, "words", "clauses", "sentences")  #: what a user passes as `words`
#: What is wrong with a model that reads more tokens than the text has.
ADDED = "it adds its own, as prompt tuning does. Use the classes, such as ValueZeroing, whose rows count them."
FIELDS = ("logits", "start_logits", "end_logits")  #: the tensors of an output that tasks read
OVERLAP = 4  #: the part of a window that the next window repeats, if the user does not say


@dataclass(frozen=True)
class Wish:
    """What a user asks for, except the model and the text. See :func:`captum_vz.explain` for the meaning of each."""

    method: Any = None
    target: int | str | None = None
    foil: int | str | None = None
    token: int | str | None = None
    layer: int | str | None = None
    words: bool | str = False
    window: Any = None

    def __post_init__(self) -> None:
        """Check the types."""
        if self.words not in GROUPS:
            raise ArgumentError(f"words is {self.words!r}: pass True for words, or 'clauses' or 'sentences'.", "words")
        for name in ("target", "foil", "token", "layer"):
            value, number = getattr(self, name), name == "layer"
            fits = isinstance(value, Integral if number else (Integral, str)) and not isinstance(value, bool)
            if value is not None and not fits and not (number and value == DECIDING):
                raise ArgumentError(
                    f"{name} is {value!r}, of type {type(value).__name__}: pass a whole number, "
                    f"{repr(DECIDING) if number else 'a string'} or None.",
                    name,
                )

    def asks_decision(self, subject: Subject) -> bool:
        """Whether the answer is what a next word rests on: the last of many layers mostly shows the first token."""
        is_open = self.method is None and self.window is None and self.layer in (None, DECIDING)
        return is_open and subject.task == heads.CAUSAL and subject.depth >= DEEP

    def asks_embedding(self, subject: Subject, text: Any) -> bool:
        """Whether a folder of a sentence encoder is asked about nothing but a text without a mask."""
        marks = {"[MASK]", getattr(subject.tokenizer, "mask_token", None) or "[MASK]"}
        return self == Wish(words=self.words) and isinstance(text, str) and not any(mark in text for mark in marks)

    def default_method(self, task: str) -> str:
        """The name of the method that explains a model of this task, unless the user chooses one."""
        if self.layer == DECIDING or (task in BY_MAPS and self.target is None and self.foil is None):
            return MAPS
        return EFFECT if self.layer is None else EFFECT_OF_LAYER

    def of_method(self, method: Method, task: str) -> Wish:
        """This wish for one of several methods, without what changes no score of this method."""
        idle: dict[str, Any] = dict.fromkeys(self.unused(task, method))
        return replace(self, layer=self.layer if self.has_layer(method) else None, **idle)

    def has_layer(self, method: Method) -> bool:
        """Whether this method has the layer that is asked for. A layer can decide if the method has its map alone."""
        if self.layer == DECIDING:
            return method.shows_layers
        return method.layered

    def unused(self, task: str, method: Method) -> list[str]:
        """The names of what is asked for, but changes no score of this method. A user's code may read all of it."""
        if method.is_foreign:
            return []
        decides = self.layer == DECIDING and self.has_layer(method)
        idle = [] if method.explains_output or decides else ["target", "foil"]
        idle += ["token"] if task in OF_WHOLE and method.is_signed else []
        return [name for name in idle if getattr(self, name) is not None]

    def numbers(self, number: Callable[[Any, str], int]) -> tuple[int | None, int | None]:
        """The numbers of the target and of the foil, by a function of what is asked for and its argument's name."""
        target = None if self.target is None else number(self.target, "target")
        return target, None if self.foil is None else number(self.foil, "foil")


@dataclass(frozen=True)
class Piece:
    """Some tokens of a text, which the model reads alone."""

    inputs: dict[str, Tensor]  # what the model takes, by keyword, for the only example
    places: tuple[int, ...] | None = None  # the tokens' positions in the text; None: known after the model has run
    window: tuple[int, int] = (0, 0)  # the tokens `(start, stop)` between the fixed ones, such as [CLS], of all pieces

    def local(self, place: int) -> int:
        """The position in the piece of a position in the text."""
        return place if self.places is None else self.places.index(place)


@dataclass
class Input:
    """One input as methods take it. Lists have an entry for each token. They are empty for an image or a sound."""

    subject: Subject
    pieces: list[Piece]  # the text in pieces: one, or windows
    token: int  # the position of the explained token
    names: Sequence[str] = ()  # the tokens as a person reads them; if groups are explained, the word of each token
    text: TokenText = field(default_factory=lambda: TokenText((), (), (), (), (), ()))
    second: Sequence[bool] = ()  # whether each token is of the second text
    member: Sequence[int] = ()  # the word, clause or sentence of each token, if these are explained; empty: tokens are
    given: tuple[Predictions, Any] | None = None  # predictions and target, if they do not follow from the output
    told: dict[str, None] = field(default_factory=dict)  # sentences about how the target and the foil are read

    @cached_property
    def numbers(self) -> dict[str, Tensor]:
        """The tensors that a task reads from the output, for the whole input."""
        task, model = self.subject.task, self.subject.model
        if task == heads.ENCODER:
            return {}
        with torch.no_grad():
            outputs = [self.subject.forward(**piece.inputs) for piece in self.pieces]
        each = {
            name: [getattr(output, name)[0].float() for output in outputs]
            for name in FIELDS
            if isinstance(getattr(outputs[0], name, None), Tensor)
        }
        of_tokens = task in (heads.TOKENS, heads.ANSWER, heads.MASKED, heads.CAUSAL)
        found = {name: self._joined(numbers, of_tokens) for name, numbers in each.items()}
        if "logits" in found and task in (heads.TOKENS, heads.MASKED, heads.CAUSAL):
            check_count(model, len(found["logits"]), len(self.names))
        return found

    def _joined(self, numbers: Sequence[Tensor], of_tokens: bool) -> Tensor:
        """Numbers of the whole text: each token has the numbers of its window; without an axis of tokens, the mean."""
        if len(numbers) == 1:
            return numbers[0]
        if not of_tokens:
            return torch.stack(list(numbers)).mean(0)
        owners = [owner(self.pieces, place) for place in range(len(self.names))]
        return torch.stack([numbers[k][self.pieces[k].local(place)] for place, k in enumerate(owners)])

    @cached_property
    def firsts(self) -> list[int]:
        """The first token of each group."""
        return [self.member.index(group) for group in dict.fromkeys(self.member)]

    def features(self, piece: Piece) -> Tensor | None:
        """The group of each token of a piece, if groups are explained, `(1, tokens)`."""
        if not self.member or piece.places is None:
            return None
        return torch.tensor([[self.member[place] for place in piece.places]], device=self.subject.device)

    def spread(self, piece: Piece, scores: Tensor) -> Tensor:
        """Scores `(..., in)` of a window for all tokens of the text, 0 outside. A group has the score of its part."""
        places = list(piece.places or ())
        whole = scores.new_zeros(*scores.shape[:-1], len(self.names))
        whole[..., places] = scores[..., : len(places)]
        if not self.member:
            return whole
        first = {self.member[place]: place for place in reversed(places)}
        return whole[..., [first.get(group, place) for place, group in enumerate(self.member)]]

    def pooled(self, one: Tensor) -> Tensor:
        """A map of tokens as a map of groups, if groups are explained."""
        if not self.member:
            return one
        return pool_groups(one[None], torch.tensor([self.member], device=one.device))[0]

    def about(self) -> dict[str, Any]:
        """The tokens of an explanation, or its groups if they are explained, and what each of them is."""
        if not self.names:
            return {}
        words, raw = self.text.words, self.subject.tokenizer.convert_ids_to_tokens(list(self.text.ids))
        windows = [piece.window for piece in self.pieces] if len(self.pieces) > 1 else []
        groups: Sequence[int] = self.member or range(len(words))
        shown = self.text.grouped(self.member, None) if self.member else self.text
        joined_raw = dict.fromkeys(groups, "")
        for one, group in zip(raw, groups, strict=True):
            joined_raw[group] += str(one)
        return {
            "tokens": list(shown.labels if self.member else self.names),
            "words": list(shown.words),
            "special": list(shown.special),
            "raw_tokens": list(joined_raw.values()),
            "windows": [(groups[start], groups[stop - 1] + 1) for start, stop in windows],
        }


def check_count(model: Any, count: int, known: int) -> None:
    """Refuse a model that reads more tokens than the text has."""
    if count != known:
        raise UnsupportedLayerError(f"{type(model).__name__} reads {count} tokens, but the text has {known}: {ADDED}")


def check_texts(text: Any, pair: Any) -> None:
    """Refuse an object that is no text. Several answers are a list of texts."""
    if not isinstance(text, (str, Mapping)):
        raise ArgumentError(f"the text is of type {type(text).__name__}: pass a string.", "text")
    answers = pair if isinstance(pair, Sequence) and not isinstance(pair, (str, bytes)) else [pair]
    for one in answers:
        if one is not None and not isinstance(one, str):
            raise ArgumentError(f"text_pair has an object of type {type(one).__name__}: pass a string.", "text_pair")


def read_text(subject: Subject, text: Any, pair: str | None, wish: Wish) -> Input:
    """A text, or two. Warnings name what a user may not have meant."""
    tokenizer, token = subject.tokenizer, wish.token
    encoding = encode(tokenizer, text, pair) if isinstance(text, str) else text
    count = encoding["input_ids"].shape[-1] if isinstance(encoding, Mapping) and "input_ids" in encoding else 0
    # First, because everything else takes longer for a longer text.
    size, overlap = window_size(wish.window, heads.max_tokens(subject.model, tokenizer), count)
    prepared = prepare_text(subject.model, tokenizer, encoding, None, any_length=True)
    (offsets,) = [one.offsets for one in getattr(encoding, "encodings", None) or ()] or [()]
    read = TokenText.of(tokenizer, prepared.inputs["input_ids"][0].tolist(), offsets=offsets)
    if token is not None and (subject.task, token) != (heads.TOKENS, EVERY_WORD):
        if isinstance(token, str) and token not in read.labels and read.word_texts.count(token) == 1:
            token = read.words.index(read.word_texts.index(token))  # a word of several tokens: its first one
        prepared = replace(prepared, token=find_token(token, prepared.tokens))
    told = token if subject.task in BY_MAPS else prepared.token
    warn_of_text(text if isinstance(text, str) else "", subject, prepared, told, stacklevel=6)
    second = second_text(tokenizer, encoding, pair)
    free = [place for place, alone in enumerate(read.special) if not alone] or [0]
    start, stop = second.index(True) if any(second) else free[0], free[-1] + 1
    fixed = [not start <= place < stop for place in range(len(read.ids))]
    pieces = cut(prepared.inputs, fixed, size, overlap)
    names = [read.word_texts[word] for word in read.words] if wish.words else list(prepared.tokens)
    # The row of a token is not that of its sentence. All tokens can draw on the first token of a causal model.
    apart = [prepared.token, *[0] * (subject.task == heads.CAUSAL)] if subject.task in BY_MAPS else []
    member = read.groups("words" if wish.words is True else wish.words, apart)[0] if wish.words else []
    return Input(subject, pieces, prepared.token, names, read, second, member)


def read_signal(subject: Subject, given: Any, pair: Any, wish: Wish) -> Input:
    """An image or a sound."""
    if pair is not None or wish.words or wish.window:
        raise ArgumentError(f"{type(subject.model).__name__} takes one input: leave text_pair=, words=, window= out.")
    if wish.token is not None and not re.fullmatch(r"-?\d+", str(wish.token)):
        raise ArgumentError(f"token is {wish.token!r}: pass the position of a patch or a frame.", "token")
    read = Input(subject, [Piece(read_input(subject, given))], int(wish.token or 0))
    try:
        numbers = read.numbers
    except RuntimeError as error:  # a sound may be too short for the model's convolutions
        shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in read.pieces[0].inputs.items())
        raise ArgumentError(
            f"{type(subject.model).__name__} does not run on {shapes} ({str(error).partition(chr(10))[0]}): pass a "
            f"{'larger image' if subject.task == heads.IMAGE else 'longer sound'}."
        ) from error
    if subject.task == heads.SPEECH:
        read.token = find_token(read.token, [""] * len(numbers["logits"]))
    return read


def owner(pieces: Sequence[Piece], place: int) -> int:
    """The number of the piece in which a token has the most context: it is the farthest from an edge of a window.

    A window at an end of the text has its edge only inside. Tokens before all windows, such as [CLS], belong to the
    first piece, and tokens after all windows to the last.
    """
    first, last = pieces[0].window[0], pieces[-1].window[1]
    if len(pieces) == 1 or place < first:
        return 0
    if place >= last:
        return len(pieces) - 1

    def context(number: int) -> int:
        start, stop = pieces[number].window
        before = place - start if start > first else last
        after = stop - 1 - place if stop < last else last
        return min(before, after) if start <= place < stop else -1

    return max(range(len(pieces)), key=context)


def cut(inputs: Mapping[str, Tensor], fixed: Sequence[bool], size: int | None, overlap: int | None) -> list[Piece]:
    """Cut a text into windows of at most `size` tokens, of which two neighbours share `overlap`; None: a quarter.

    `fixed` tokens are in each window: special tokens at the ends, and a question before its text. Without a size, the
    text stays whole.

    >>> found = cut({"input_ids": torch.arange(8)[None]}, [True] + 6 * [False] + [True], 5, 1)
    >>> [piece.places for piece in found], owner(found, 3), owner(found, 4)
    ([(0, 1, 2, 3, 7), (0, 3, 4, 5, 7), (0, 5, 6, 7)], 0, 1)
    """
    count = len(fixed)
    free = [place for place, stays in enumerate(fixed) if not stays]
    if size is None or count <= size or not free:
        return [Piece(dict(inputs), tuple(range(count)), (0, count))]
    start, stop = free[0], free[-1] + 1
    room = size - (count - (stop - start))
    shared = max(room // OVERLAP, 0) if overlap is None else overlap
    if room < 1 or not 0 <= shared < room:
        less = f"an overlap from 0 to {room - 1}" if room > 0 else "a shorter question"
        raise ArgumentError(
            f"window is {(size, shared)}, but each window has {size - room} fixed tokens, such as [CLS] or a question, "
            f"and room for {max(room, 0)} others: pass a larger window, or {less}.",
            "window",
        )
    pieces: list[Piece] = []
    while not pieces or pieces[-1].window[1] < stop:
        first = start + len(pieces) * (room - shared)
        last = min(first + room, stop)
        places = (*range(start), *range(first, last), *range(stop, count))
        own = {
            name: one[:, list(places)] if one.dim() > 1 and one.shape[1] == count else one
            for name, one in inputs.items()
        }
        pieces.append(Piece(own, places, (first, last)))
    return pieces


def window_size(window: Any, most: int | None, count: int) -> tuple[int | None, int | None]:
    """The size of a window and its overlap; None for a text of `count` tokens that stays whole.

    The user passes True, a size, or (size, overlap). The model takes at most `most` tokens; None: any number.
    """
    if window is None or window is False:
        if most is not None and count > most:
            raise ArgumentError(
                f"the text is {count} tokens long, but the model takes at most {most}: pass window= to read it "
                "in windows that overlap. No row then looks outside its window."
            )
        return None, None
    pair = tuple(window) if isinstance(window, (list, tuple)) else (window,)
    size, overlap = (*pair, None, None)[:2]
    if len(pair) not in (1, 2) or not all(isinstance(one, int) for one in pair) or isinstance(overlap, bool):
        raise ArgumentError(f"window is {window!r}: pass True, a number of tokens, or (tokens, overlap).", "window")
    size = most if size is True else size
    if size is None:
        raise ArgumentError("window is True, but the model takes texts of any length: pass a number.", "window")
    if most is not None and size > most:
        raise ArgumentError(
            f"window is {size}, but the model takes at most {most} tokens: pass at most {most}.", "window"
        )
    return size, overlap
