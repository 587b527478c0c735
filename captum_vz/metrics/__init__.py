"""Metrics of maps and scores. They need the extra `study` (scipy and scikit-learn, which do the statistics).

Each metric takes rows of scores `(batch, tokens)` and returns one number for each example, NaN where it is undefined.
`summarize` computes their mean with a confidence interval over examples, and counts the NaN.

================================================ ===============================================================
question                                         function
================================================ ===============================================================
do the scores lie on the cue?                    `cue_dot_product`, `cue_average_precision`, `cue_reciprocal_rank`,
                                                 `cue_precision`
do the scores find what the prediction needs?    `blank_out` with `spearman`; `comprehensiveness`, `sufficiency` and
                                                 `deletion_area` with their bounds and `normalized`; `monotonicity`;
                                                 `soft_comprehensiveness`, `soft_sufficiency`; `infidelity`
do two methods agree?                            `spearman`, `kendall`, `top_k_overlap`
does the representation hold the label?          `description_length`, `linear_probe`; `probing_correlation` with
                                                 cue alignment
how certain is a mean?                           `summarize`, `summarize_many`
do two methods differ on the same examples?      `compare_pairs`
================================================ ===============================================================
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
