"""What a decision rests on, by two views; and the layer that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.attr._call.output import tensor_of
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.functional import deciding_layer, normalize_rows
from captum_vz.methods.method import Index, Method, Question, added, shares
from captum_vz.subjects import Subject, heads

#: What a surface says of a next word without a foil.
AGAINST_ALL: Final = "against all other answers: pass foil= to ask about one"
#: Of longer texts only the relevance is left, because the effect runs the model once for each token.
LONGEST: Final = 40


@dataclass(frozen=True, eq=False)
class DecisionMethod(Method):
    r"""How much a decision rests on each token: the mean of two views.

    .. math:: R_j \propto e_j + r_j

    where the shares e are of an effect (the token's values are zero), and r of a relevance, with attention weights as
    constants. Only positive amounts count. All are 0 for the first token, on which many layers draw without need, and
    for the explained token. :math:`R` sums to 1, or is 0 if no other token supports the decision.

    Both views err, and seldom together. In texts whose deciding word is known, this word has the largest score by the
    effect in 0.89 (SmolLM2) and 0.98 (Gemma 3), by the relevance in 0.98 and 0.93, by their mean in 0.97 and 1.00.
    For a next word without a foil, R is the relevance of its log-probability.
    """

    explains_output = True

    effect: Method  #: what the output loses without a token's values
    relevance: Method  #: what goes back to a token by rules for each operation, if attention weights are constants
    without_foil: Method  #: the same for the log-probability of a next word, also through attention weights

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The mean, or one view if the other refuses the model."""
        target = question.target if callable(question.target) else str(question.target)
        key = self, str(question.places), target, str(question.foil)
        if key in question.kept:
            return question.kept[key]
        found, used, refused = list[Tensor](), list[str](), None
        for method, asked in self._asked(subject, question):
            try:
                amounts = method.scores(subject, replace(asked, token=question.places), features)[0]
            except RefusedError as error:
                if isinstance(error, ArgumentError):
                    raise
                refused = error
                continue
            found.append(normalize_rows(_support(amounts.double(), question, features)))
            used.append(method.title)
        if not found:
            assert refused is not None  # each of them has refused
            raise refused
        question.kept[self] = ", ".join(used[:-1]) + " and " * (len(used) > 1) + used[-1]
        question.kept[key] = [added(normalize_rows(torch.stack(found).mean(0)), features)]
        return question.kept[key]

    def used(self, question: Question) -> str:
        """The titles of the methods that :meth:`rows` has used for this question."""
        return str(question.kept.get(self, ""))

    def _asked(self, subject: Subject, question: Question) -> list[tuple[Method, Question]]:
        if question.foil is None and not callable(question.target) and heads.predicts_next(subject.model):
            words = question.asked(subject)["target"]
            return [(self.without_foil, replace(question, target=log_probability(words)))]
        ids = question.inputs.get("input_ids")
        if ids is not None and ids.shape[-1] > LONGEST:
            return [(self.relevance, question)]
        return [(self.effect, question), (self.relevance, question)]


@dataclass(frozen=True, eq=False)
class DecidingMethod(Method):
    """For each row, the row of the layer in which the token reads what the decision rests on.

    See :func:`~captum_vz.functional.deciding_layer`.
    """

    explains_output = True

    of_layers: Method  #: a method with a map for each layer
    decision: Method  #: what says on which tokens the decision rests

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The chosen rows."""
        asked = replace(question, token=question.places)
        rows = shares(self.of_layers.scores(subject, asked, features).double())
        rests_on = self.decision.scores(subject, asked, features)[0]
        chosen = [deciding_layer(rows[:, k], rests_on[k], place)[0] for k, place in enumerate(question.places)]
        question.kept[self] = chosen
        return [rows[chosen, range(len(chosen))]]

    def layers(self, question: Question) -> list[int]:
        """The layers that :meth:`rows` has chosen for this question."""
        return list(question.kept[self])


def _support(amounts: Tensor, question: Question, features: Tensor | None) -> Tensor:
    """The positive amounts `(rows, tokens)`, without the first token of each text and without the explained token.

    A feature has its amount at its first token.
    """
    mask, rows = question.inputs.get("attention_mask"), range(len(amounts))
    firsts = [0] * len(amounts)
    if isinstance(mask, Tensor) and mask.shape == amounts.shape:
        firsts = mask.int().argmax(-1).tolist()
    places = torch.arange(amounts.shape[1]).expand(len(amounts), -1)
    if features is not None:
        same = (features[:, None] == features[:, :, None]).cpu()
        places = same.int().argmax(-1).expand(len(amounts), -1)  # the first token of each one's feature
    apart = places[rows, firsts], places[rows, question.places]
    idle = (places == apart[0][:, None]) | (places == apart[1][:, None])
    idle |= places != torch.arange(amounts.shape[1])
    return amounts.clamp_min(0).masked_fill(idle, 0)


def log_probability(words: Sequence[Index]) -> Any:
    """A function that reads the log-probability of each example's word."""

    def read(output: Any) -> Tensor:
        logits = tensor_of(output)
        assert logits is not None  # the words were found in it
        places, numbers = zip(*words, strict=True)
        return logits[range(len(logits)), list(places)].log_softmax(-1)[range(len(logits)), list(numbers)]

    return read
