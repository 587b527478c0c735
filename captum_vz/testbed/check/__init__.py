"""Grades for the exercises of the tutorials: the answer is compared with the package's own classes, to 1e-5.

Each function returns a :class:`Verdict`, which is true if the answer is right. If it is wrong, the verdict names the
usual mistake that gives the same numbers.

======================== ============================================ ==================================================
function                 grades                                       mistakes that it recognizes
======================== ============================================ ==================================================
`attention`              a function of q, k, v                        no scale, wrong axis, mask forgotten
`value_zeroing_row`      a row of one layer                           rows and columns swapped, residual forgotten, sum
`value_zeroing_map`      a map of one layer                           the same, columns divided by their sums
`cross_map`              a map of cross-attention                     swapped, self-attention, encoder
`joint_row`              a row in which groups are zeroed             tokens zeroed one at a time
`effect`                 effects on a logit                           sign, last layer only
`rollout`                a product of maps                            order, residual forgotten, entries multiplied
`path_share`             the share of one path through the layers     direction, sum in place of product
`neighbor_share`         shares of neighbors, layer by layer          the word itself, one side, columns
`pair_share`             how much two tokens draw on each other       one direction only
`generation_slice`       `(n, m, layers)` of a generated text         `[m:]` in place of `[m - 1 :]`
`average_precision`      a function                                   ties broken by position
`kendall`                a function                                   ties
`blank_out`              predictions without one token                sign, tokens stay replaced
`deletion`               a curve of predictions                       lowest first, one at a time
`patch_token`            the token of an image's patch                `[CLS]` forgotten, rows and columns swapped
`frame_centers`          where frames stand in a recording            strides not multiplied, begin at 0
`copied_from`            the true columns of a cross map              reading order, one row too late
`source_read`            the token that a cross row points at         a second token of the same kind
`found_rate`             how often the highest score is at a place    other examples, a count
`place_shares`           shares at several places                     rows not divided, order of the means
`hidden_share`           what a mask hides                            what it shows, another layer
`verified`               a model of the learner                       what `captum_vz.verify` finds
`value`                  any number or tensor                         those that the lesson names
======================== ============================================ ==================================================

>>> from captum_vz.testbed import check
>>> check.value_zeroing_row(None)
Not yet. value_zeroing_row: there is no answer yet. Expected numbers of shape (11,).
You go on with the package's answer. This exercise counts as open.
"""

from captum_vz.testbed.check.effects import cross_map, effect, joint_row
from captum_vz.testbed.check.functions import attention, average_precision, blank_out, deletion, kendall, verified
from captum_vz.testbed.check.layers import generation_slice, neighbor_share, pair_share, path_share, rollout
from captum_vz.testbed.check.maps import SENTENCE, value_zeroing_map, value_zeroing_row
from captum_vz.testbed.check.places import (
    copied_from,
    found_rate,
    frame_centers,
    hidden_share,
    patch_token,
    place_shares,
    source_read,
)
from captum_vz.testbed.check.verdict import Verdict, value

__all__ = [
    "SENTENCE",
    "Verdict",
    "attention",
    "average_precision",
    "blank_out",
    "copied_from",
    "cross_map",
    "deletion",
    "effect",
    "found_rate",
    "frame_centers",
    "generation_slice",
    "hidden_share",
    "joint_row",
    "kendall",
    "neighbor_share",
    "pair_share",
    "patch_token",
    "path_share",
    "place_shares",
    "rollout",
    "source_read",
    "value",
    "value_zeroing_map",
    "value_zeroing_row",
    "verified",
]
