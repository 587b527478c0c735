"""Faithfulness: does an attribution find the tokens that the prediction needs?"""

from captum_vz.metrics.faithfulness.blank_out import blank_out
from captum_vz.metrics.faithfulness.captums import infidelity
from captum_vz.metrics.faithfulness.curves import deletion_area, deletion_bounds, deletion_curve, monotonicity
from captum_vz.metrics.faithfulness.eraser import (
    FRACTIONS,
    comprehensiveness,
    comprehensiveness_bounds,
    sufficiency,
    sufficiency_bounds,
)
from captum_vz.metrics.faithfulness.orders import EXHAUSTIVE, Bounds, normalized
from captum_vz.metrics.faithfulness.soft import soft_comprehensiveness, soft_sufficiency

__all__ = [
    "EXHAUSTIVE",
    "FRACTIONS",
    "Bounds",
    "blank_out",
    "comprehensiveness",
    "comprehensiveness_bounds",
    "deletion_area",
    "deletion_bounds",
    "deletion_curve",
    "infidelity",
    "monotonicity",
    "normalized",
    "soft_comprehensiveness",
    "soft_sufficiency",
    "sufficiency",
    "sufficiency_bounds",
]
