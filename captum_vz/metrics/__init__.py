"""Metrics of maps and scores. They need the extra `study` (scipy and scikit-learn, which do the statistics).

Each metric takes rows of scores `(batch, tokens)` and returns one number for each example, NaN where it is undefined.
`summarize` computes their mean with a confidence interval over examples, and counts the NaN. Arguments of wrong shapes
or values are an :class:`~captum_vz.ArgumentError`, which says what to pass.

The page on studies lists them with their papers: agreement with cues (`cue_...`), what the prediction needs
(`blank_out` with `spearman`, `comprehensiveness` and its like, with bounds and `normalized`), agreement of methods,
probes, and comparisons of means.
"""

from captum_vz.metrics.agreement import (
    cue_average_precision,
    cue_dot_product,
    cue_precision,
    cue_reciprocal_rank,
    kendall,
    spearman,
    top_k_overlap,
)
from captum_vz.metrics.faithfulness import (
    EXHAUSTIVE,
    FRACTIONS,
    Bounds,
    blank_out,
    comprehensiveness,
    comprehensiveness_bounds,
    deletion_area,
    deletion_bounds,
    deletion_curve,
    monotonicity,
    normalized,
    sufficiency,
    sufficiency_bounds,
)
from captum_vz.metrics.intervals import Difference, Summary, compare_pairs, summarize, summarize_many
from captum_vz.metrics.prediction import MaskedSentences, Prediction, content_tokens
from captum_vz.metrics.probing import (
    BOUNDARIES,
    Correlation,
    DescriptionLength,
    description_length,
    linear_probe,
    probing_correlation,
)
from captum_vz.metrics.sampled import infidelity, soft_comprehensiveness, soft_sufficiency

__all__ = [
    "BOUNDARIES",
    "EXHAUSTIVE",
    "FRACTIONS",
    "Bounds",
    "Correlation",
    "DescriptionLength",
    "Difference",
    "MaskedSentences",
    "Prediction",
    "Summary",
    "blank_out",
    "compare_pairs",
    "comprehensiveness",
    "comprehensiveness_bounds",
    "content_tokens",
    "cue_average_precision",
    "cue_dot_product",
    "cue_precision",
    "cue_reciprocal_rank",
    "deletion_area",
    "deletion_bounds",
    "deletion_curve",
    "description_length",
    "infidelity",
    "kendall",
    "linear_probe",
    "monotonicity",
    "normalized",
    "probing_correlation",
    "soft_comprehensiveness",
    "soft_sufficiency",
    "spearman",
    "sufficiency",
    "sufficiency_bounds",
    "summarize",
    "summarize_many",
    "top_k_overlap",
]
