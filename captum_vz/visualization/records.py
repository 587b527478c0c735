"""Scores as Captum draws them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torch
from captum.attr import visualization

from captum_vz.visualization._checks import one_example


def text_record(
    tokens: Sequence[str],
    scores: torch.Tensor,
    *,
    attr_class: str = "",
    true_class: str = "",
    pred_class: str = "",
    pred_prob: float = 0.0,
) -> visualization.VisualizationDataRecord:
    r"""Turns tokens and their scores into what Captum's `visualize_text` draws: one row of coloured words.

    .. math:: \text{colour}_j = s_j / \textstyle\max_k |s_k|

    Captum's colours end at -1 and 1, whatever the method. Scores of a row of T tokens are about 1/T, gradients of any
    size; each row is therefore scaled by its own largest score, so that rows of different methods can be compared by
    where they are darkest. The sum of the scores as they are stands in the column "Attribution Score".

    Args:
        tokens: The words to draw. Characters that mean something in HTML are escaped.
        scores: One score for each token, of any method and either sign: `(tokens,)`, or `(1, tokens)` as `attribute`
            returns it for one sentence and one target.
        attr_class: The column "Attribution Label": what the scores explain, or by which method.
        true_class: The column "True Label".
        pred_class: The column "Predicted Label", what the model answers.
        pred_prob: The probability of that answer, beside it.

    Returns:
        A record for the list that `captum.attr.visualization.visualize_text` takes.

    Raises:
        AssertionError: Scores that do not fit the tokens, or that are not finite.

    >>> record = text_record(["the", "pictures", "[MASK]"], torch.tensor([0.1, 0.5, 0.4]), attr_class="Value Zeroing")
    >>> record.word_attributions, round(record.attr_score, 4)
    (tensor([0.2000, 1.0000, 0.8000]), 1.0)
    """
    scores = one_example(scores, tokens, dimensions=1)
    largest = scores.abs().max()
    return visualization.VisualizationDataRecord(
        word_attributions=scores / largest if largest > 0 else scores,
        pred_prob=pred_prob,
        pred_class=pred_class,
        true_class=true_class,
        attr_class=attr_class,
        attr_score=scores.sum().item(),
        raw_input_ids=[escape(token) for token in tokens],
        convergence_score=0.0,
    )
