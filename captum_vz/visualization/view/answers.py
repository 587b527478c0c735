"""The score of a learner's predictions, computed from the result string that the page shows."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization.view.data import PageData
from captum_vz.visualization.view.page import fingerprint

#: page; method; map; unit; kinds that were left out; row>answer of each question; right answers; points
_RESULT = re.compile(
    r"captum-vz-predict 1; page ([0-9a-f]{8}); method (\d+); map (\d+); (pieces|words); without (\d*|-); "
    r"((?:\d+>\d+)(?:,\d+>\d+)*); (\d+) right; (\d+) points"
)


class Score(NamedTuple):
    """A learner's score: the number of questions, of right answers, and the mean of the points from 0 to 100."""

    questions: int
    right: int
    points: int


def score_answers(data: PageData, result: str) -> Score:
    """Compute the score of a result string again, and compare. See :meth:`View.grade`."""
    match = _RESULT.fullmatch(result.strip())
    if match is None:
        raise ArgumentError(f"{result[:80]!r} is no result string: pass the whole line that the page shows at the end.")
    page, method, panel, unit, without, answers, right, points = match.groups()
    if page != fingerprint(data):
        raise ArgumentError(f"The result is of page {page}, and this page is {fingerprint(data)}: pass the same maps.")
    words = unit == "words"
    hidden = set() if without == "-" else {int(kind) for kind in without}
    try:
        scores = _units(data, data.encoded.maps[int(method)][int(panel)], words)
        found = [_points(data, scores, words, hidden, *map(int, one.split(">"))) for one in answers.split(",")]
    except IndexError as error:
        raise ArgumentError(f"The result {result!r} names a map or a token that the page does not have.") from error
    score = Score(len(found), sum(one == 100 for one in found), int(sum(found) / len(found) + 0.5))
    if (score.right, score.points) != (int(right), int(points)):
        raise ArgumentError(
            f"The result says {right} right and {points} points, but its answers have {score.right} right and "
            f"{score.points} points."
        )
    return score


def _units(data: PageData, scores: Tensor, words: bool) -> Tensor:
    """Scores of tokens, or scores of words: columns are added, rows are averaged."""
    if not words:
        return scores
    rows, columns = (torch.tensor(one.groups) for one in (data.rows, data.columns))
    added = scores.new_zeros(len(scores), len(data.columns.words)).index_add(1, columns, scores)
    total = scores.new_zeros(len(data.rows.words), added.shape[1]).index_add(0, rows, added)
    return total / rows.bincount()[:, None]


def _points(data: PageData, scores: Tensor, words: bool, hidden: set[int], row: int, answer: int) -> int:
    """100 for the strongest source, less in proportion to the score. The token itself is no answer."""
    kinds = data.columns.word_kinds if words else data.columns.kinds
    own = None
    if data.offset is not None:
        own = data.columns.groups[data.rows.groups.index(row) + data.offset] if words else row + data.offset
    allowed = [place for place, kind in enumerate(kinds) if kind not in hidden and place != own]
    if answer not in allowed:
        raise IndexError(answer)
    highest = scores[row, allowed].abs().max().item()
    return int(100 * scores[row, answer].abs().item() / highest + 0.5) if highest else 0
