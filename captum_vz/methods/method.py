"""What all methods share: the question that is asked about a model, its scores, and their shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import isclass, signature
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from captum_vz import ALTIPlus, find_layers
from captum_vz.attr import MapAggregation
from captum_vz.attr._call import unwrapped
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import normalize_rows
from captum_vz.subjects import Subject

Index = tuple[int, ...]  #: an index of the output of one example: `(class,)`, or `(token, class)`
Reader = Callable[[Any], Tensor]  #: reads the explained number of each example from an output, `(batch,)`
#: The residual of methods whose maps hold the residual connection, and of methods that join no maps.
INSIDE: Final = "inside"


@dataclass(frozen=True)
class Question:
    """What a method is asked about some inputs of a model. It says whose rows are scored, and what is explained.

    There is a row for each example of a batch, or there are several rows of one text.

    Attributes:
        inputs: What the model takes, by keyword.
        token: The position of the token whose row is scored, not negative. A list: one for each row.
        target: The number of the output that is explained: for each row a class, or a whole index of its logit. Or a
            function that reads this number from an output. None: the class that the model predicts.
        foil: What is subtracted from it, for each row a class or an index. None: nothing.
        attention: "self", or "cross": rows of a decoder, whose sources are the tokens of its encoder.
        grows: Whether the rows are steps of a text that grows, such as a generated one. Each row then explains the text
            up to its token.
        row_by_row: Whether each row needs its own run of the model: positions depend on the length of the text.
        kept: What one method computes for the others: maps, and the model's prediction. Questions about the same inputs
            share it.
    """

    inputs: Mapping[str, Any]
    token: int | Sequence[int]
    target: Reader | Sequence[int | Index] | None = None
    foil: Sequence[int | Index] | None = None
    attention: Literal["self", "cross"] = "self"
    grows: bool = False
    row_by_row: bool = False
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def places(self) -> list[int]:
        """The position of each row's token."""
        return [self.token] if isinstance(self.token, int) else list(self.token)

    @cached_property
    def examples(self) -> int:
        """How many examples the inputs have."""
        return next(len(one) for one in self.inputs.values() if isinstance(one, Tensor) and one.dim())

    @property
    def is_several_of_one(self) -> bool:
        """Whether it asks for several rows of one example."""
        return self.examples == 1 and len(self.places) > 1

    @property
    def rows(self) -> list[int] | list[list[int]]:
        """The wanted rows as `token` of the attribution classes: for each example a row, or a list of rows."""
        return [self.places] if self.is_several_of_one else self.places

    def select(self, maps: Tensor) -> Tensor:
        """The rows `(rows, in)` of whole maps `(batch, out, in)`."""
        return maps[[0] * len(self.places) if self.examples == 1 else range(self.examples), self.places]

    def about(self, row: int, features: Tensor | None = None) -> tuple[Question, Tensor | None]:
        """The question about one row of several of one text, and the features of its tokens."""
        one = replace(
            self,
            token=[self.places[row]],
            target=self.target if self.target is None or callable(self.target) else [self.target[row]],
            foil=None if self.foil is None else [self.foil[row]],
        )
        if not self.grows:
            return one, features
        stop, of_decoder = self.places[row] + 1, self.attention == "cross"
        whole = self.inputs["decoder_input_ids" if of_decoder else "input_ids"].shape

        def until(x: Any) -> Any:  # images and sound are read by every step
            return x[:, :stop] if isinstance(x, Tensor) and x.shape[:2] == whole else x

        inputs = {name: until(x) for name, x in self.inputs.items()}
        cut = features if features is None or of_decoder else features[:, :stop]
        return replace(one, inputs=inputs, kept={}), cut

    def asked(self, subject: Subject) -> dict[str, Any]:
        """The target and the foil as arguments of `attribute`: a function, or indices of the logits, one for each row.

        If classes are asked for, one run of the model shows which axis of the output they index.
        """
        if callable(self.target):
            return {"target": self.target, "foil": None}
        of_tokens, best = False, None
        if self.target is None or not all(isinstance(one, tuple) for one in (*self.target, *(self.foil or ()))):
            of_tokens, best = self._prediction(subject)
        places: list[Index] = [(place,) if of_tokens else () for place in self.places]
        classes = self.target
        if classes is None:
            assert best is not None  # a target that is not given is predicted
            examples = [0] * len(places) if self.examples == 1 else range(len(places))
            classes = [int(best[(example, *place)]) for example, place in zip(examples, places, strict=True)]
        targets, foils = (
            [one if isinstance(one, tuple) else (*place, one) for place, one in zip(places, rows, strict=True)]
            for rows in (classes, [()] * len(places) if self.foil is None else self.foil)
        )
        if any(one == other for one, other in zip(targets, foils, strict=True)):
            raise ArgumentError(
                "foil is the class that is explained, so all scores would be 0: pass another foil.", "foil"
            )
        return {"target": targets, "foil": None if self.foil is None else foils}

    def _prediction(self, subject: Subject) -> tuple[bool, Tensor]:
        """Whether the logits have an axis of tokens, and the class that is predicted for each example or token."""
        key = "prediction", subject.forward
        if key not in self.kept:
            with torch.no_grad():
                output = subject.forward(**self.inputs)
            logits = getattr(output, "logits", None)
            if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
                remedy = "pass a model with a head."
                if hasattr(output, "start_logits"):
                    remedy = "use captum_vz.explain, which takes answers."
                name = type(subject.model).__name__
                raise UnsupportedLayerError(f"{name} gives no logits, but the method explains a logit: {remedy}")
            self.kept[key] = logits.ndim == 3, logits.argmax(-1).cpu()
        return self.kept[key]


class WrongScoresError(ArgumentError):
    """A method of the user returned something else than scores."""


@dataclass(frozen=True, eq=False)
class Method(ABC):
    """A method by which tokens are scored: one row of the registry.

    A subclass says in :meth:`rows` how the rows of a question are computed.
    """

    joins: ClassVar[bool] = False  #: whether it joins the maps of layers
    is_foreign: ClassVar[bool] = False  #: whether a user's code, which knows no features, may read all that is asked

    title: str  #: its name in a sentence or a figure
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  #: further arguments of `attribute`
    version: str | None = field(default=None, kw_only=True)  #: names the code of your own; None: a digest of it does
    own: bool = field(default=False, kw_only=True)  #: whether it is a method of your own, not of this package
    source: Any = field(default=None, kw_only=True)  #: what it was made of; None: it is of the registry

    @property
    def layered(self) -> bool:
        """Whether there are scores for each layer; of joined maps, up to each layer."""
        return False

    @property
    def shows_layers(self) -> bool:
        """Whether it has a map of each layer alone, which needs no target, so that a layer can decide."""
        return self.maps is not None and not self.joins and not self.explains_output

    @property
    def maps(self) -> Any:
        """The class of the layer maps that it shows or joins. None: it has no such maps."""
        return None

    @property
    def residual(self) -> float | str | None:
        """What it adds to each map that it joins, see :func:`~captum_vz.functional.add_residual`. "inside": nothing."""
        return INSIDE

    @property
    def is_signed(self) -> bool:
        """Whether its scores are amounts of an output, with signs, and no shares."""
        return False

    @property
    def explains_output(self) -> bool:
        """Whether it explains a number of the model's output. The others explain a token's state."""
        return False

    @property
    def takes_features(self) -> bool:
        """Whether the tokens of a feature are explained together. Otherwise their scores are added up."""
        return False

    def of(self, subject: Subject) -> Method:
        """The method for this model. Only a function of (model, layers) shows by its result what it is."""
        return self

    def scores(
        self, subject: Subject, question: Question, features: Tensor | None = None, *, layer: int | None = None
    ) -> Tensor:
        """The scores of all tokens, raw and with their signs.

        Args:
            subject: The model.
            question: What is asked.
            features: Integers `(1 or examples, tokens)`. The tokens of a feature have the same number and one score.
            layer: The only layer that is wanted; negative counts from the end. None: all. Without layers: no meaning.

        Returns:
            `(layers, tokens)`, or `(layers, rows, tokens)` if the question's `token` is a list, on the CPU. A method
            without layers has one.

        Raises:
            ArgumentError: There is no such layer; a method of your own returns something else than scores.
            RefusedError: The method refuses the model.
        """
        asked = [(question, features)]
        if question.is_several_of_one and (question.row_by_row or not self.in_one_pass(subject, question)):
            asked = [question.about(row, features) for row in range(len(question.places))]
        found = []
        for one in asked:
            if layer is None or not self.layered:
                found.append(torch.stack([rows.detach().cpu() for rows in self.rows(subject, *one)]))
            else:
                found.append(self.row_of_layer(subject, *one, layer).detach().cpu()[None])
        width = max(one.shape[-1] for one in found)
        scores = torch.cat([torch.nn.functional.pad(one, (0, width - one.shape[-1])) for one in found], 1)
        return scores[:, 0] if isinstance(question.token, int) else scores

    @abstractmethod
    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The rows `(rows, tokens)` of each layer."""

    def row_of_layer(self, subject: Subject, question: Question, features: Tensor | None, layer: int) -> Tensor:
        """The rows `(rows, tokens)` of one layer."""
        found = self.rows(subject, question, features)
        return found[check_layer(layer, len(found))]

    def in_one_pass(self, subject: Subject, question: Question) -> bool:
        """Whether :meth:`rows` gives several rows of one text at once, the same as row by row."""
        return False

    def layer_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """The whole maps `(examples, out, in)` of the layers that the method shows or joins; empty if it has none."""
        return []

    def whole_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """The maps `(examples, out, in)` that :meth:`scores` are rows of; empty if it has none."""
        return self.layer_maps(subject, question, features)

    def scope(self, layer: int) -> str:
        """What is shown if `layer` is asked for, such as "layer 3" or "layers 0 to 3, residual 0.5"."""
        if not self.layered:
            found = "all layers" if self.joins else ""
        else:
            found = f"layers 0 to {layer}" if self.joins and layer else f"layer {layer}"
        return ", ".join(filter(None, [found, residual_text(self.residual)]))

    def layer_names(self, count: int) -> tuple[str, ...]:
        """The names of the layers of its scores."""
        if self.layered:
            return tuple(map(self.scope, range(count)))
        return ("output" if self.explains_output else self.scope(0) or "scores",)


def check_layer(layer: int, depth: int) -> int:
    """The index of a layer from 0. What is not one of `depth` layers is refused."""
    if not -depth <= layer < depth:
        raise ArgumentError(
            f"layer {layer} is out of range: the model has {depth} layers, {-depth} to {depth - 1}.", "layer"
        )
    return layer % depth


def residual_text(residual: float | str | None) -> str:
    """What joined maps add for the residual connection, in words; empty if the maps hold it."""
    if residual == INSIDE:
        return ""
    return "no residual" if residual is None else f"residual {residual}"


def shares(scores: Tensor) -> Tensor:
    """The sizes of scores `(..., tokens)` as shares of their sum. A row of zeros stays zero, and NaN stays NaN."""
    return normalize_rows(scores.abs())


def checked_shares(name: str, method: Method, subject: Subject, question: Question, examples: Sequence[str]) -> Tensor:
    """The shares of a method's scores, `(layers, rows, tokens)` in float64 on the CPU. Padding has none.

    NaN is an answer: it says that the method is undefined for an example. Infinite scores, and what is no scores, are
    refused. Errors name the method and the examples.
    """
    try:
        scores = method.scores(subject, question).double()
        infinite = scores.isinf().any(-1)
        if infinite.any():
            layer, place = infinite.nonzero()[0].tolist()
            row, examples = scores[layer, place], [examples[place]]
            came = f"a row with the sum {float(row.sum()):.4g} and the smallest entry {float(row.min()):.4g}"
            raise WrongScoresError(f"the method returned {came}; expected finite numbers, or NaN.")
    except WrongScoresError as error:
        raise ArgumentError(f"method {name!r}, example {', '.join(map(repr, examples[:3]))}: {error}") from error
    mask = question.inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == scores.shape[1:]:
        scores = scores.masked_fill(~mask.cpu().bool(), 0)
    return shares(scores)


def added(scores: Tensor, features: Tensor | None) -> Tensor:
    """The sum of each feature's scores `(rows, tokens)`, at all of its tokens."""
    if features is None:
        return scores
    member = features.to(scores.device).unique(return_inverse=True)[1].expand_as(scores)
    return scores.new_zeros(len(scores), int(member.max()) + 1).scatter_add(1, member, scores).gather(1, member)


def made_of(kind: Any, subject: Subject, question: Question) -> Any:
    """The object of a class of this package, for this model; an object of the user as it is, if it fits the model."""
    inner: Any = unwrapped(kind)
    crosses = question.attention == "cross"
    if own_object(kind, subject) is not None:
        if crosses and not isinstance(kind, ALTIPlus):
            _check_sources(type(kind), getattr(kind, "attention", None))
        return kind
    if not crosses:
        return kind(subject.forward, list(subject.layers))
    if isclass(inner) and issubclass(inner, ALTIPlus):
        return kind(subject.forward, [*find_layers(subject.model, "encoder"), *subject.layers])
    _check_sources(inner, getattr(kind, "keywords", {}).get("attention", "cross"))
    return kind(subject.forward, list(subject.layers), attention="cross")


def _check_sources(kind: Any, attention: Any) -> None:
    """Refuse a method whose sources are not the tokens of the encoder, which are the prompt."""
    joins = isclass(kind) and issubclass(kind, MapAggregation)
    if joins or "attention" not in signature(kind).parameters:
        raise ArgumentError(
            f"{kind.__name__} has no maps from an encoder to its decoder: pass ALTIPlus, ValueZeroing, LayerAttention "
            "or ValueZeroingEffect for a model with an encoder."
        )
    if not (isinstance(attention, str) and attention == "cross"):
        shown = repr(attention) if isinstance(attention, str) else "a module"
        raise ArgumentError(
            f"attention of {kind.__name__} is {shown}, but only the cross-attention of the decoder has the tokens of "
            f"the prompt as sources. Pass the class {kind.__name__}, or make the method with attention='cross'."
        )


def own_object(kind: Any, subject: Subject) -> Any:
    """An object with `attribute` of the user, which has to fit the model. None: a class or function that makes one."""
    inner = unwrapped(kind)
    if isclass(inner) or not callable(getattr(inner, "attribute", None)):
        return None
    check_model(kind, subject)
    return kind


def check_model(method: Any, subject: Subject) -> None:
    """Refuse an object that was made for another model."""
    model = getattr(method, "forward_func", None)
    known = (whole for whole in (subject.model, subject.forward) if isinstance(whole, nn.Module))
    if isinstance(model, nn.Module) and all(model is not one for whole in known for one in whole.modules()):
        raise ArgumentError(
            f"the object was made for another model ({type(model).__name__}): pass its class, or a new object."
        )


def check_text(title: str, subject: Subject, question: Question) -> None:
    """Refuse a method that scores the words of a text, if there is none."""
    if "input_ids" not in question.inputs:
        raise UnsupportedLayerError(
            f"{title} scores the tokens of a text, but {type(subject.model).__name__} reads none: choose another "
            "method, such as value-zeroing-effect."
        )
