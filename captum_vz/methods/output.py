"""Methods that explain a number of the model's output, and baselines without a model."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from inspect import isclass
from typing import Any

import torch
from torch import Tensor

from captum_vz import LayerAttention, TokenAttribution, ValueGates
from captum_vz.attr._call.layers import unwrapped
from captum_vz.errors import UnsupportedLayerError
from captum_vz.methods.method import Method, added, check_layer, check_model, check_text, is_object, made_of
from captum_vz.methods.question import Question
from captum_vz.subjects import Subject


@dataclass(frozen=True, eq=False)
class OutputMethod(Method):
    """The base of methods whose scores are amounts of a number of the output, a row for each example.

    Attributes:
        kind: The class, a function of the model and its layers, or an object of the user.
    """

    explains_output = True
    is_signed = True

    kind: Any


@dataclass(frozen=True, eq=False)
class EffectMethod(OutputMethod):
    """The effect of values on the output, of all layers at once."""

    takes_features = True

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The effects of :class:`~captum_vz.ValueZeroingEffect`."""
        asked, made = question.decision(subject), made_of(self.kind, subject, question)
        inputs = question.inputs
        return [made.attribute(inputs, target=asked.target, foil=asked.foil, feature_mask=features, **self.options)]


@dataclass(frozen=True, eq=False)
class LayerEffectMethod(EffectMethod):
    """The effect of the values of each layer alone."""

    layered = True

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The effects of each layer."""
        return [self.row_of_layer(subject, question, features, layer) for layer in range(len(subject.layers))]

    def row_of_layer(self, subject: Subject, question: Question, features: Tensor | None, layer: int) -> Tensor:
        """The effects of this layer."""
        check_layer(layer, len(subject.layers))
        (found,) = super().rows(replace(subject, layers=[subject.layers[layer]]), question, features)
        return found


@dataclass(frozen=True, eq=False)
class LogitMethod(OutputMethod):
    """The terms of a logit, by ALTI-Logit."""

    def in_one_pass(self, subject: Subject, question: Question) -> bool:
        """The rows of many logits of one text are computed together."""
        return True

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The terms of each example's logit, or of each logit of one text."""
        made, decision = made_of(self.kind, subject, question), question.decision(subject)
        if callable(decision.target):
            raise UnsupportedLayerError(f"{self.title} explains logits: pass value-zeroing-effect.")
        asked: list[Any] = [decision.target, decision.foil]
        if question.is_several_of_one:
            asked = [None if one is None else [tuple(map(list, zip(*one, strict=True)))] for one in asked]
        found = made.attribute(question.inputs, target=asked[0], foil=asked[1], **self.options)
        return [added(found.flatten(0, -2), features)]


@dataclass(frozen=True, eq=False)
class GradientMethod(OutputMethod):
    """A class of Captum on the word embeddings, or a :class:`~captum_vz.TokenAttribution`.

    Attributes:
        reduce: How the entries of a token's vector are joined: "sum", which keeps signs, or "l2".
    """

    reduce: Any = "sum"

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The joined entries of each token's vector."""
        check_text(self.title, subject, question)
        decision, made = question.decision(subject), self._made(subject)
        asked: dict[str, Any] = {"target": decision.target, "foil": decision.foil}
        if callable(decision.target):
            made, asked = copy(made), {}
            made.objective = decision.target
        return [added(made.attribute(question.inputs, **asked, **self.options), features)]

    def _made(self, subject: Subject) -> Any:
        if is_object(self.kind):
            check_model(self.kind, subject)
            return self.kind
        own: dict[str, Any] = {"tokenizer": subject.tokenizer}
        if subject.forward is not subject.model:  # a function around it, which does not show its embeddings
            own["embeddings"] = subject.model.get_input_embeddings()
        inner: Any = unwrapped(self.kind)
        if isclass(inner) and issubclass(inner, TokenAttribution):
            return self.kind(subject.forward, **own)
        return TokenAttribution(subject.forward, self.kind, reduce=self.reduce, **own)


@dataclass(frozen=True, eq=False)
class GateMethod(OutputMethod):
    """A class of Captum on :class:`~captum_vz.ValueGates`. Random numbers have the seed 0."""

    takes_features = True

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The scores of each token's gate."""
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

    kind: Any

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """One row for each example. Tokens of a causal model see earlier tokens only."""
        check_text(self.title, subject, question)
        if question.attention == "cross":
            made_of(self.kind, subject, question)  # refused
        causal = any(getattr(module, "is_causal", False) for module in subject.layers[0].modules())
        made = self.kind if is_object(self.kind) else self.kind(causal=causal)
        found = made.attribute(question.inputs, feature_mask=features, token=question.rows, **self.options)
        return [found] if isinstance(found, Tensor) else found
