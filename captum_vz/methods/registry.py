"""The methods of this package, by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from captum.attr import InputXGradient, IntegratedGradients, Saliency, ShapleyValueSampling

import captum_vz as vz
from captum_vz._names import DEFAULT_METHODS, chosen_names
from captum_vz.methods import kinds
from captum_vz.methods.decision import DecidingMethod, DecisionMethod
from captum_vz.methods.method import Method


def _norm_rollout(model: Any, layers: Any, residual: Any = 0.5) -> vz.Rollout:
    """Norms of what the attention alone sums. The residual connection is added as for attention weights."""
    return vz.Rollout(vz.LayerAttentionNorm(model, layers), residual=residual)


_encoder_norm: Final = partial(vz.LayerAttentionNorm, include="encoder")
# With 64 probes the relative standard deviation of a score is at most about half of sqrt(2 / 64), or 0.09.
_hidden: Final = partial(vz.HiddenTokenAttribution, probes=64)
_effect: Final = kinds.EffectMethod("Value Zeroing's effect", vz.ValueZeroingEffect)
_relevance: Final = kinds.RelevanceMethod("AttnLRP", vz.AttnLRP)
_constant: Final = kinds.RelevanceMethod("CP-LRP", partial(vz.AttnLRP, cp_lrp=True))
_steps: Final[dict[str, Any]] = {"n_steps": 50, "internal_batch_size": 256}
_integrated: Final[dict[str, Any]] = {"baselines": "pad", **_steps}

#: All methods by their names. To add a method, add one row, and its name to `captum_vz._names`.
METHODS: Final[dict[str, Method]] = {
    "value-zeroing": kinds.LayerMethod("Value Zeroing", vz.ValueZeroing),
    "value-zeroing-rollout": kinds.JoinedMethod(
        "Value Zeroing, rollout", partial(vz.ValueZeroingRollout, residual=0.5), vz.ValueZeroing
    ),
    "value-zeroing-rollout-paper": kinds.JoinedMethod(
        "Value Zeroing, the paper's rollout", partial(vz.ValueZeroingRollout, residual=None), vz.ValueZeroing
    ),
    "attention": kinds.LayerMethod("attention", vz.LayerAttention),
    "attention-rollout": kinds.JoinedMethod(
        "attention rollout", partial(vz.AttentionRollout, residual=0.5), vz.LayerAttention
    ),
    "attention-rollout-paper": kinds.JoinedMethod(
        "attention rollout, no residual", partial(vz.AttentionRollout, residual=None), vz.LayerAttention
    ),
    "attention-norm": kinds.LayerMethod("attention norm", vz.LayerAttentionNorm),
    "attention-norm-rollout": kinds.JoinedMethod("attention norm, rollout", _norm_rollout, vz.LayerAttentionNorm),
    "globenc": kinds.JoinedMethod("GlobEnc", vz.GlobEnc, _encoder_norm),
    "globenc-layer": kinds.LayerMethod("GlobEnc, a layer", _encoder_norm),
    "alti": kinds.JoinedMethod("ALTI", vz.ALTI, vz.LayerALTI),
    "alti-layer": kinds.LayerMethod("ALTI, a layer", vz.LayerALTI),
    "value-zeroing-effect": _effect,
    "value-zeroing-effect-layer": kinds.EffectMethod("Value Zeroing's effect, a layer", vz.ValueZeroingEffect, True),
    "value-zeroing-shapley": kinds.GateMethod(
        "Value Zeroing, Shapley", ShapleyValueSampling, options={"n_samples": 25, "perturbations_per_eval": 16}
    ),
    "value-zeroing-integrated": kinds.GateMethod("Value Zeroing, integrated", IntegratedGradients, options=_steps),
    "attention-flow": kinds.JoinedMethod("attention flow", vz.AttentionFlow, vz.LayerAttention, layered=False),
    "attention-gradient": kinds.LayerMethod("attention × gradient", vz.LayerAttentionGradient),
    "saliency": kinds.GradientMethod("saliency", Saliency, "l2", options={"abs": False}),
    "input-x-gradient": kinds.GradientMethod("input × gradient", InputXGradient),
    "input-x-gradient-l2": kinds.GradientMethod("input × gradient, norm", InputXGradient, "l2"),
    "integrated-gradients": kinds.GradientMethod("integrated gradients", IntegratedGradients, options=_integrated),
    "integrated-gradients-l2": kinds.GradientMethod(
        "integrated gradients, norm", IntegratedGradients, "l2", options=_integrated
    ),
    "hidden-token-attribution": kinds.LayerMethod("hidden token attribution", _hidden),
    "attn-lrp": _relevance,
    "decision": DecisionMethod("decision", _effect, _constant, _relevance),
    "alti-logit": kinds.LogitMethod("ALTI-Logit", vz.ALTILogit),
    "random": kinds.BaselineMethod("random", vz.RandomAttribution),
    "position": kinds.BaselineMethod("position", vz.PositionAttribution),
}

#: The method of maps, and what says on which tokens a decision rests.
MAPS, DECISION = "value-zeroing", "decision"
#: What a user passes as `layer` for the layer in which the token reads what the decision rests on.
DECIDING: Final = "deciding"
#: Models of next words with as many layers are asked by default on what a word rests, and where that is read.
DEEP: Final = 12


def known_methods() -> dict[str, Method]:
    """All methods by their names, and NAME:deciding for each method with a map for each layer."""
    decision = METHODS[DECISION]
    deciding = {
        f"{name}:{DECIDING}": DecidingMethod(f"{one.title}, the layer that decides", one, decision)
        for name, one in METHODS.items()
        if one.shows_layers
    }
    return METHODS | deciding


def check_methods(methods: Iterable[str] | None) -> tuple[str, ...]:
    """The names, in the order given; None: :data:`DEFAULT_METHODS`. Unknown names are refused."""
    return chosen_names("methods", methods, known_methods(), DEFAULT_METHODS)


def joined_first(names: Iterable[str], methods: Mapping[str, Method]) -> list[str]:
    """The names, methods that join maps first. Methods that need rows of these maps then find them."""
    return sorted(names, key=lambda name: not methods[name].joins)


def rollout_of(method: Method) -> Method | None:
    """The first method of the registry that joins the layer maps of `method`; itself, if it joins them."""
    if method.maps is None or method.joins:
        return method if method.maps is not None else None
    return next((one for one in METHODS.values() if one.joins and one.maps is method.maps), None)
