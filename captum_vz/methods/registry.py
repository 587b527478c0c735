"""The methods of this package, by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from captum.attr import InputXGradient, IntegratedGradients, Saliency, ShapleyValueSampling

from captum_vz import (
    ALTI,
    ALTILogit,
    AttentionFlow,
    AttentionRollout,
    AttnLRP,
    GlobEnc,
    HiddenTokenAttribution,
    LayerALTI,
    LayerAttention,
    LayerAttentionGradient,
    LayerAttentionNorm,
    PositionAttribution,
    RandomAttribution,
    Rollout,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
)
from captum_vz._names import chosen_names
from captum_vz.methods.maps import JoinedMethod, LayerMethod
from captum_vz.methods.method import Method
from captum_vz.methods.output import (
    BaselineMethod,
    EffectMethod,
    GateMethod,
    GradientMethod,
    LayerEffectMethod,
    LogitMethod,
    RelevanceMethod,
)


def _norm_rollout(model: Any, layers: Any, residual: Any = 0.5) -> Rollout:
    """Norms of what the attention alone sums. The residual connection is added as for attention weights."""
    return Rollout(LayerAttentionNorm(model, layers), residual=residual)


_encoder_norm: Final = partial(LayerAttentionNorm, include="encoder")
# With 64 probes the relative standard deviation of a score is at most about half of sqrt(2 / 64), or 0.09.
_hidden: Final = partial(HiddenTokenAttribution, probes=64)
_integrated: Final[dict[str, Any]] = {"baselines": "pad", "n_steps": 50, "internal_batch_size": 256}

#: All methods by their names. To add a method, add one row.
METHODS: Final[dict[str, Method]] = {
    "value-zeroing": LayerMethod("Value Zeroing", ValueZeroing),
    "value-zeroing-rollout": JoinedMethod(
        "Value Zeroing, rollout", partial(ValueZeroingRollout, residual=0.5), ValueZeroing
    ),
    "value-zeroing-rollout-paper": JoinedMethod(
        "Value Zeroing, the paper's rollout", partial(ValueZeroingRollout, residual=None), ValueZeroing, extra=True
    ),
    "attention": LayerMethod("attention", LayerAttention),
    "attention-rollout": JoinedMethod("attention rollout", partial(AttentionRollout, residual=0.5), LayerAttention),
    "attention-rollout-paper": JoinedMethod(
        "attention rollout, no residual", partial(AttentionRollout, residual=None), LayerAttention, extra=True
    ),
    "attention-norm": LayerMethod("attention norm", LayerAttentionNorm),
    "attention-norm-rollout": JoinedMethod("attention norm, rollout", _norm_rollout, LayerAttentionNorm),
    "globenc": JoinedMethod("GlobEnc", GlobEnc, _encoder_norm),
    "globenc-layer": LayerMethod("GlobEnc, a layer", _encoder_norm),
    "alti": JoinedMethod("ALTI", ALTI, LayerALTI),
    "alti-layer": LayerMethod("ALTI, a layer", LayerALTI),
    "value-zeroing-effect": EffectMethod("Value Zeroing's effect", ValueZeroingEffect),
    "value-zeroing-effect-layer": LayerEffectMethod("Value Zeroing's effect, a layer", ValueZeroingEffect),
    "value-zeroing-shapley": GateMethod(
        "Value Zeroing, Shapley",
        ShapleyValueSampling,
        extra=True,
        options={"n_samples": 25, "perturbations_per_eval": 16},
    ),
    "value-zeroing-integrated": GateMethod(
        "Value Zeroing, integrated",
        IntegratedGradients,
        extra=True,
        options={"n_steps": 50, "internal_batch_size": 256},
    ),
    "attention-flow": JoinedMethod("attention flow", AttentionFlow, LayerAttention, each_layer=False, extra=True),
    "attention-gradient": LayerMethod("attention × gradient", LayerAttentionGradient, extra=True),
    "saliency": GradientMethod("saliency", Saliency, "l2", extra=True, options={"abs": False}),
    "input-x-gradient": GradientMethod("input × gradient", InputXGradient, extra=True),
    "input-x-gradient-l2": GradientMethod("input × gradient, norm", InputXGradient, "l2", extra=True),
    "integrated-gradients": GradientMethod(
        "integrated gradients", IntegratedGradients, extra=True, options=_integrated
    ),
    "integrated-gradients-l2": GradientMethod(
        "integrated gradients, norm", IntegratedGradients, "l2", extra=True, options=_integrated
    ),
    "hidden-token-attribution": LayerMethod("hidden token attribution", _hidden, extra=True),
    "attn-lrp": RelevanceMethod("AttnLRP", AttnLRP, extra=True),
    "alti-logit": LogitMethod("ALTI-Logit", ALTILogit, extra=True),
    "random": BaselineMethod("random", RandomAttribution),
    "position": BaselineMethod("position", PositionAttribution),
}

#: The methods of a study by default: without those that take gradients, gates or flows, and without second forms.
DEFAULT_METHODS: Final = tuple(name for name, method in METHODS.items() if not method.extra)

#: The methods that :func:`~captum_vz.study.compare` shows by default: the columns fit on a page.
COMPARED_METHODS: Final = (
    "value-zeroing",
    "value-zeroing-rollout",
    "value-zeroing-effect",
    "attention-rollout",
    "alti",
)


def check_methods(methods: Iterable[str] | None) -> tuple[str, ...]:
    """The names, in the order given; None: :data:`DEFAULT_METHODS`.

    Raises:
        ArgumentError: A name is not in :data:`METHODS`, or there is no name.
    """
    return chosen_names("methods", methods, METHODS, DEFAULT_METHODS)


def joined_first(names: Iterable[str], methods: Mapping[str, Method]) -> list[str]:
    """The names, methods that join maps first. Methods that need rows of these maps then find them."""
    return sorted(names, key=lambda name: not methods[name].joins)


def rollout_of(method: Method) -> Method | None:
    """The first method of the registry that joins the layer maps of `method`; itself, if it joins them."""
    if method.maps is None or method.joins:
        return method if method.maps is not None else None
    return next((one for one in METHODS.values() if one.joins and one.maps is method.maps), None)
