"""Generated text: how much each new token depends on each token of the prompt, in each layer."""

from captum_vz.generation.attribute import attribute_generation
from captum_vz.generation.result import GenerationAttribution

__all__ = ["GenerationAttribution", "attribute_generation"]
