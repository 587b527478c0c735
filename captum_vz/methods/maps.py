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
        """The class. None for maps that explain an output: a text alone has no such maps."""
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
        made = self._made(subject, question)
        asked = _asked(self, subject, question)
        run = made.run(question.inputs, feature_mask=features, token=question.rows, **asked)
        return [one.flatten(0, 1) for _, one in run.maps]

    def layer_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """All maps, one for each run of a layer: ALBERT's only layer runs many times."""
        if self.explains_output:
            return []
        run = _whole_run(self.kind, self._made(subject, question), subject, question, features)
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
        maps: The class of the maps, which several methods then compute once. None: those of `kind`.
        layered: Whether maps are joined up to each layer. Otherwise only through all layers, because it is slow.
    """

    joins = True

    kind: Callable[..., MapAggregation] | MapAggregation
    maps: Any = None
    layered: bool = True

    @property
    def residual(self) -> float | str | None:
        """What the class or the object adds to each map. Maps of ALTI and GlobEnc hold the residual connection."""
        inner: Any = unwrapped(self.kind)
        if is_object(self.kind):
            residual, maps = inner.residual, inner.maps
            inside = isinstance(maps, LayerALTI) or getattr(maps, "include", "attention") != "attention"
        else:
            residual = getattr(signature(self.kind).parameters.get("residual"), "default", None)
            inside = isclass(inner) and issubclass(inner, (ALTI, GlobEnc, ALTIPlus))
        return INSIDE if inside and residual is None else residual

    @property
    def explains_output(self) -> bool:
        """Whether the joined maps are those of a number of the output."""
        return bool(getattr(getattr(self.kind, "maps", None), "explains_output", False))

    @property
    def takes_features(self) -> bool:
        """Whether maps of features can be joined."""
        inner = unwrapped(self.kind)
        return not (issubclass(inner, ALTIPlus) if isclass(inner) else isinstance(inner, ALTIPlus))

    def in_one_pass(self, subject: Subject, question: Question) -> bool:
        """Rows of joined maps are computed together, unless they are divided by receptive fields of a whole text."""
        return not self.explains_output and not made_of(self.kind, subject, question).per_receptive_field

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The wanted rows of the joined maps."""
        made = made_of(self.kind, subject, question)
        wanted: dict[str, Any] = {"token": question.rows, "all_layers": self.layered, "feature_mask": features}
        if self.maps is not None:
            found = made.join_run(self._run(subject, question, features), **wanted)
        elif self.explains_output:
            asked = _asked(self, subject, question)
            run = made.maps.run(question.inputs, feature_mask=features, find_other_mixing=True, **asked)
            found = made.join_run(run, **wanted)
        else:
            found = made.attribute(question.inputs, **wanted, **self.options)
            found = found if self.layered else [found]
        return [one.flatten(0, -2) for one in found]

    def layer_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """The maps that are joined."""
        return [] if self.maps is None else [one for _, one in self._run(subject, question, features).maps]

    def whole_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """The joined maps."""
        if self.maps is None:
            return []
        made, run = made_of(self.kind, subject, question), self._run(subject, question, features)
        found: list[Tensor] = made.join_run(run, all_layers=self.layered, feature_mask=features)
        return found

    def _run(self, subject: Subject, question: Question, features: Tensor | None) -> MapRun:
        return _whole_run(self.maps, made_of(self.maps, subject, question), subject, question, features, **self.options)


def _asked(method: LayerMethod | JoinedMethod, subject: Subject, question: Question) -> dict[str, Any]:
    """The further arguments of a run of maps, with what is explained."""
    if not method.explains_output:
        return dict(method.options)
    decision = question.decision(subject)
    return {"target": decision.target, "foil": decision.foil, **method.options}


def _whole_run(
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
