"""Scores as records of text, which Captum's own pictures take, and pages of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from captum.attr import visualization
from torch import Tensor

from captum_vz._files import write_file
from captum_vz.errors import ArgumentError
from captum_vz.visualization.tokens import one_example, printable

_HEADS = ("True Label", "Predicted Label", "Attribution Label", "Attribution Score", "Word Importance")
_STYLE = (
    "body{font:16px/1.6 system-ui,sans-serif;margin:2rem;color:#111;background:#fff}h1{font-size:1.1rem}"
    "table{border-collapse:collapse}th,td{padding:.3rem .8rem;text-align:left;vertical-align:top}"
    "th{border-bottom:1px solid #888}td{overflow-wrap:anywhere}caption{text-align:left}"
    # On a narrow page, the words stand below the labels.
    "@media(max-width:40rem){body{margin:1rem}tr{display:flex;flex-wrap:wrap}td:last-child{flex-basis:100%}"
    "td,th{padding:.1rem .5rem;border:0}}"
)


class _Unknown(float):
    """A probability that nobody gave. In Captum's "are (0.75)" it hides itself and the brackets around it."""

    def __format__(self, spec: str) -> str:
        return ""


class _Unbracketed(str):
    """The name of a class. Captum writes " (" after it: hidden, with all that follows, to the end of the cell."""

    def __format__(self, spec: str) -> str:
        return str(self) + '<span hidden style="display:none">'


def text_record(
    tokens: Sequence[str],
    scores: Tensor,
    *,
    attr_class: str = "",
    true_class: str = "",
    pred_class: str = "",
    pred_prob: float | None = None,
) -> visualization.VisualizationDataRecord:
    r"""A record of tokens and their scores, which Captum's `visualize_text` draws as one row of coloured words.

    .. math:: \text{colour}_j = s_j / \textstyle\max_k |s_k|

    Captum's colours end at -1 and 1 for every method. Scores of a row of T tokens are about 1/T, and gradients have any
    size. Each row is therefore scaled by its own largest score, so that rows of different methods can be compared by
    where they are darkest. The column "Attribution Score" holds the sum of the scores before scaling.

    Args:
        tokens: The words to draw. HTML and control characters are escaped, as in the names of classes.
        scores: One score for each token, of either sign, `(tokens,)` or `(1, tokens)`.
        attr_class: The column "Attribution Label", such as the method, or what the scores explain.
        true_class: The column "True Label".
        pred_class: The column "Predicted Label", the model's prediction.
        pred_prob: The probability of the prediction, written in the same column. None: no number is shown.

    Returns:
        A record. `captum.attr.visualization.visualize_text` takes a list of records.

    Raises:
        ArgumentError: Scores do not fit the tokens, or are not finite.

    >>> import torch
    >>> record = text_record(["the", "pictures", "[MASK]"], torch.tensor([0.1, 0.5, 0.4]), attr_class="Value Zeroing")
    >>> record.word_attributions, round(record.attr_score, 4)
    (tensor([0.2000, 1.0000, 0.8000]), 1.0)
    """
    scores = one_example(scores, len(tokens))
    largest = scores.abs().max() if scores.any() else 1.0
    predicted = escape(str(pred_class))  # Captum writes what it is given into HTML
    return visualization.VisualizationDataRecord(
        word_attributions=scores / largest,
        pred_prob=_Unknown("nan") if pred_prob is None else pred_prob,
        pred_class=_Unbracketed(predicted) if pred_prob is None else predicted,
        true_class=escape(str(true_class)),
        attr_class=escape(str(attr_class)),
        attr_score=scores.sum().item(),
        raw_input_ids=[escape(printable(token)) for token in tokens],
        convergence_score=0.0,
    )


def save_html(
    records: Iterable[visualization.VisualizationDataRecord], path: str | Path, title: str = "Word importance"
) -> str:
    """Write records as a page of HTML, with Captum's colours. The page loads nothing and needs no notebook.

    Columns that no record fills are left out.

    Args:
        records: What :func:`text_record` returned, for any number of methods and texts.
        path: The file.
        title: The title of the page.

    Returns:
        The page.

    Raises:
        ArgumentError: There is no record.
    """
    lines = [_cells(record) for record in records]
    if not lines:
        raise ArgumentError("save_html needs at least one record, got none.")
    shown = [column for column in range(len(_HEADS)) if any(line[column] for line in lines)]
    heads = "".join(f'<th scope="col">{_HEADS[column]}</th>' for column in shown)
    body = "".join(f"<tr>{''.join(line[column] or '<td></td>' for column in shown)}</tr>" for line in lines)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        "<table><caption>Green: positive, red: negative. Each row is scaled by its own largest score.</caption>"
        f"<tr>{heads}</tr>{body}</table></main></body></html>\n"
    )
    page = page.encode("ascii", "xmlcharrefreplace").decode()  # read alike in any encoding
    write_file(path, page)
    return page


def _cells(record: Any) -> list[str]:
    """The cells of a record, empty where nothing was given."""
    known = record.pred_prob == record.pred_prob
    predicted = f"{record.pred_class!s} ({record.pred_prob:.2f})" if known else str(record.pred_class)
    total = f"{record.attr_score:.2f}"
    texts = [str(record.true_class), predicted, str(record.attr_class), "0.00" if total == "-0.00" else total]
    cells = [f"<td>{text}</td>" if text else "" for text in texts]
    return [*cells, visualization.format_word_importances(record.raw_input_ids, record.word_attributions)]
