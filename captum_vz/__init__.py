"""Value Zeroing and its attention baselines as Captum attributions.

Each name is imported on first use: `import captum_vz` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import captum_vz._start  # noqa: F401  # before torch, whose import Ctrl-C may interrupt

if TYPE_CHECKING:
    from captum_vz import functional
    from captum_vz._engine import find_layers
    from captum_vz.app import explain
    from captum_vz.attr import (
        ALTI,
        ALTILogit,
        ALTIPlus,
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
        TokenAttribution,
        ValueGates,
        ValueZeroing,
        ValueZeroingEffect,
        ValueZeroingRollout,
    )
    from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
    from captum_vz.functional import patch_mask, to_embeddings, token_scores, word_mask
    from captum_vz.text import attribute_texts
    from captum_vz.verification import verify

__version__ = "0.1.0"

__all__ = [
    "ALTI",
    "ALTILogit",
    "ALTIPlus",
    "ArgumentError",
    "AttentionFlow",
    "AttentionRollout",
    "AttnLRP",
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
    "attribute_texts",
    "explain",
    "find_layers",
    "functional",
    "patch_mask",
    "to_embeddings",
    "token_scores",
    "verify",
    "word_mask",
]

# The modules that `captum_vz.NAME` finds without an import of their own.
_ROOMS: Final = (
    *("attr", "errors", "functional", "generation", "metrics", "study", "testbed", "text", "verification"),
    "visualization",
)
# Where the names of `__all__` are defined; classes are in `captum_vz.attr`.
_HOMES: Final = {
    "attribute_texts": "text",
    "explain": "app",
    "find_layers": "_engine",
    "verify": "verification",
    **dict.fromkeys(("ArgumentError", "RefusedError", "UnsupportedLayerError"), "errors"),
    **dict.fromkeys(("patch_mask", "to_embeddings", "token_scores", "word_mask"), "functional"),
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'attr')}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
