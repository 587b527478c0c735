"""Value Zeroing and its attention baselines as Captum attributions."""

from importlib import import_module
from typing import Any, Final

import captum_vz._start  # noqa: F401  # before torch, whose import Ctrl-C may interrupt
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
    LayerAttentionGradient,
    LayerAttentionNorm,
    PositionAttribution,
    RandomAttribution,
    Rollout,
    TokenAttribution,
    ValueGates,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
)
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional import patch_mask, to_embeddings, token_scores, word_mask

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
    "LayerAttentionGradient",
    "LayerAttentionNorm",
    "PositionAttribution",
    "RandomAttribution",
    "RefusedError",
    "Rollout",
    "TokenAttribution",
    "UnsupportedLayerError",
    "ValueGates",
    "ValueZeroing",
    "ValueZeroingEffect",
    "ValueZeroingRollout",
    "__version__",
    "explain",
    "find_layers",
    "functional",
    "patch_mask",
    "to_embeddings",
    "token_scores",
    "verify",
    "word_mask",
]

# Loaded on first use, because pictures, metrics and studies need more packages than the methods.
_ON_FIRST_USE: Final = ("generation", "metrics", "study", "testbed", "text", "visualization")


def __getattr__(name: str) -> Any:
    if name == "explain":
        return import_module("captum_vz.app.explain").explain
    if name == "verify":
        return import_module("captum_vz.verification").verify
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), "explain", "verify", *_ON_FIRST_USE})
