"""The one result of `explain`, `compare` and `attribute_generation`: rows x layers x tokens, by methods."""

from captum_vz.result.explanation import Explanation
from captum_vz.result.part import Maps, Part, Row
from captum_vz.result.words import TokenText

__all__ = ["Explanation", "Maps", "Part", "Row", "TokenText"]
