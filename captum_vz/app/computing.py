"""The rows of one method for the questions that a model's output asks, of a text that may be read in windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_vz import ValueZeroing
from captum_vz._names import known_name
from captum_vz.app.reading import Cut, Piece
from captum_vz.app.tasks import Question
from captum_vz.app.wish import EFFECT_OF_LAYER, MAPS
from captum_vz.errors import ArgumentError
from captum_vz.functional import pool_groups
from captum_vz.methods import METHODS, Method, as_method, name_of, rollout_of, shares
from captum_vz.methods import Question as Asked
from captum_vz.methods.maps import LayerMethod
from captum_vz.subjects import Subject


@dataclass
class Row:
    """The scores of all tokens for one thing that is explained.

    Attributes:
        name: What is explained: a token, a label, a word and its label.
        token: The position of the token whose row this is, or whose label it explains. None: the whole input.
        scores: `(in,)`. Amounts of an output have a sign: a positive score supports the name. Others are shares.
        window: The tokens `(start, stop)` that the model read together, if the text was cut. No score lies outside.
            None: the whole text, or the mean of all windows.
    """

    name: str
    token: int | None
    scores: Tensor
    window: tuple[int, int] | None = None


@dataclass(frozen=True)
class Chosen:
    """The method that was chosen, its name, and its layer, negative ones from the end."""

    name: str
    method: Method
    layer: int = -1

    @classmethod
    def of(cls, asked: Any, subject: Subject, layer: int | None) -> Chosen:
        """What a user asks for.

        Raises:
            ArgumentError: It is no method, or it has no scores of single layers.
        """
        if isinstance(asked, str):
            asked = known_name("method", asked, METHODS)
        name, method = name_of(asked), as_method(asked).of(subject)
        if layer is not None and not method.layered:
            raise ArgumentError(
                f"{name} has no scores of single layers: leave layer= out, or choose a method that has, such as "
                f"{EFFECT_OF_LAYER if method.explains_output else MAPS}."
            )
        return cls(name, method, -1 if layer is None else layer)


@dataclass
class Scores:
    """What a method computed for a text.

    Attributes:
        rows: One row for each question, or for each window.
        depth: The number of layers from which a layer is chosen.
        maps: The map of each layer. Of a text in windows, only the chosen layer's, joined.
        rollout: The joined maps through all layers; None if no method joins these maps, or the text is in windows.
        distances: The maps of Value Zeroing before rows are divided by their sums.
    """

    rows: list[Row]
    depth: int
    maps: list[Tensor] = field(default_factory=list)
    rollout: Tensor | None = None
    distances: list[Tensor] = field(default_factory=list)


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


def computed(
    subject: Subject,
    chosen: Chosen,
    text: Cut,
    questions: Sequence[Question],
    words: Sequence[int] | None,
    distances: bool,
) -> Scores:
    """The rows of a method for each question, and its maps.

    Args:
        subject: The model.
        chosen: The method.
        text: The text in pieces.
        questions: What is explained.
        words: The word of each token, if the tokens of a word are explained together.
        distances: Whether to compute the distances of Value Zeroing as well.
    """
    method, layer, read = chosen.method, chosen.layer if chosen.method.layered else None, []
    for piece in text.pieces:
        features = None
        if words is not None and piece.places is not None:
            features = torch.tensor([[words[place] for place in piece.places]], device=subject.device)
        read.append(_Read(piece, Asked(piece.inputs, 0), features))
    whole = len(read) == 1
    count = 0 if whole else text.windows[-1][1] + len(_after(text))
    # Whole maps first: rows are then taken from them.
    found = Scores([], subject.depth)
    if whole:
        first = subject, read[0].question, read[0].features
        found.maps = [one[0] for one in method.layer_maps(*first)]
        joining = rollout_of(method) if found.maps else None
        found.depth = len(found.maps) or found.depth
        found.rollout = None if joining is None else joining.whole_maps(*first)[-1][0]
        if distances and method.maps is ValueZeroing:
            lengths = LayerMethod("distances", partial(ValueZeroing, normalize=False))
            found.distances = [one[0] for one in lengths.layer_maps(*first)]
    elif method.maps is not None:
        found.maps = [_joined_map(subject, chosen, read, text, count)]
    if found.maps and text.pieces[0].places is None:  # only now the number of sources is known
        questions = [replace(one, token=position(one.token, len(found.maps[0]))) for one in questions]
    for question in questions:
        of_all = not question.of_token and not whole
        places = range(len(read)) if of_all else [text.owner(question.token)]
        scores = []
        for one in (read[number] for number in places):
            row = method.scores(subject, one.about(question), one.features, layer=layer)[0]
            scores.append(row if whole else one.piece.spread(row, count))
        token = question.token if question.of_token or not method.explains_output else None
        if of_all and method.explains_output:
            found.rows.append(Row(question.name, token, torch.stack(scores).sum(0) / len(scores)))
            continue
        found.rows += [
            Row(question.name, token, one, None if whole else text.windows[number])
            for number, one in zip(places, scores, strict=True)
        ]
    return found


def position(place: int, count: int) -> int:
    """A position from 0, of one that may count from the end."""
    if not -count <= place < count:
        raise ArgumentError(f"token is {place}: there are {count} positions, {-count} to {count - 1}.", "token")
    return place % count


def _after(text: Cut) -> tuple[int, ...]:
    """The fixed tokens after all windows."""
    places = text.pieces[-1].places or ()
    return tuple(place for place in places if place >= text.windows[-1][1])


def _joined_map(subject: Subject, chosen: Chosen, read: Sequence[_Read], text: Cut, count: int) -> Tensor:
    """The map of the whole text, each row from the window in which its token has the most context."""
    layer = chosen.layer if chosen.method.layered else -1
    maps = [chosen.method.whole_maps(subject, one.question, one.features)[layer][0] for one in read]
    whole = maps[0].new_zeros(count, count)
    for place in range(count):
        number = text.owner(place)
        piece = read[number].piece
        whole[place] = piece.spread(maps[number][piece.local(place)], count)
    return whole


def shown(found: Scores, method: Method, words: Sequence[int] | None = None) -> Scores:
    """The scores as they are shown: of words instead of tokens, and as shares, unless they are amounts of an output.

    Args:
        found: The scores. All tokens of a word have its score.
        method: The method.
        words: The word of each token. None: tokens are shown.
    """
    found = found if words is None else _by_words(found, words)
    if not method.is_signed:
        found.rows = [replace(row, scores=shares(row.scores)) for row in found.rows]
    return found


def _by_words(found: Scores, words: Sequence[int]) -> Scores:
    """The scores of words. All tokens of a word have its score."""
    groups = torch.tensor([words])
    firsts = [words.index(word) for word in range(max(words) + 1)]

    def pooled(one: Tensor) -> Tensor:
        return pool_groups(one[None], groups.to(one.device))[0]

    return Scores(
        [
            replace(row, token=None if row.token is None else words[row.token], scores=row.scores[firsts])
            for row in found.rows
        ],
        found.depth,
        [pooled(one) for one in found.maps],
        None if found.rollout is None else pooled(found.rollout),
        [pooled(one) for one in found.distances],
    )
