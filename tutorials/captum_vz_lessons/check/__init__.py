"""Grades for the exercises of the lessons: the answer is compared with the package's own classes, to 1e-5.

Each function returns a :class:`Verdict`, which is true if the answer is right. If it is wrong, the verdict names the
usual mistake that gives the same numbers.

>>> from captum_vz_lessons import check
>>> check.patch_token(..., 0, 1, patch=2, side=4)
Not yet. patch_token: there is no answer yet. Expected a number.
You go on with the package's answer. This exercise counts as open.
>>> check.patch_token(0, 0, 1, patch=2, side=4, hint=True)
Not yet. patch_token: [CLS] is token 0, so the patches begin at token 1.
Hint: Divide row and column by the side of a patch, without remainder. Count the patches row by row. ...
You go on with the package's answer. This exercise counts as open.
"""

from captum_vz_lessons.check.answers import (
    attention,
    average_precision,
    blank_out,
    copied_from,
    deletion,
    found_rate,
    frame_centers,
    generation_slice,
    hidden_share,
    kendall,
    patch_token,
    place_shares,
    verified,
)
from captum_vz_lessons.check.maps import (
    SENTENCE,
    effect,
    layer_products,
    neighbor_share,
    pair_share,
    path_share,
    rollout,
    source_read,
    value_zeroing,
)
from captum_vz_lessons.check.verdict import Verdict

__all__ = [
    "SENTENCE",
    "Verdict",
    "attention",
    "average_precision",
    "blank_out",
    "copied_from",
    "deletion",
    "effect",
    "found_rate",
    "frame_centers",
    "generation_slice",
    "hidden_share",
    "kendall",
    "layer_products",
    "neighbor_share",
    "pair_share",
    "patch_token",
    "path_share",
    "place_shares",
    "rollout",
    "source_read",
    "value_zeroing",
    "verified",
]
