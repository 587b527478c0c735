"""What a decision rests on: the tokens that an effect and a relevance agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz.attr._call.output import tensor_of
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.functional import normalize_rows
from captum_vz.methods.method import Index, Method, Question, added
from captum_vz.subjects import Subject, heads

#: Of longer texts the effect is left out, because it runs the model once for each token.
LONGEST: Final = 40


@dataclass(frozen=True, eq=False)
class DecisionMethod(Method):
    r"""How much a decision rests on each token: the mean of the shares of two methods.

    .. math:: R_j = \tfrac12 \textstyle\sum_k s^k_j, \qquad s^k_j \propto \max(a^k_j, 0)

    where :math:`a^k_j` are the amounts of one method. :math:`R_j` is 0 for the first token, on which many layers draw
    without need, and for the explained token. A row sums to 1, or is 0 if no other token supports the decision.

    On SmolLM2 the relevance alone finds the word that decides more often than the effect, and on Gemma 3 the other way
    round. For a next word without a foil, the relevance of its log-probability is the best that either has.

    Attributes:
        effect: What the output loses without a token.
        relevance: What goes back to a token by rules for each operation.
    """

    explains_output = True

    effect: Method
    relevance: Method

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The mean of both, or of one if the other has no rule for the model, or takes too long."""
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
            assert refused is not None  # one of both has refused
            raise refused
        question.kept[self] = " and ".join(used)
        return [added(torch.stack(found).mean(0), features)]

    def used(self, question: Question) -> str:
        """The titles of the methods that :meth:`rows` has used for this question."""
        return str(question.kept.get(self, ""))

    def _asked(self, subject: Subject, question: Question) -> list[tuple[Method, Question]]:
        """The methods, and what each is asked."""
        ids, relevance, effect = question.inputs.get("input_ids"), (self.relevance, question), (self.effect, question)
        if ids is not None and ids.shape[-1] > LONGEST:
            return [relevance]
        if question.foil is not None or callable(question.target) or not heads.predicts_next(subject.model):
            return [effect, relevance]
        words = question.asked(subject)["target"]
        return [(self.relevance, replace(question, target=log_probability(words)))]


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
