"""Records of scores for Captum's `visualize_text`."""

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
    r"""A record of tokens and their scores, which Captum's `visualize_text` draws as one row of coloured words.

    .. math:: \text{colour}_j = s_j / \textstyle\max_k |s_k|

    Captum's colours end at -1 and 1 for every method. Scores of a row of T tokens are about 1/T, and gradients have any
    size. Each row is therefore scaled by its own largest score, so that rows of different methods can be compared by
    where they are darkest. The column "Attribution Score" holds the sum of the scores before scaling.

    Args:
        tokens: The words to draw. HTML characters such as ``<`` are escaped, as in the names of classes.
        scores: One score for each token, of any method and either sign: `(tokens,)`, or `(1, tokens)` as `attribute`
            returns it for one sentence and one token.
        attr_class: The column "Attribution Label", such as the method, or what the scores explain.
        true_class: The column "True Label".
        pred_class: The column "Predicted Label", the model's prediction.
        pred_prob: The probability of the prediction, written in the same column.

    Returns:
        A record. `captum.attr.visualization.visualize_text` takes a list of records.

    Raises:
        ArgumentError: Scores do not fit the tokens, or are not finite.

    >>> record = text_record(["the", "pictures", "[MASK]"], torch.tensor([0.1, 0.5, 0.4]), attr_class="Value Zeroing")
    >>> record.word_attributions, round(record.attr_score, 4)
    (tensor([0.2000, 1.0000, 0.8000]), 1.0)
    """
    scores = one_example(scores, tokens, dimensions=1)
    largest = scores.abs().max()
    return visualization.VisualizationDataRecord(
        word_attributions=scores / largest if largest > 0 else scores,
        pred_prob=pred_prob,
        pred_class=escape(str(pred_class)),  # Captum writes what it is given into HTML
        true_class=escape(str(true_class)),
        attr_class=escape(str(attr_class)),
        attr_score=scores.sum().item(),
        raw_input_ids=[escape(token) for token in tokens],
        convergence_score=0.0,
    )
