"""Captum's text inputs, with gates in the place of changed words."""

from __future__ import annotations

from typing import Any

import torch
from captum.attr import InterpretableInput, TextTemplateInput, TextTokenInput
from torch import Tensor

from captum_vz.generation.llm import features_of


def gated_input(inp: InterpretableInput, tokenizer: Any) -> InterpretableInput:
    r"""An input of Captum's `LLMAttribution` that hands on gates, for a method made of :class:`~captum_vz.ValueGates`.

    .. math:: g_j = p_{k(j)}

    where :math:`p` is what Captum makes of the features, 1 where a feature is present, and k(j) the feature of token j.
    No token is replaced. Tokens without a feature, and generated tokens, have a gate of 1. `Mohebbi et al. 2023
    <https://aclanthology.org/2023.eacl-main.245>`_ zero such values.

    The scores of `FeatureAblation` are those of :class:`~captum_vz.ValueZeroingEffect`, of log-probabilities.

    Args:
        inp: A `TextTokenInput`, whose features are tokens, or a `TextTemplateInput`, whose features are the values of a
            template. Captum's `baselines` are not used.
        tokenizer: The tokenizer of the model. For a template, its tokens have to spell the text, or have offsets.

    Returns:
        An input of the same class, with the same features.

    Raises:
        ArgumentError: An input of another class. A template that changes its values.

    >>> from captum.attr import FeatureAblation, LLMAttribution, TextTokenInput
    >>> from captum_vz import ValueGates
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model("causal")
    >>> llm = LLMAttribution(FeatureAblation(ValueGates(model)), tokenizer)
    >>> inp = gated_input(TextTokenInput("the pictures of some hat", tokenizer), tokenizer)
    >>> llm.attribute(inp, target="have upset anna").token_attr.shape
    torch.Size([3, 6])
    """
    ids, features = features_of(inp, tokenizer)
    order = {place: column for column, place in enumerate(x for x in features if x is not None)}
    if isinstance(inp, TextTokenInput):
        return _Tokens(inp, ids, [None if one is None else order[one] for one in features])
    return _Template(inp, ids, features)


class _Gated:
    """Replaces `to_model_input` of an input by one that returns ids and gates."""

    def __init__(self, inp: Any, ids: list[int], columns: list[int | None]) -> None:
        vars(self).update(vars(inp))
        self._pristine = inp.to_model_input
        self._ids = torch.tensor([ids])
        self._columns = columns

    def to_model_input(self, perturbed_tensor: Tensor | None = None) -> Any:
        """The ids of the text, `(1, tokens)`, and the gates of its tokens, for features `(1, features)`."""
        if perturbed_tensor is None:
            return self._pristine()
        features = perturbed_tensor.to(torch.get_default_dtype())
        one = features.new_ones(len(features), 1)
        last = features.shape[1]
        places = [last if column is None else column for column in self._columns]
        return {"input_ids": self._ids.to(features.device), "gates": torch.cat([features, one], 1)[:, places]}


class _Tokens(_Gated, TextTokenInput):
    """A `TextTokenInput` that hands on gates."""


class _Template(_Gated, TextTemplateInput):
    """A `TextTemplateInput` that hands on gates."""
