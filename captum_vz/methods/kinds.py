"""The kinds of methods of this package: maps of layers, joined maps, numbers of the output, and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from inspect import isclass, signature
from typing import Any

import torch
from torch import Tensor

from captum_vz import ALTI, ALTIPlus, GlobEnc, LayerALTI, LayerAttention, TokenAttribution, ValueGates
from captum_vz._private import input_embeddings
from captum_vz.attr import MapAggregation, MapRun
from captum_vz.attr._call import unwrapped
from captum_vz.attr._call.output import Question as Number
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import token_scores
from captum_vz.methods.method import INSIDE, Method, Question, added, check_layer, check_text, made_of, own_object
from captum_vz.subjects import Subject


@dataclass(frozen=True, eq=False)
class MadeMethod(Method):
    """The base of methods that are made for each model."""

    kind: Any  #: a class, a function of the model and its layers that makes an object, or an object of the user


class MapMethod(MadeMethod):
    """The base of methods with maps of layers."""

    def layer_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """All maps, one for each run of a layer: ALBERT's only layer runs many times."""
        return [] if self.maps is None else [one for _, one in self.run_maps(subject, question, features).maps]

    def run_maps(self, subject: Subject, question: Question, features: Tensor | None) -> MapRun:
        """The run of all maps, which is computed once for all questions about the same inputs."""
        key = _key(self.maps, subject, features)
        if key not in question.kept:
            made = _made_maps(self.maps, subject, question)
            options: dict[str, Any] = {"find_other_mixing": True, **self.options}
            question.kept[key] = made.run(question.inputs, feature_mask=features, **options)
        return question.kept[key]


class LayerMethod(MapMethod):
    """A map of each layer, whose rows are the scores."""

    layered = True
    takes_features = True

    @property
    def maps(self) -> Any:
        """The class. None for maps that explain an output: a text alone has no such maps."""
        return None if self.explains_output else self.kind

    @property
    def explains_output(self) -> bool:
        """Whether the maps explain a number of the output, such as attention times its gradient."""
        return bool(getattr(unwrapped(self.kind), "explains_output", False))

    def in_one_pass(self, subject: Subject, question: Question) -> bool:
        """Rows of a map are computed together. Each row explains another number of the output, if it explains one."""
        return not self.explains_output

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The wanted rows only, unless another method has computed whole maps."""
        if _key(self.kind, subject, features) in question.kept:
            return [question.select(one) for one in self.layer_maps(subject, question, features)]
        asked = (question.asked(subject) if self.explains_output else {}) | dict(self.options)
        made = _made_maps(self.kind, subject, question)
        run = made.run(question.inputs, feature_mask=features, token=question.rows, **asked)
        return [one.flatten(0, 1) for _, one in run.maps]


@dataclass(frozen=True, eq=False)
class JoinedMethod(MapMethod):
    """The joined maps of the layers, up to each layer."""

    joins = True

    maps: Any = None  #: the class of the maps, which several methods then compute once; None: the maps of `kind`
    layered: bool = True  #: whether maps are joined up to each layer; else only through all layers, because it is slow

    @property
    def residual(self) -> float | str | None:
        """What the class or the object adds to each map. Maps of ALTI and GlobEnc hold the residual connection."""
        inner: Any = unwrapped(self.kind)
        if isinstance(inner, MapAggregation):
            residual, maps = inner.residual, inner.maps
            inside = isinstance(maps, LayerALTI) or getattr(maps, "include", "attention") != "attention"
        else:
            residual = getattr(signature(self.kind).parameters.get("residual"), "default", None)
            inside = isclass(inner) and issubclass(inner, (ALTI, GlobEnc, ALTIPlus))
        return INSIDE if inside and residual is None else residual

    @property
    def explains_output(self) -> bool:
        """Whether the joined maps explain a number of the output."""
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
            found = made.join_run(self.run_maps(subject, question, features), **wanted)
        elif self.explains_output:
            asked = question.asked(subject) | dict(self.options)
            run = made.maps.run(question.inputs, feature_mask=features, find_other_mixing=True, **asked)
            found = made.join_run(run, **wanted)
        else:
            found = made.attribute(question.inputs, **wanted, **self.options)
            found = found if self.layered else [found]
        return [one.flatten(0, -2) for one in found]

    def whole_maps(self, subject: Subject, question: Question, features: Tensor | None = None) -> list[Tensor]:
        """The joined maps."""
        if self.maps is None:
            return []
        made, run = made_of(self.kind, subject, question), self.run_maps(subject, question, features)
        return made.join_run(run, all_layers=self.layered, feature_mask=features)


def _made_maps(kind: Any, subject: Subject, question: Question) -> Any:
    made = made_of(kind, subject, question)
    if getattr(made, "reduce_heads", "") is None:
        raise ArgumentError(
            f"reduce_heads of {type(made).__name__} is None: choose a reduction, or one head with heads=."
        )
    return made


def _key(kind: Any, subject: Subject, features: Tensor | None) -> Any:
    return kind, subject.forward, None if features is None else tuple(map(tuple, features.tolist()))


class OutputMethod(MadeMethod):
    """The base of methods whose scores are amounts of a number of the output, a row for each example."""

    explains_output = True
    is_signed = True


@dataclass(frozen=True, eq=False)
class EffectMethod(OutputMethod):
    """The effect of values on the output."""

    takes_features = True

    layered: bool = False  #: whether each layer is explained alone, and not all at once

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The effects of :class:`~captum_vz.ValueZeroingEffect`, of all layers at once or of each alone."""
        parts, asked = [replace(subject, layers=[one]) for one in subject.layers], question.asked(subject)
        made = [made_of(self.kind, one, question) for one in (parts if self.layered else [subject])]
        return [one.attribute(question.inputs, feature_mask=features, **asked, **self.options) for one in made]

    def row_of_layer(self, subject: Subject, question: Question, features: Tensor | None, layer: int) -> Tensor:
        """The effects of this layer."""
        check_layer(layer, len(subject.layers))
        return self.rows(replace(subject, layers=[subject.layers[layer]]), question, features)[0]


class LogitMethod(OutputMethod):
    """The terms of a logit, by ALTI-Logit."""

    def in_one_pass(self, subject: Subject, question: Question) -> bool:
        """The rows of many logits of one text are computed together."""
        return True

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The terms of each example's logit, or of each logit of one text."""
        made, asked = made_of(self.kind, subject, question), question.asked(subject)
        if callable(asked["target"]):
            raise UnsupportedLayerError(f"{self.title} explains logits: pass value-zeroing-effect.")
        if question.is_several_of_one:
            asked = {key: one and [tuple(map(list, zip(*one, strict=True)))] for key, one in asked.items()}
        found = made.attribute(question.inputs, **asked, **self.options)
        return [added(found.flatten(0, -2), features)]


@dataclass(frozen=True, eq=False)
class GradientMethod(OutputMethod):
    """A class of Captum on the word embeddings, or a :class:`~captum_vz.TokenAttribution`."""

    reduce: Any = "sum"  #: how the entries of a token's vector are joined: "sum", which keeps signs, or "l2"

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The joined entries of each token's vector."""
        check_text(self.title, subject, question)
        made, asked = self._made(subject), question.asked(subject)
        if callable(asked["target"]):
            made = copy(made)
            made.objective = asked.pop("target")
        return [added(made.attribute(question.inputs, **asked, **self.options), features)]

    def _made(self, subject: Subject) -> Any:
        if (found := own_object(self.kind, subject)) is not None:
            return found
        own: dict[str, Any] = {"tokenizer": subject.tokenizer}
        if subject.forward is not subject.model:  # a function around it, which does not show its embeddings
            own["embeddings"] = input_embeddings(subject.model)
        inner: Any = unwrapped(self.kind)
        if isclass(inner) and issubclass(inner, TokenAttribution):
            return self.kind(subject.forward, **own)
        return TokenAttribution(subject.forward, self.kind, reduce=self.reduce, **own)


class RelevanceMethod(OutputMethod):
    """The relevance of the word embeddings, by AttnLRP."""

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The relevance of each token's vector."""
        check_text(self.title, subject, question)
        made = own_object(self.kind, subject) or self.kind(subject.forward)
        found = made.attribute(question.inputs, **question.asked(subject), **self.options)
        return [added(token_scores(found), features)]


class GateMethod(OutputMethod):
    """A class of Captum on :class:`~captum_vz.ValueGates`. Random numbers have the seed 0."""

    takes_features = True

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The scores of each token's gate."""
        inputs, number, count = question.inputs, Number.parse(**question.asked(subject)), question.examples
        gated = ValueGates(subject.forward, subject.layers, attention=question.attention)
        member = self._gates(subject, question, features).expand(count, -1)  # the gate of each token
        # Captum repeats tensors of the batch when it runs many gates at once. One example is repeated by the gates.
        tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor) and x.dim()}
        named = {} if count == 1 else {key: x for key, x in tensors.items() if len(x) == count}
        rows = torch.arange(count, device=member.device)

        run = gated.forward if callable(number.target) else gated

        def explained(gates: Tensor, member: Tensor, rows: Tensor, *batched: Tensor) -> Tensor:
            each, all_inputs = gates.gather(1, member), {**inputs, **dict(zip(named, batched, strict=True))}
            output = run(each, **all_inputs) if named else run(each, all_inputs)
            if callable(number.target):
                return number.read(output, len(rows))
            return number.read_each(output, rows.tolist(), count)

        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(0)
            gates = torch.ones(count, int(member.max()) + 1, device=member.device)
            further = (member, rows, *named.values())
            scores: Tensor = self.kind(explained).attribute(gates, additional_forward_args=further, **self.options)
        return [scores.detach().gather(1, member)]

    def _gates(self, subject: Subject, question: Question, features: Tensor | None) -> Tensor:
        """The gate of each token, `(1 or examples, tokens)`."""
        ids = question.inputs.get("input_ids")
        if features is not None:
            return features.unique(return_inverse=True)[1]
        if ids is None or callable(question.target):
            # The tokens of an image are known when a layer has run.
            maps = LayerAttention(subject.forward, list(subject.layers)).run(question.inputs, token=question.rows).maps
            return torch.arange(maps[0][1].shape[-1], device=maps[0][1].device)[None]
        return torch.arange(ids.shape[1], device=ids.device)[None]


class BaselineMethod(MadeMethod):
    """Scores without a model."""

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """One row for each example. Tokens of a causal model see earlier tokens only."""
        check_text(self.title, subject, question)
        if question.attention == "cross":
            made_of(self.kind, subject, question)  # refused
        causal = any(getattr(module, "is_causal", False) for module in subject.layers[0].modules())
        made = own_object(self.kind, subject) or self.kind(causal=causal)
        found = made.attribute(question.inputs, feature_mask=features, token=question.rows, **self.options)
        return [found] if isinstance(found, Tensor) else found
