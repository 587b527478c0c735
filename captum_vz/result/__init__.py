"""The one result of `explain`, `compare` and `attribute_generation`: rows x layers x tokens, by methods."""

from captum_vz.result.explanation import Explanation
from captum_vz.result.part import Maps, Part, Row
from captum_vz.result.several import Explanations
from captum_vz.result.words import TokenText

__all__ = ["Explanation", "Explanations", "Maps", "Part", "Row", "TokenText"]
