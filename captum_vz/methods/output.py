"""Methods that explain a number of the model's output, and baselines without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from inspect import isclass
from typing import Any

import torch
from torch import Tensor

from captum_vz import ALTILogit, AttnLRP, LayerAttention, TokenAttribution, ValueGates, ValueZeroingEffect
from captum_vz.attr import ModelFreeAttribution
from captum_vz.attr._call.layers import unwrapped
from captum_vz.errors import UnsupportedLayerError
from captum_vz.functional import token_scores
from captum_vz.methods.method import Method, added, check_layer, check_model, check_text, is_object, made_of
from captum_vz.methods.question import Question
from captum_vz.subjects import Subject


@dataclass(frozen=True, eq=False)
class OutputMethod(Method):
    """The base of methods whose scores are amounts of a number of the output."""

    explains_output = True
    is_signed = True


@dataclass(frozen=True, eq=False)
class EffectMethod(OutputMethod):
    """The effect of values on the output, of all layers at once.

    Attributes:
        kind: The class, a function of the model and its layers, or an object of the user.
    """

    takes_features = True

    kind: Callable[..., ValueZeroingEffect] | ValueZeroingEffect

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """One row for each example."""
        return [self._effect(made_of(self.kind, subject, question), subject, question, features)]

    def _effect(self, made: Any, subject: Subject, question: Question, features: Tensor | None) -> Tensor:
        decision = question.decision(subject)
        found: Tensor = made.attribute(
            question.inputs, target=decision.target, foil=decision.foil, feature_mask=features, **self.options
        )
        return found


@dataclass(frozen=True, eq=False)
class LayerEffectMethod(EffectMethod):
    """The effect of the values of each layer alone."""

    layered = True

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """One row for each example, of each layer."""
        return [self.row_of_layer(subject, question, features, layer) for layer in range(len(subject.layers))]

    def row_of_layer(self, subject: Subject, question: Question, features: Tensor | None, layer: int) -> Tensor:
        """One row for each example, of this layer alone."""
        check_layer(layer, len(subject.layers))
        alone = replace(subject, layers=[subject.layers[layer]])
        return self._effect(made_of(self.kind, alone, question), subject, question, features)


@dataclass(frozen=True, eq=False)
class LogitMethod(OutputMethod):
    """The terms of a logit, by ALTI-Logit.

    Attributes:
        kind: The class, a function of the model and its layers, or an object of the user.
    """

    kind: Callable[..., ALTILogit] | ALTILogit

    def in_one_pass(self, subject: Subject, question: Question) -> bool:
        """The rows of many logits of one text are computed together."""
        return True

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """One row for each example, or for each logit of one text."""
        made, decision = made_of(self.kind, subject, question), question.decision(subject)
        if callable(decision.target):
            raise UnsupportedLayerError(f"{self.title} explains logits: pass value-zeroing-effect.")
        target: Any = decision.target
        foil: Any = decision.foil
        if question.is_several_of_one:
            target, foil = (
                None if one is None else [tuple(map(list, zip(*one, strict=True)))] for one in (target, foil)
            )
        found = made.attribute(question.inputs, target=target, foil=foil, **self.options)
        return [added(found.flatten(0, -2), features)]


@dataclass(frozen=True, eq=False)
class GradientMethod(OutputMethod):
    """A class of Captum on the word embeddings.

    Attributes:
        kind: The class of Captum; a :class:`~captum_vz.TokenAttribution` of the user, or its class.
        reduce: How the entries of a token's vector are joined: "sum", which keeps signs, or "l2".
    """

    kind: Any
    reduce: Any = "sum"

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """One row for each example."""
        check_text(self.title, subject, question)
        decision, made = question.decision(subject), self._made(subject)
        asked: dict[str, Any] = {"target": decision.target, "foil": decision.foil}
        if callable(decision.target):
            made, asked = copy(made), {}
            made.objective = decision.target
        return [added(made.attribute(question.inputs, **asked, **self.options), features)]

    def _made(self, subject: Subject) -> TokenAttribution:
        if is_object(self.kind):
            check_model(self.kind, subject)
            given: TokenAttribution = self.kind
            return given
        own: dict[str, Any] = {"tokenizer": subject.tokenizer}
        if subject.forward is not subject.model:  # a function around it, which does not show its embeddings
            own["embeddings"] = subject.model.get_input_embeddings()
        inner: Any = unwrapped(self.kind)
        if isclass(inner) and issubclass(inner, TokenAttribution):
            made: TokenAttribution = self.kind(subject.forward, **own)
            return made
        return TokenAttribution(subject.forward, self.kind, reduce=self.reduce, **own)


@dataclass(frozen=True, eq=False)
class RelevanceMethod(OutputMethod):
    """The relevance of the word embeddings, by AttnLRP.

    Attributes:
        kind: The class, a function of the model that builds it, or an object of the user.
    """

    kind: Callable[..., AttnLRP] | AttnLRP

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """One row for each example."""
        check_text(self.title, subject, question)
        decision, made = question.decision(subject), self.kind
        if isinstance(made, AttnLRP):
            check_model(made, subject)
        else:
            made = made(subject.forward)
        found = made.attribute(question.inputs, target=decision.target, foil=decision.foil, **self.options)
        return [added(token_scores(found), features)]


@dataclass(frozen=True, eq=False)
class GateMethod(OutputMethod):
    """A class of Captum on :class:`~captum_vz.ValueGates`. Random numbers have the seed 0.

    Attributes:
        kind: The class of Captum.
    """

    takes_features = True

    kind: Any

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """One row for each example."""
        inputs, decision, count = question.inputs, question.decision(subject), question.examples
        gated = ValueGates(subject.forward, subject.layers, attention=question.attention)
        member = self._gates(subject, question, features).expand(count, -1)  # the gate of each token
        # Captum repeats tensors of the batch when it runs many gates at once. One example is repeated by the gates.
        named = {} if count == 1 else {key: x for key, x in inputs.items() if _of_examples(x, count)}
        rows = torch.arange(count, device=member.device)

        run = gated.forward if callable(decision.target) else gated

        def explained(gates: Tensor, member: Tensor, rows: Tensor, *batched: Tensor) -> Tensor:
            each, all_inputs = gates.gather(1, member), {**inputs, **dict(zip(named, batched, strict=True))}
            output = run(each, **all_inputs) if named else run(each, all_inputs)
            return decision.read(output, rows.tolist())

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


def _of_examples(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count


@dataclass(frozen=True, eq=False)
class BaselineMethod(Method):
    """Scores without a model.

    Attributes:
        kind: The class, or an object of the user.
    """

    kind: Callable[..., ModelFreeAttribution] | ModelFreeAttribution

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """One row for each example. Tokens of a causal model see earlier tokens only."""
        check_text(self.title, subject, question)
        made = self.kind
        if question.attention == "cross":
            made_of(made, subject, question)
        if not is_object(made):
            assert callable(made)
            causal = any(getattr(module, "is_causal", False) for module in subject.layers[0].modules())
            made = made(causal=causal)
        assert isinstance(made, ModelFreeAttribution)
        found = made.attribute(question.inputs, feature_mask=features, token=question.rows, **self.options)
        return [found] if isinstance(found, Tensor) else found
