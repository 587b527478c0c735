"""Metrics of maps and scores. They need the extra `study` (scipy and scikit-learn, which do the statistics).

Each metric takes rows of scores `(batch, tokens)` and returns one number for each example, NaN where it is undefined.
`summarize` computes their mean with a confidence interval over examples, and counts the NaN.

================================================ ===============================================================
question                                         function
================================================ ===============================================================
do the scores lie on the cue?                    `cue_dot_product`, `cue_average_precision`
do the scores find what the prediction needs?    `blank_out` with `spearman`; `comprehensiveness`, `sufficiency`
do two methods agree?                            `spearman`, `kendall`, `top_k_overlap`
does the representation hold the label?          `description_length`, and `probing_correlation` with cue alignment
how certain is a mean?                           `summarize`
do two methods differ on the same examples?      `compare_pairs`
================================================ ===============================================================
"""

from captum_vz.metrics.agreement import kendall, spearman, top_k_overlap
from captum_vz.metrics.cue_alignment import cue_average_precision, cue_dot_product
from captum_vz.metrics.faithfulness import FRACTIONS, blank_out, comprehensiveness, sufficiency
from captum_vz.metrics.intervals import Correlation, Summary, probing_correlation, summarize
from captum_vz.metrics.paired import Difference, compare_pairs
from captum_vz.metrics.prediction import MaskedSentences, Prediction, content_tokens
from captum_vz.metrics.probing import BOUNDARIES, DescriptionLength, description_length

__all__ = [
    "BOUNDARIES",
    "FRACTIONS",
    "Correlation",
    "DescriptionLength",
    "Difference",
    "MaskedSentences",
    "Prediction",
    "Summary",
    "blank_out",
    "compare_pairs",
    "comprehensiveness",
    "content_tokens",
    "cue_average_precision",
    "cue_dot_product",
    "description_length",
    "kendall",
    "probing_correlation",
    "spearman",
    "sufficiency",
    "summarize",
    "top_k_overlap",
]
