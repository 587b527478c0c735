"""The metrics of a study."""

from captum_vz.study.scoring.metrics.batch import EvaluationBatch, check_removal, removal_of, stacked
from captum_vz.study.scoring.metrics.copies import moved_copies, randomized_copies, sensitivity_values
from captum_vz.study.scoring.metrics.registry import (
    DEFAULT_METRICS,
    METRICS,
    VARIANTS,
    Metric,
    Variant,
    check_metrics,
    given_metrics,
    register_metric,
)

__all__ = [
    "DEFAULT_METRICS",
    "METRICS",
    "VARIANTS",
    "EvaluationBatch",
    "Metric",
    "Variant",
    "check_metrics",
    "check_removal",
    "given_metrics",
    "moved_copies",
    "randomized_copies",
    "register_metric",
    "removal_of",
    "sensitivity_values",
    "stacked",
]
