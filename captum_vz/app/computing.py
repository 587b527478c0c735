"""The rows of one method for the questions that a model's output asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from captum_vz import (
    ALTILogit,
    LayerAttention,
    LayerAttentionGradient,
    PositionAttribution,
    RandomAttribution,
    ValueGates,
    ValueZeroing,
)
from captum_vz._names import known_name
from captum_vz.app.reading import Cut, Piece
from captum_vz.app.subjects import Subject
from captum_vz.app.tasks import Question
from captum_vz.app.wish import EFFECT, EFFECT_OF_LAYER, MAPS, check_layer
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import pool_groups
from captum_vz.study.methods import METHODS, Method, rollout_of
from captum_vz.study.scoring import Batch, token_gate_scores
from captum_vz.study.scoring.given import checked_rows, named_method


@dataclass
class Row:
    """The scores of all tokens for one thing that is explained.

    Attributes:
        name: What is explained: a token, a label, a word and its label.
        token: The position of the token whose row this is, or whose label it explains. None: the whole input.
        scores: `(in,)`. The rows of a map sum to 1. An effect has a sign: a positive score supports the name.
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
    def of(cls, asked: Any, layer: int | None, residual: Any) -> Chosen:
        """What a user asks for.

        Raises:
            ArgumentError: It is no method, it cannot take the residual, or it has no scores of single layers.
        """
        if isinstance(asked, str):
            asked = known_name("method", asked, METHODS)
        name, method = named_method(asked)
        if layer is not None and not method.layered:
            raise ArgumentError(
                f"{name} has no scores of single layers: leave layer= out, or choose a method that has, such as "
                f"{EFFECT_OF_LAYER if method.explains_output else MAPS}."
            )
        return cls(name, method.with_residual(residual), -1 if layer is None else layer)

    @property
    def asked(self) -> Any:
        """What other functions take for it: what the user passed, or the name in the registry."""
        return self.name if self.method.source is None else self.method.source


def joined_by(method: Method, residual: Any) -> Method | None:
    """The method that joins the maps of a method, with this residual. None: there is none."""
    found = rollout_of(method)
    return None if found is None else found.with_residual(residual)


@dataclass
class Run:
    """One method on one piece of a text."""

    subject: Subject
    chosen: Chosen
    piece: Piece
    residual: Any
    groups: Tensor | None = None

    @cached_property
    def batch(self) -> Batch:
        """The piece as the registry of methods takes it."""
        subject, groups = self.subject, None if self._is_foreign else self.groups
        return Batch(subject.forward, subject.tokenizer, subject.layers, self.piece.inputs, [0], feature_mask=groups)

    @property
    def _is_foreign(self) -> bool:
        """Whether rows come from a user's code, which knows no features."""
        return self.chosen.method.own and self.chosen.method.maps is None

    def row(self, question: Question) -> tuple[Tensor, int]:
        """The row `(in,)` of a question, and the number of layers to choose from."""
        method, layer = self.chosen.method, self.chosen.layer
        self._check_ids()
        place = self._place(question)
        if method.on_gates is not None:
            return self._of_gates(question, place), len(self.subject.layers)
        if method.explains_output and method.of_text is not None:
            if method.layered:
                check_layer(layer, len(self.subject.layers))
            return self._of_output(question, place), len(self.subject.layers)
        batch = self.batch
        batch.token = [place]
        batch.targets, batch.foils = (
            [number] if question.is_logit and number is not None else None for number in (question.entry, question.foil)
        )
        if self._is_foreign and "input_ids" in batch.inputs:
            rows = [self._added(one) for one in checked_rows(self.chosen.name, method, batch, ["the text"])]
        else:
            rows = method.rows(batch)
        if method.layered:
            check_layer(layer, len(rows))
        return rows[layer if method.layered else 0][0], len(rows)

    def _check_ids(self) -> None:
        """Refuse methods that score the words of a text, if there is none."""
        method = self.chosen.method
        of_words = isinstance(method.of_text, partial) or method.of_text in (PositionAttribution, RandomAttribution)
        if of_words and method.on_gates is None and "input_ids" not in self.piece.inputs:
            raise UnsupportedLayerError(
                f"{self.chosen.name} scores the tokens of a text, but {type(self.subject.model).__name__} reads none: "
                f"choose another method, such as {EFFECT}."
            )

    def _of_gates(self, question: Question, place: int) -> Tensor:
        """The row of a method of Captum on value gates."""
        self._check_output(question)
        method, subject, features, read = self.chosen.method, self.subject, self.groups, question.reader(place)
        if features is None:
            sources = self.batch.layer_rows(LayerAttention)[0].shape[1]
            features = torch.arange(sources, device=subject.device)[None]
        gated = ValueGates(subject.forward, subject.layers)

        def explained(gates: Tensor) -> Tensor:
            return read(gated.forward(gates, self.piece.inputs))

        return token_gate_scores(method.on_gates, explained, features, **method.options)[0]

    def _check_output(self, question: Question) -> None:
        if not question.field:
            raise UnsupportedLayerError(
                f"{type(self.subject.model).__name__} gives no logits, but {self.chosen.name} explains a logit. Pass a "
                "model with a head, or a method with maps, such as value-zeroing."
            )

    def _place(self, question: Question) -> int:
        """The position in this piece. A label of the whole text is read at each piece's own last token."""
        places = self.piece.places
        if places is None or question.token in places:
            return self.piece.local(question.token)
        return len(places) - 1

    def _of_output(self, question: Question, place: int) -> Tensor:
        """The row of a method that explains a number of the output, as the method's class returns it."""
        method, subject, inputs = self.chosen.method, self.subject, self.piece.inputs
        self._check_output(question)
        reader = question.reader(place)
        target: Any = reader
        foil: Any = None
        if question.is_logit:
            target = question.index(place, question.entry)
            foil = None if question.foil is None else question.index(place, question.foil)
        kind = method.of_text
        if kind is LayerAttentionGradient:
            maps: Any = kind(subject.forward, subject.layers[self.chosen.layer])
            shares: Tensor = maps.attribute(inputs, reader, feature_mask=self.groups, token=place)
            return shares[0]
        if kind is ALTILogit and not question.is_logit:
            raise UnsupportedLayerError(f"{self.chosen.name} explains logits: pass value-zeroing-effect.")
        if isinstance(kind, partial):  # a method of Captum on word embeddings
            own: dict[str, Any] = {} if question.is_logit else {"objective": reader}
            if subject.forward is not subject.model:  # a function around it, which does not show its embeddings
                own["embeddings"] = subject.model.get_input_embeddings()
            made = kind(subject.forward, tokenizer=subject.tokenizer, **own)
            asked = {"target": target, "foil": foil} if question.is_logit else {}
            return self._added(made.attribute(inputs, **asked, **method.options))[0]
        if kind is ALTILogit:
            return self._added(kind(subject.forward, subject.layers).attribute(inputs, target=target, foil=foil))[0]
        of_layer = {"layer": self.chosen.layer} if method.layered else {}
        made = kind(subject.forward, subject.layers, **of_layer)
        effects: Tensor = made.attribute(inputs, target=target, foil=foil, feature_mask=self.groups)
        return effects[0]

    def _added(self, scores: Tensor) -> Tensor:
        """The sum of each feature, at all of its tokens."""
        if self.groups is None:
            return scores
        member = self.groups.to(scores.device).unique(return_inverse=True)[1]
        return scores.new_zeros(len(scores), int(member.max()) + 1).scatter_add(1, member, scores).gather(1, member)

    def maps(self) -> tuple[list[Tensor], Tensor | None]:
        """The layers' maps `(out, in)`, and their rollout; nothing for a method without maps."""
        method = self.chosen.method
        if method.maps is None:
            return [], None
        joining = joined_by(method, self.residual)
        rollout = None
        if joining is not None and joining.joined is not None:
            rollout = self.batch.joined_maps(joining.joined, method.maps, all_layers=False)[-1][0]
        return [one[0] for one in self.batch.whole_maps(method.maps)], rollout

    def map_of(self) -> Tensor:
        """The map that the rows are from: of a layer, or joined up to it."""
        method, layer = self.chosen.method, self.chosen.layer
        assert method.maps is not None
        if method.joined is None:
            return self.batch.whole_maps(method.maps)[layer][0]
        maps = self.batch.joined_maps(method.joined, method.maps, all_layers=method.layered)
        return maps[layer if method.layered else -1][0]

    def distances(self) -> list[Tensor]:
        """The maps of Value Zeroing before rows are divided by their sums."""
        return [one[0] for one in self.batch.whole_maps(partial(ValueZeroing, normalize=False))]


@dataclass
class Scores:
    """What a method computed for a text.

    Attributes:
        rows: One row for each question, or for each window.
        depth: The number of layers from which a layer is chosen.
        maps: The map of each layer. Of a text in windows, only the chosen layer's, joined.
        rollout: The joined maps through all layers; None if no method joins these maps, or the text is in windows.
        distances: The maps of Value Zeroing before rows are divided by their sums.
        residual: What rollouts were asked to add for the residual connection.
    """

    rows: list[Row]
    depth: int
    maps: list[Tensor] = field(default_factory=list)
    rollout: Tensor | None = None
    distances: list[Tensor] = field(default_factory=list)
    residual: float | str | None = 0.5


def computed(
    subject: Subject,
    chosen: Chosen,
    text: Cut,
    questions: Sequence[Question],
    words: Sequence[int] | None,
    distances: bool,
    residual: Any,
) -> Scores:
    """The rows of a method for each question, and its maps.

    Args:
        subject: The model.
        chosen: The method.
        text: The text in pieces.
        questions: What is explained.
        words: The word of each token, if the tokens of a word are zeroed together.
        distances: Whether to compute the distances of Value Zeroing as well.
        residual: What rollouts add for the residual connection.
    """
    method, runs = chosen.method, []
    for piece in text.pieces:
        groups = None
        if words is not None and piece.places is not None:
            groups = torch.tensor([[words[place] for place in piece.places]], device=subject.device)
        runs.append(Run(subject, chosen, piece, residual, groups))
    whole, depth, rows = len(runs) == 1, 1, []
    count = 0 if whole else text.windows[-1][1] + len(_after(text))
    # Whole maps first: rows are then taken from them.
    maps, rollout = runs[0].maps() if whole else ([], None)
    if maps and text.pieces[0].places is None:  # only now the number of sources is known
        questions = [replace(one, token=position(one.token, len(maps[0]), "token")) for one in questions]
    for question in questions:
        of_all = not question.of_token and not whole
        places = range(len(runs)) if of_all else [text.owner(question.token)]
        found = []
        for number in places:
            scores, depth = runs[number].row(question)
            found.append(scores if whole else runs[number].piece.spread(scores, count))
        token = question.token if question.of_token or not method.explains_output else None
        if of_all and method.explains_output:
            rows.append(Row(question.name, token, torch.stack(found).sum(0) / len(found)))
            continue
        rows += [
            Row(question.name, token, one, None if whole else text.windows[number])
            for number, one in zip(places, found, strict=True)
        ]
    if not whole and method.maps is not None:
        maps = [_joined_map(runs, text, count)]
    own = runs[0].distances() if distances and whole and method.maps is ValueZeroing else []
    return Scores(rows, depth, maps, rollout, own, residual)


def position(place: int, count: int, argument: str) -> int:
    """A position from 0, of one that may count from the end."""
    if not -count <= place < count:
        raise ArgumentError(f"{argument} is {place}: there are {count} positions, {-count} to {count - 1}.", argument)
    return place % count


def _after(text: Cut) -> tuple[int, ...]:
    """The fixed tokens after all windows."""
    places = text.pieces[-1].places or ()
    return tuple(place for place in places if place >= text.windows[-1][1])


def _joined_map(runs: Sequence[Run], text: Cut, count: int) -> Tensor:
    """The map of the whole text, each row from the window in which its token has the most context."""
    maps = [run.map_of() for run in runs]
    whole = maps[0].new_zeros(count, count)
    for place in range(count):
        number = text.owner(place)
        piece = runs[number].piece
        whole[place] = piece.spread(maps[number][piece.local(place)], count)
    return whole


def by_words(found: Scores, words: Sequence[int]) -> Scores:
    """The scores of words instead of tokens. All tokens of a word have its score."""
    groups = torch.tensor(words, device=found.rows[0].scores.device)
    firsts = [words.index(word) for word in range(max(words) + 1)]

    def pooled(one: Tensor) -> Tensor:
        return pool_groups(one[None], groups[None].to(one.device))[0]

    rows = [
        Row(row.name, None if row.token is None else words[row.token], row.scores[firsts], row.window)
        for row in found.rows
    ]
    maps = [pooled(one) for one in found.maps]
    rollout = None if found.rollout is None else pooled(found.rollout)
    return Scores(rows, found.depth, maps, rollout, [pooled(one) for one in found.distances], found.residual)
