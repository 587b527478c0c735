"""Value Zeroing and its attention baselines as Captum attributions."""

import captum_vz._start  # noqa: F401  # before torch, whose import Ctrl-C may interrupt
from captum_vz import attr, functional
from captum_vz._engine import find_layers
from captum_vz.attr import *  # noqa: F403  # the names of captum_vz.attr, listed there
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional import to_embeddings, token_scores
from captum_vz.verification import verify

__version__ = "0.1.0"

__all__ = [
    *attr.__all__,
    "ArgumentError",
    "RefusedError",
    "UnsupportedLayerError",
    "__version__",
    "find_layers",
    "functional",
    "to_embeddings",
    "token_scores",
    "verify",
]
