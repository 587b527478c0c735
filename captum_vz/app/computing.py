"""The rows of one method for the questions that a model's output asks, of a text that may be read in windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_vz import ValueZeroing
from captum_vz.app.tasks import Question
from captum_vz.app.windows import Cut, Piece
from captum_vz.errors import ArgumentError
from captum_vz.functional import pool_groups
from captum_vz.methods import Method, rollout_of, shares
from captum_vz.methods import Question as Asked
from captum_vz.methods.maps import LayerMethod
from captum_vz.methods.method import WrongScoresError
from captum_vz.result import Maps, Part, Row
from captum_vz.subjects import Subject


@dataclass
class Computing:
    """Runs methods on one input. Methods that need the same maps share them.

    Attributes:
        subject: The model.
        text: The input in pieces.
        words: The word of each token, if the tokens of a word are explained together.
    """

    subject: Subject
    text: Cut
    words: Sequence[int] | None = None
    read: list[_Read] = field(init=False)

    def __post_init__(self) -> None:
        """Prepare each piece for methods."""
        self.read = []
        for piece in self.text.pieces:
            features = None
            if self.words is not None and piece.places is not None:
                numbers = [[self.words[place] for place in piece.places]]
                features = torch.tensor(numbers, device=self.subject.device)
            self.read.append(_Read(piece, Asked(piece.inputs, 0), features))

    @property
    def is_whole(self) -> bool:
        """Whether the input is read at once."""
        return len(self.read) == 1

    def part(self, name: str, method: Method, layer: int, questions: Sequence[Question]) -> Part:
        """What one method computes for some questions.

        Args:
            name: Its name.
            method: The method, for this model.
            layer: The layer that is shown; negative counts from the end.
            questions: What is explained.
        """
        rows, raw = list[Row](), list[Tensor]()
        alone = layer if method.layered and method.maps is None else None  # others have all layers at once
        for question in questions:
            of_all = not question.of_token and not self.is_whole
            places = range(len(self.read)) if of_all else [self.text.owner(question.token)]
            found = []
            for one in (self.read[number] for number in places):
                try:
                    scores = method.scores(self.subject, one.about(question), one.features, layer=alone)
                except WrongScoresError as error:
                    raise ArgumentError(f"method {name!r}: {error}") from error
                found.append(scores if self.is_whole else one.piece.spread(scores, self.count))
            token = question.token if question.of_token or not method.explains_output else None
            windows: list[Any] = [None] if self.is_whole else [self.text.windows[number] for number in places]
            if of_all and method.explains_output:
                found, windows = [torch.stack(found).sum(0) / len(found)], [None]
            for scores, window in zip(found, windows, strict=True):
                shown = scores[layer if method.layered and alone is None else 0]
                rows.append(Row(question.name, token, shown, window, question.value))
                raw.append(scores)
        scores = torch.stack(raw)
        if scores.isinf().any():
            raise ArgumentError(f"method {name!r} returned infinite numbers; expected finite ones, or NaN.")
        depth = scores.shape[1] if method.layered and alone is None else self.subject.depth
        names = (method.scope(layer % depth),) if alone is not None else method.layer_names(scores.shape[1])
        if self.words is not None:
            rows, scores = self._of_words(rows), scores[..., self._firsts]
        if not method.is_signed:
            rows = [replace(row, scores=shares(row.scores)) for row in rows]
        make = partial(self.maps, method, layer if method.layered else -1)
        return Part(name, method, rows, scores, names, layer % depth if method.layered else None, depth, make)

    def maps(self, method: Method, layer: int) -> Maps:
        """The maps behind the rows of a method."""
        if method.maps is None:
            return Maps()
        if not self.is_whole:
            return Maps([self._pooled(self._joined_map(method, layer))])
        first = self.subject, self.read[0].question, self.read[0].features
        layers = [self._pooled(one[0]) for one in method.layer_maps(*first)]
        joining = rollout_of(method)
        rollout = None if joining is None or not layers else self._pooled(joining.whole_maps(*first)[-1][0])
        lengths = LayerMethod("distances", partial(ValueZeroing, normalize=False))
        found = lengths.layer_maps(*first) if method.maps is ValueZeroing else []
        return Maps(layers, rollout, [self._pooled(one[0]) for one in found])

    @property
    def count(self) -> int:
        """The number of tokens of a text in windows."""
        places = self.text.pieces[-1].places or ()
        return self.text.windows[-1][1] + sum(place >= self.text.windows[-1][1] for place in places)

    @property
    def _firsts(self) -> list[int]:
        words = list(self.words or ())
        return [words.index(word) for word in range(max(words) + 1)]

    def _of_words(self, rows: Sequence[Row]) -> list[Row]:
        """The scores of words. All tokens of a word have its score."""
        words = self.words or ()
        return [
            replace(row, token=None if row.token is None else words[row.token], scores=row.scores[self._firsts])
            for row in rows
        ]

    def _pooled(self, one: Tensor) -> Tensor:
        """A map of words, if words are explained."""
        if self.words is None:
            return one
        return pool_groups(one[None], torch.tensor([self.words], device=one.device))[0]

    def _joined_map(self, method: Method, layer: int) -> Tensor:
        """The map of the whole text, each row from the window in which its token has the most context."""
        maps = [method.whole_maps(self.subject, one.question, one.features)[layer][0] for one in self.read]
        whole = maps[0].new_zeros(self.count, self.count)
        for place in range(self.count):
            number = self.text.owner(place)
            piece = self.read[number].piece
            whole[place] = piece.spread(maps[number][piece.local(place)], self.count)
        return whole


@dataclass(frozen=True)
class _Read:
    """A piece of the text as a method takes it: its inputs, and the words of its tokens."""

    piece: Piece
    question: Asked
    features: Tensor | None

    def about(self, question: Question) -> Asked:
        """What is asked about this piece. A label of the whole text is read at each piece's own last token."""
        places = self.piece.places
        missing = places is not None and question.token not in places
        place = len(places) - 1 if missing and places is not None else self.piece.local(question.token)
        target: Any = None
        foil = None
        if question.is_logit:
            target = [question.index(place, question.entry)]
            foil = None if question.foil is None else [question.index(place, question.foil)]
        elif question.field:
            target = question.reader(place)
        return replace(self.question, token=place, target=target, foil=foil)


def position(place: int, count: int) -> int:
    """A position from 0, of one that may count from the end."""
    if not -count <= place < count:
        raise ArgumentError(f"token is {place}: there are {count} positions, {-count} to {count - 1}.", "token")
    return place % count
