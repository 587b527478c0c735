"""The methods that can be compared, by their names, and what they say about a batch."""

from captum_vz.study.methods.batch import Batch, encoder_of
from captum_vz.study.methods.registry import (
    DEFAULT_METHODS,
    METHODS,
    Method,
    check_methods,
    family_of,
    joined_first,
    rollout_of,
)

__all__ = [
    "DEFAULT_METHODS",
    "METHODS",
    "Batch",
    "Method",
    "check_methods",
    "encoder_of",
    "family_of",
    "joined_first",
    "rollout_of",
]
