"""The table that the tests of this folder are generated from: the classes, on inputs of every form.

A new class or option is one more row, and runs through every rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import (
    ALTI,
    AttentionFlow,
    AttentionRollout,
    GlobEnc,
    HiddenTokenAttribution,
    LayerALTI,
    LayerAttention,
    LayerAttentionGradient,
    LayerAttentionNorm,
    Rollout,
    ValueZeroing,
    ValueZeroingRollout,
)
from captum_vz.attr._call.output import Question
from captum_vz.attr._call.target import WantedTokens
from tests.engine.parameters import sampled
from tests.reference.case import Case
from tests.reference.families import FAMILIES


class AttentionGradient(LayerAttentionGradient):
    """Of one number for each example, which depends on all tokens. `target` names a row, as in the other methods."""

    def _wanted(self, token: Any, target: Any, foil: Any = None) -> WantedTokens:
        rows = WantedTokens.parse(token, target)
        return replace(rows, question=Question(cubes, None))


def cubes(output: Any) -> Tensor:
    """The sum of the cubes of the hidden states, `(batch,)`."""
    hidden = output if isinstance(output, Tensor) else output[0]
    return (hidden**3).flatten(1).sum(1)


LAYER_METHODS = (ValueZeroing, LayerAttention, LayerAttentionNorm, LayerALTI, HiddenTokenAttribution, AttentionGradient)
STACK_METHODS = (ValueZeroingRollout, AttentionRollout, AttentionFlow, ALTI)
POST_NORM_METHODS = (GlobEnc,)  # of the stack, for families that norm what comes of their attention
METHODS = (*LAYER_METHODS, *STACK_METHODS)
SHELLS = (ValueZeroing, ValueZeroingRollout, AttentionGradient)  # maps of layers, joined maps, maps that need a graph
ONE_THREAD_METHODS = (HiddenTokenAttribution, AttentionGradient)  # they need the one graph of one pass


def each_of(methods: Sequence[Any]) -> pytest.MarkDecorator:
    """One class for each shell, and the others each night."""
    return pytest.mark.parametrize("method", sampled(methods, *(one for one in SHELLS if one in methods)))


each_method = each_of(METHODS)


@dataclass(frozen=True)
class Configuration:
    """One row: a class with its options, a tiny model, and how its inputs are handed over."""

    method: Callable[..., Any]
    family: str = "bert"  # key of `FAMILIES`
    inputs: str = "tensor"  # the mask goes into additional_forward_args; or "tuple", "mapping" or "embeddings"
    layers: int | None = None  # the number of a layer, or None for the list of all of them
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # of the constructor
    attribute: dict[str, Any] = field(default_factory=dict, hash=False)  # further keywords

    @property
    def name(self) -> str:
        return "-".join([self.method.__name__, self.family, self.inputs])

    @property
    def case(self) -> Case:
        return FAMILIES[self.family].case

    @property
    def layer(self) -> Any:
        return self.case.layers if self.layers is None else self.case.layers[self.layers]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """`inputs` and `additional_forward_args` of `attribute`."""
        values = tuple(self.case.inputs.values())
        match self.inputs:
            case "mapping":
                return {"inputs": self.case.inputs}
            case "tuple":
                return {"inputs": values}
            case "embeddings":
                values = (embed(self.case), *values[1:])
        return {"inputs": values[0], "additional_forward_args": values[1:] or None}

    @property
    def forward_func(self) -> Callable[..., Any]:
        if self.inputs == "mapping":
            return self.case.model
        names = list(self.case.inputs)
        if self.inputs == "embeddings":
            names[0] = "inputs_embeds"
        return lambda *values: self.case.model(**dict(zip(names, values, strict=True)))

    def build(self) -> Any:
        return self.method(self.forward_func, self.layer, **self.options)

    def run(self, **keywords: Any) -> Any:
        return self.build().attribute(**self.arguments, **self.attribute, **keywords)

    def maps(self, **keywords: Any) -> list[Tensor]:
        """The answer as a list of tensors, whatever form it came in. Of several inputs, the first has all tokens."""
        answer = self.run(**keywords)
        return tensors(answer[0] if isinstance(answer, tuple) else answer)


def embed(case: Case) -> Tensor:
    """The word embeddings of a case's token ids, `(batch, tokens, d)`."""
    ids = case.inputs["input_ids"]
    words: nn.Module = case.model.get_input_embeddings()
    return words(ids).detach()


def tensors(answer: Any) -> list[Tensor]:
    return [answer] if isinstance(answer, Tensor) else list(answer)


def rollout_of_norms(forward_func: Any, layer: Any, device_ids: Any = None, **options: Any) -> Rollout:
    """`Rollout` built as the others are."""
    return Rollout(LayerAttentionNorm(forward_func, layer, device_ids, include="residual"), **options)


PAIRS = torch.tensor([[0, 0, 1, 1, 2, 2, 3]])  # words of two tokens

CONFIGURATIONS = [
    Configuration(ValueZeroing, inputs="tuple", layers=0, options={"distance": "euclidean", "normalize": False}),
    Configuration(ValueZeroing, inputs="embeddings", layers=2, options={"distance": "l1", "heads": [0, 3]}),
    Configuration(ValueZeroing, layers=1, attribute={"feature_mask": PAIRS, "perturbations_per_eval": 2}),
    Configuration(ValueZeroing, "vit"),
    Configuration(LayerAttention, "llama", "mapping", options={"reduce_heads": "max"}),
    Configuration(LayerAttentionNorm, inputs="embeddings", layers=1, attribute={"feature_mask": PAIRS}),
    Configuration(LayerALTI, "vit", options={"p": 2, "normalize": False}),
    Configuration(HiddenTokenAttribution, "llama", "tuple", layers=0, attribute={"feature_mask": PAIRS}),
    Configuration(AttentionGradient, "gpt2", "mapping"),
    Configuration(ValueZeroingRollout, "albert", "mapping", attribute={"all_layers": True}),
    Configuration(AttentionRollout, inputs="tuple", options={"residual": "renormalize", "reduce_heads": "max"}),
    Configuration(rollout_of_norms, "gpt2", "mapping", options={"residual": 0.5}, attribute={"all_layers": True}),
    Configuration(GlobEnc, attribute={"feature_mask": PAIRS}),
    Configuration(ALTI, "vit", attribute={"all_layers": True}),
    Configuration(AttentionFlow, "gpt2", "mapping", options={"per_receptive_field": True}),
]
