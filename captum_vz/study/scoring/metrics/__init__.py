"""The metrics of a study."""

from captum_vz.study.scoring.metrics.batch import EvaluationBatch, check_removal, removal_of
from captum_vz.study.scoring.metrics.registry import (
    DEFAULT_METRICS,
    METRICS,
    Metric,
    check_metrics,
    given_metrics,
    register_metric,
)
from captum_vz.study.scoring.metrics.variants import VARIANTS, Variant

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
    "register_metric",
    "removal_of",
]
