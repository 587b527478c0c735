"""Methods with maps of layers: each layer's own map, and the joined maps of many layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isclass, signature
from typing import Any

from torch import Tensor

from captum_vz import ALTI, ALTIPlus, GlobEnc, LayerALTI
from captum_vz.attr import LayerMaps, MapAggregation, MapRun
from captum_vz.attr._call.layers import unwrapped
from captum_vz.errors import ArgumentError
from captum_vz.methods.method import INSIDE, Method, is_object, made_of
from captum_vz.methods.question import Question
from captum_vz.subjects import Subject


@dataclass(frozen=True, eq=False)
class LayerMethod(Method):
    """A map of each layer, whose rows are the scores.

    Attributes:
        kind: A class of layer maps, a function of the model and its layers, or an object of the user.
    """

    layered = True
    takes_features = True

    kind: Callable[..., LayerMaps] | LayerMaps

    @property
    def maps(self) -> Any:
        """The class. Maps that explain an output are none of a text by itself."""
        return None if self.explains_output else self.kind

    @property
    def explains_output(self) -> bool:
        """Whether the maps are those of a number of the output, such as attention times its gradient."""
        return bool(getattr(unwrapped(self.kind), "explains_output", False))

    def in_one_pass(self, subject: Subject, question: Question) -> bool:
        """Rows of a map are computed together. Each row explains another number of the output, if it explains one."""
        return not self.explains_output

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The wanted rows only, unless another method has computed whole maps."""
        if _key(self.kind, subject, features) in question.kept:
            return [question.select(one) for one in self.layer_maps(subject, question, features)]
        asked: dict[str, Any] = {}
        if self.explains_output:
            decision = question.decision(subject)
            asked = {"target": decision.target, "foil": decision.foil}
        made = self._made(subject, question)
        run = made.run(question.inputs, feature_mask=features, token=question.rows, **asked, **self.options)
        return [one.flatten(0, 1) for _, one in run.maps]

    def layer_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """All maps, one for each run of a layer: ALBERT's only layer runs many times."""
        if self.explains_output:
            return []
        run = whole_run(self.kind, self._made(subject, question), subject, question, features)
        return [one for _, one in run.maps]

    def _made(self, subject: Subject, question: Question) -> Any:
        made = made_of(self.kind, subject, question)
        if getattr(made, "reduce_heads", "") is None:
            raise ArgumentError(
                f"reduce_heads of {type(made).__name__} is None, which gives a map for each head, but there is one row "
                "for each token: choose a reduction, or one head with heads=."
            )
        return made


@dataclass(frozen=True, eq=False)
class JoinedMethod(Method):
    """The joined maps of the layers, up to each layer.

    Attributes:
        kind: A class that joins maps, a function of the model and its layers, or an object of the user.
        shared: The class of the maps, which several methods then compute once. None: those of `kind`.
        each_layer: Whether maps are joined up to each layer. Otherwise only through all layers, because it is slow.
    """

    joins = True

    kind: Callable[..., MapAggregation] | MapAggregation
    shared: Callable[..., LayerMaps] | None = None
    each_layer: bool = True

    @property
    def layered(self) -> bool:
        """Whether maps are joined up to each layer."""
        return self.each_layer

    @property
    def maps(self) -> Any:
        """The class of the maps."""
        return self.shared

    @property
    def residual(self) -> float | str | None:
        """What the class or the object adds to each map. Maps of ALTI and GlobEnc hold the residual connection."""
        inner: Any = unwrapped(self.kind)
        given = inner if is_object(self.kind) else None
        if given is None:
            named = signature(self.kind).parameters.get("residual")
            residual = None if named is None else named.default
            inside = isclass(inner) and issubclass(inner, (ALTI, GlobEnc, ALTIPlus))
        else:
            residual = given.residual
            maps = given.maps
            inside = isinstance(maps, LayerALTI) or getattr(maps, "include", "attention") != "attention"
        return INSIDE if inside and residual is None else residual

    @property
    def explains_output(self) -> bool:
        """Whether the joined maps are those of a number of the output."""
        return bool(getattr(getattr(self.kind, "maps", None), "explains_output", False))

    @property
    def takes_features(self) -> bool:
        """Maps of features are joined."""
        inner = unwrapped(self.kind)
        return not (issubclass(inner, ALTIPlus) if isclass(inner) else isinstance(inner, ALTIPlus))

    def in_one_pass(self, subject: Subject, question: Question) -> bool:
        """Rows of joined maps are computed together, unless they are divided by receptive fields of a whole text."""
        made = made_of(self.kind, subject, question)
        return not self.explains_output and not made.per_receptive_field

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The wanted rows of the joined maps."""
        made, wanted = made_of(self.kind, subject, question), question.rows
        if self.shared is None and not self.explains_output:
            found = made.attribute(
                question.inputs, feature_mask=features, token=wanted, all_layers=self.each_layer, **self.options
            )
            found = found if self.each_layer else [found]
        elif self.explains_output:
            decision = question.decision(subject)
            asked = {"target": decision.target, "foil": decision.foil, **self.options}
            run = made.maps.run(question.inputs, feature_mask=features, find_other_mixing=True, **asked)
            found = made.join_run(run, token=wanted, all_layers=self.each_layer, feature_mask=features)
        else:
            run = self._run(subject, question, features)
            found = made.join_run(run, token=wanted, all_layers=self.each_layer, feature_mask=features)
        return [one.flatten(0, -2) for one in found]

    def layer_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """The maps that are joined."""
        return [] if self.shared is None else [one for _, one in self._run(subject, question, features).maps]

    def whole_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """The joined maps."""
        if self.shared is None:
            return []
        made, run = made_of(self.kind, subject, question), self._run(subject, question, features)
        found: list[Tensor] = made.join_run(run, all_layers=self.each_layer, feature_mask=features)
        return found

    def _run(self, subject: Subject, question: Question, features: Tensor | None) -> MapRun:
        assert self.shared is not None
        made = made_of(self.shared, subject, question)
        return whole_run(self.shared, made, subject, question, features, **self.options)


def whole_run(
    kind: Any, made: LayerMaps, subject: Subject, question: Question, features: Tensor | None, **options: Any
) -> MapRun:
    """All maps of a class, which are computed once for all questions about the same inputs."""
    key = _key(kind, subject, features)
    if key not in question.kept:
        question.kept[key] = made.run(question.inputs, feature_mask=features, find_other_mixing=True, **options)
    found: MapRun = question.kept[key]
    return found


def _key(kind: Any, subject: Subject, features: Tensor | None) -> Any:
    return kind, subject.forward, None if features is None else tuple(map(tuple, features.tolist()))
