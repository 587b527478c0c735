"""What maps and scores are judged by. Needs the extra `study` (scipy and scikit-learn, which do the statistics).

All take rows of scores `(batch, tokens)` and give one number an example, NaN where there is none to give; `summarize`
makes them a mean with a confidence interval over examples, and counts what was NaN.

================================================ ===============================================================
question                                         function
================================================ ===============================================================
does it look at the cue?                         `cue_dot_product`, `cue_average_precision`
does it point at what the prediction rests on?   `blank_out` with `spearman`; `comprehensiveness`, `sufficiency`
do two methods agree?                            `spearman`, `kendall`, `top_k_overlap`
can the label be read off the representation?    `description_length`, and `probing_correlation` with cue alignment
how sure is that?                                `summarize`
================================================ ===============================================================
"""

from captum_vz.metrics.agreement import kendall, spearman, top_k_overlap
from captum_vz.metrics.cue_alignment import cue_average_precision, cue_dot_product
from captum_vz.metrics.faithfulness import FRACTIONS, blank_out, comprehensiveness, sufficiency
from captum_vz.metrics.prediction import Prediction, content_tokens
from captum_vz.metrics.probing import BOUNDARIES, DescriptionLength, description_length
from captum_vz.metrics.probing_correlation import Correlation, probing_correlation
from captum_vz.metrics.summary import Summary, summarize

__all__ = [
    "BOUNDARIES",
    "FRACTIONS",
    "Correlation",
    "DescriptionLength",
    "Prediction",
    "Summary",
    "blank_out",
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
