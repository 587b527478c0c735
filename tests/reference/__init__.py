"""Expected values for the tests: tiny models of many families, and naive twins of the methods in loops and float64."""

from tests.reference.attention import naive_attention, naive_attention_maps, naive_flow, naive_rollout
from tests.reference.case import Attention, Case, Family
from tests.reference.families import FAMILIES, FIRST_FAMILIES, FURTHER_FAMILIES, SEQUENCE_TO_SEQUENCE
from tests.reference.naive import naive_value_zeroing, naive_value_zeroing_maps

__all__ = [
    "FAMILIES",
    "FIRST_FAMILIES",
    "FURTHER_FAMILIES",
    "SEQUENCE_TO_SEQUENCE",
    "Attention",
    "Case",
    "Family",
    "naive_attention",
    "naive_attention_maps",
    "naive_flow",
    "naive_rollout",
    "naive_value_zeroing",
    "naive_value_zeroing_maps",
]
