"""Generated text: how much each new token depends on each token of the prompt, in each layer."""

from captum_vz.generation.attribute import attribute_generation
from captum_vz.generation.context import ContextReliance, context_reliance
from captum_vz.generation.llm import LLMTokenMaps, gated_input, to_captum_llm
from captum_vz.generation.result import GenerationAttribution

__all__ = [
    "ContextReliance",
    "GenerationAttribution",
    "LLMTokenMaps",
    "attribute_generation",
    "context_reliance",
    "gated_input",
    "to_captum_llm",
]
