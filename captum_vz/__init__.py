"""Value Zeroing and its attention baselines as Captum attributions."""

from captum_vz import functional
from captum_vz._engine import find_layers
from captum_vz.attr import (
    ALTI,
    ALTILogit,
    ALTIPlus,
    AttentionFlow,
    AttentionRollout,
    GlobEnc,
    HiddenTokenAttribution,
    LayerALTI,
    LayerAttention,
    LayerAttentionNorm,
    PositionAttribution,
    RandomAttribution,
    Rollout,
    TokenAttribution,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
)
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional import token_scores

__version__ = "0.1.0"

__all__ = [
    "ALTI",
    "ALTILogit",
    "ALTIPlus",
    "ArgumentError",
    "AttentionFlow",
    "AttentionRollout",
    "GlobEnc",
    "HiddenTokenAttribution",
    "LayerALTI",
    "LayerAttention",
    "LayerAttentionNorm",
    "PositionAttribution",
    "RandomAttribution",
    "RefusedError",
    "Rollout",
    "TokenAttribution",
    "UnsupportedLayerError",
    "ValueZeroing",
    "ValueZeroingEffect",
    "ValueZeroingRollout",
    "__version__",
    "find_layers",
    "functional",
    "token_scores",
]
