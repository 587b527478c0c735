"""Small models of twelve families with inputs, and every method of the package as a function of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from captum.attr import InputXGradient
from torch import Tensor, nn

import captum_vz as vz
from tests.captum.configurations import AttentionGradient, cubes
from tests.engine.blocks import block_of, sequences
from tests.engine.by_name import ByName
from tests.engine.odd_windows import ONE_STAGE, SWIN, image
from tests.generation.models import tokenizer_of_words
from tests.reference import FAMILIES, Case
from tests.reference.alti_logit import LANGUAGE_MODELS
from tests.reference.case import built
from tests.reference.families import llama
from tests.rehearsal.device import ELSEWHERE

HALF = 1e-1  # differences of outputs that are rounded to half precision agree to a digit
SINGLE = 1e-5


def some_features(output: Any) -> Tensor:
    """The sum of some features of a token, `(batch,)`."""
    hidden = output if isinstance(output, Tensor) else output[0]
    return hidden[:, 1, :4].float().sum(1)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, what it is given, and by how much a number may differ between devices."""

    model: nn.Module
    inputs: Any
    tolerance: float = 1e-10
    layers_of: Callable[[nn.Module], list[nn.Module]] = vz.find_layers

    @property
    def layers(self) -> list[nn.Module]:
        return self.layers_of(self.model)

    def elsewhere(self) -> Subject:
        """A copy on the other device."""
        model = copy.deepcopy(self.model).to(ELSEWHERE)
        return replace(self, model=model, inputs=moved(self.inputs, ELSEWHERE))


def moved(found: Any, device: torch.device) -> Any:
    """Tensors, or collections of these, on another device."""
    if isinstance(found, Tensor):
        return found.to(device)
    if isinstance(found, Mapping):
        return {name: moved(one, device) for name, one in found.items()}
    return [moved(one, device) for one in found] if isinstance(found, (list, tuple)) else found


def _of(case: Case, tolerance: float = 1e-10) -> Subject:
    path = case.family.layers
    return Subject(case.model, case.inputs, tolerance, lambda model: list(model.get_submodule(path)))


def _mixtral() -> Subject:
    return _of(llama("MixtralModel", num_local_experts=4, num_experts_per_tok=2).build(torch.float32), SINGLE)


def _torchs() -> Subject:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    return Subject(model, torch.randn(2, 5, 16, dtype=torch.float64))


def _home_made() -> Subject:
    model = nn.Sequential(block_of(ByName()), block_of(ByName())).eval().requires_grad_(False)
    return Subject(model, sequences(2), layers_of=list)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "encoder": lambda: _of(FAMILIES["bert"].build()),
    "decoder": lambda: _of(LANGUAGE_MODELS["gpt2"].build()),
    "grouped queries": lambda: _of(LANGUAGE_MODELS["llama"].build()),
    "experts": _mixtral,
    "cross-attention": lambda: _of(FAMILIES["bart-decoder"].build()),
    "vision": lambda: _of(FAMILIES["vit"].build()),
    "windows": lambda: Subject(built("SwinModel", "eager", **SWIN | ONE_STAGE).requires_grad_(False), image(12)),
    "speech": lambda: _of(FAMILIES["wav2vec2"].build()),
    "torch's own": _torchs,
    "home-made": _home_made,
    "bfloat16": lambda: _of(FAMILIES["bert"].build(torch.bfloat16), HALF),
    "float16": lambda: _of(LANGUAGE_MODELS["llama"].build(torch.float16), HALF),
}


@cache
def subject(name: str) -> Subject:
    """A model that tests share. They must not change it."""
    torch.manual_seed(0)
    return SUBJECTS[name]()


def _maps(method: Any, **options: Any) -> Callable[[Subject], Any]:
    return lambda one: method(one.model, one.layers, **options).attribute(one.inputs)


def _row(method: Any, **options: Any) -> Callable[[Subject], Any]:
    return lambda one: method(one.model, one.layers, **options).attribute(one.inputs, token=1)


def _groups(one: Subject) -> Any:
    tokens = vz.LayerAttention(one.model, one.layers[:1]).attribute(one.inputs)[0].shape[-1]
    pairs = (torch.arange(tokens) // 2)[None]
    return vz.ValueZeroing(one.model, one.layers).attribute(one.inputs, feature_mask=pairs)


def _effect(one: Subject) -> Any:
    return vz.ValueZeroingEffect(one.model, one.layers).attribute(one.inputs, target=some_features)


def _gates(one: Subject) -> Any:
    clean = vz.LayerAttention(one.model, one.layers[:1]).attribute(one.inputs)[0]
    gates = torch.linspace(0, 1, clean.shape[-1], device=clean.device).expand(len(clean), -1)
    args, kwargs = ((), one.inputs) if isinstance(one.inputs, dict) else (one.inputs, {})
    args = args if isinstance(args, tuple) else (args,)
    return some_features(vz.ValueGates(one.model, one.layers)(gates, *args, **kwargs))


def _both_stacks(one: Subject) -> Any:
    layers = [*vz.find_layers(one.model, "encoder"), *one.layers]
    return vz.ALTIPlus(one.model, layers).attribute(one.inputs)


def _logit(one: Subject) -> Any:
    return vz.ALTILogit(one.model, one.layers).attribute(one.inputs, target=(1, 9), foil=(1, 10))


def _terms(one: Subject) -> Any:
    terms = vz.ALTILogit(one.model, one.layers).terms(one.inputs, target=(1, 9))
    return [terms.total(), terms.embedding, *terms.attention, terms.feed_forward]


def _gradients(one: Subject) -> Any:
    method = vz.TokenAttribution(one.model, InputXGradient, tokenizer_of_words(), objective=cubes)
    return method.attribute(one.inputs)


def _relevance(one: Subject) -> Any:
    return vz.AttnLRP(one.model, one.layers[0]).attribute(one.inputs, target=some_features)


def _rollout(one: Subject) -> Any:
    return vz.Rollout(vz.LayerAttentionNorm(one.model, one.layers, include="residual")).attribute(one.inputs)


def _position(one: Subject) -> Any:
    return vz.PositionAttribution().attribute(one.inputs)


def _random(one: Subject) -> Any:
    return vz.RandomAttribution().attribute(one.inputs)


METHODS: dict[str, Callable[[Subject], Any]] = {
    "ValueZeroing": _maps(vz.ValueZeroing),
    "ValueZeroing, one row": _row(vz.ValueZeroing),
    "ValueZeroing, pairs of tokens": _groups,
    "ValueZeroing, one head": _maps(vz.ValueZeroing, heads=[1]),
    "ValueZeroing, mean": _maps(vz.ValueZeroing, intervention="mean", distance="euclidean"),
    "ValueZeroing, knockout": _maps(vz.ValueZeroing, intervention="knockout"),
    "ValueZeroingRollout": _maps(vz.ValueZeroingRollout),
    "ValueZeroingEffect": _effect,
    "AttnLRP": _relevance,
    "ValueGates": _gates,
    "LayerAttention": _maps(vz.LayerAttention),
    "AttentionRollout": _maps(vz.AttentionRollout),
    "AttentionFlow": _row(vz.AttentionFlow),
    "LayerAttentionGradient": _maps(AttentionGradient),
    "LayerAttentionNorm": _maps(vz.LayerAttentionNorm),
    "Rollout": _rollout,
    "GlobEnc": _maps(vz.GlobEnc),
    "LayerALTI": _maps(vz.LayerALTI),
    "ALTI": _maps(vz.ALTI),
    "ALTIPlus": _both_stacks,
    "ALTILogit": _logit,
    "ALTILogit, terms": _terms,
    "HiddenTokenAttribution": _row(vz.HiddenTokenAttribution, probes=3),
    "TokenAttribution": _gradients,
    "PositionAttribution": _position,
    "RandomAttribution": _random,
    "ValueZeroing, cross": _maps(vz.ValueZeroing, attention="cross"),
    "ValueZeroingEffect, cross": lambda one: vz.ValueZeroingEffect(one.model, one.layers, attention="cross").attribute(
        one.inputs, target=some_features
    ),
    "LayerAttention, cross": _maps(vz.LayerAttention, attention="cross"),
    "LayerAttentionNorm, cross": _maps(vz.LayerAttentionNorm, attention="cross"),
}
