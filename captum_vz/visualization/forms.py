"""Scores and tables as text: lines for a terminal, pages of HTML of one file, records for Captum's `visualize_text`."""

from __future__ import annotations

import io
import re
import unicodedata
from base64 import b64encode
from collections.abc import Collection, Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from captum.attr import visualization
from torch import Tensor

from captum_vz._files import write_file
from captum_vz._start import room
from captum_vz.errors import ArgumentError
from captum_vz.visualization.tokens import one_example, position_of, printable

# Backgrounds from white to dark blue and to dark red, in the palette of 256 colours. Text on the last ones is white.
_SHADES: Final = ((231, 189, 153, 111, 68, 25, 18), (231, 224, 217, 210, 167, 124, 88))
_FIRST_DARK: Final = 5
_BAR, _LEAST_BAR = 24, 4  # characters of a full bar; narrower bars are left out
_GAP: Final = "  "  # between the columns of a text
_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]\d+)?")
_STYLE, _RECORD_STYLE = (files(__package__).joinpath(f"{name}.css").read_text("ascii") for name in ("page", "records"))
_HEADS = ("True Label", "Predicted Label", "Attribution Label", "Attribution Score", "Word Importance")


def terminal_text(
    tokens: Sequence[str],
    scores: Tensor,
    token: int | None = None,
    color: bool = True,
    full: float | None = None,
    *,
    signed: bool | None = None,
    columns: int | None = None,
) -> str:
    """Text with one line for each token: its position, the token, its score and a bar.

    Bars of shares are drawn in eighths of a character. Bars of signed scores go to both sides of a middle line, in
    halves of a character: to the right and blue above zero, to the left and red below. Numbers are not scaled.

    Args:
        tokens: The words to write. Control characters are written as escapes.
        scores: One score for each token, `(tokens,)` or `(1, tokens)`.
        token: The position of the token that the scores explain, which is marked. Negative ones count from the end.
        color: Whether to colour the tokens and signed bars. If False, the text holds no escape sequence.
        full: The score of a full bar and of the darkest colour, such as 1 for shares. None: the largest size.
        signed: Whether scores have a sign, which numbers and bars show. None: if a score is negative.
        columns: The width of the lines, which bars become shorter to fit. None: bars of 24 characters.

    Returns:
        Lines of text. The last line has no line break.

    Raises:
        ArgumentError: Scores do not fit the tokens, are not finite, or are negative without `signed`.

    >>> import torch
    >>> print(terminal_text(["pictures", "of", "[MASK]"], torch.tensor([0.5, 0.25, 0.25]), token=2, color=False))
      0  pictures  0.5000  ████████████████████████
      1  of        0.2500  ████████████
    > 2  [MASK]    0.2500  ████████████
    >>> print(terminal_text(["pictures", "of"], torch.tensor([0.5, 0.02]), color=False, full=1))
      0  pictures  0.5000  ████████████
      1  of        0.0200  ▌
    >>> print(terminal_text(["pictures", "of"], torch.tensor([0.5, -0.25]), color=False))
      0  pictures  +0.5000              │████████████
      1  of        -0.2500        ██████│
    """
    scores = one_example(scores, len(tokens)).double()
    signed = bool((scores < 0).any()) if signed is None else signed
    if not signed and (scores < 0).any():
        raise ArgumentError(f"The lowest score is {scores.min():.3g}, but bars begin at 0: pass signed=True.")
    marked = position_of(token, tokens)
    words = [printable(word) for word in tokens]
    width = max(map(columns_of, words), default=0)
    highest = full or (scores.abs().max().item() if scores.any() else 1.0)
    parts = (scores / highest).clamp(-1, 1).tolist()
    form = ("+" if signed else "") + (".1e" if 0 < scores.abs().max() < 0.001 else ".4f") if len(scores) else ""
    numbers = [format(score, form) for score in scores.tolist()]
    digits = len(str(len(words) - 1))
    lead = 8 + digits + width + max(map(len, numbers), default=0) + 2 * color
    length = _BAR if columns is None else min(_BAR, columns - lead - signed)
    lines = []
    for position, (word, number, part) in enumerate(zip(words, numbers, parts, strict=True)):
        padded = word + " " * (width - columns_of(word))
        if color:
            padded = painted(f" {padded} ", part)
        drawn = "" if length < _LEAST_BAR else _signed_bar(part, length, color) if signed else bar(part, length)
        mark = ">" if position == marked else " "
        lines.append(f"{mark} {position:>{digits}}  {padded}  {number}  {drawn}".rstrip())
    return "\n".join(lines)


def painted(text: str, share: float) -> str:
    """The text on a background from white to dark blue for a share from 0 to 1, to dark red for one from 0 to -1."""
    step = round(min(abs(share), 1) * (len(_SHADES[0]) - 1))
    colors = f"48;5;{_SHADES[share < 0][step]};38;5;{231 if step >= _FIRST_DARK else 16}"
    return f"\x1b[{colors}m{text}\x1b[0m"


def bar(share: float, width: int = _BAR) -> str:
    """A bar of block characters, `width` characters long for a share of 1, in eighths of a character.

    >>> bar(0.5, 4), bar(0.3, 4), bar(0, 4)
    ('██', '█▎', '')
    """
    whole, rest = divmod(round(8 * width * share), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()


def _signed_bar(share: float, width: int, color: bool) -> str:
    """A bar from a middle line to the right for a positive share, to the left for a negative one, of -1 to 1."""
    side = width // 2
    whole, rest = divmod(round(2 * side * abs(share)), 2)
    drawn = "▐" * rest + "█" * whole if share < 0 else "█" * whole + "▌" * rest
    shown = f"\x1b[38;5;{_SHADES[share < 0][_FIRST_DARK]}m{drawn}\x1b[0m" if color and drawn else drawn
    return f"{' ' * (side - len(drawn))}{shown}│" if share < 0 else f"{' ' * side}│{shown}"


def columns_of(text: str) -> int:
    """The columns that a text takes in a terminal: two for wide characters, none for combining ones.

    >>> columns_of("hat"), columns_of("猫")
    (3, 2)
    """
    combining = sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)
    return len(text) - combining + sum(unicodedata.east_asian_width(c) in "WF" for c in text)


def text_table(heads: Sequence[str], rows: Sequence[Sequence[Any]], right: Collection[int] = ()) -> str:
    """Aligned columns, one line for each row. Control characters are written as escapes.

    A table that is wider than the terminal is written in parts, each with the first column. Heads may have several
    lines. A cell that is a list is in parts: pairs of a text and the share from -1 to 1 that colours it, or None. The
    columns of `right`, and their heads, are aligned at the right.

    >>> print(text_table(["token", "share"], [["hat", "0.5"], ["pictures", "0.25"]], right=[1]))
    token     share
    hat         0.5
    pictures   0.25
    """
    split = [head.split("\n") for head in heads] if any(heads) else []
    top = zip_longest(*map(reversed, split), fillvalue="")  # heads end on the same line
    lines = [[_shown(cell) for cell in line] for line in [*reversed(list(top)), *rows]]
    widths = [max(count for _, count in column) for column in zip(*lines, strict=True)]

    def padded(place: int, shown: str, count: int) -> str:
        blank = " " * (widths[place] - count)
        return blank + shown if place in right else shown + blank

    most, parts, used = room(), [[0]], sum(widths[:1])
    for place, width in enumerate(widths[1:], 1):
        used += len(_GAP) + width
        if most is not None and used > most and len(parts[-1]) > 1:
            parts, used = [*parts, [0]], widths[0] + len(_GAP) + width
        parts[-1].append(place)
    joined = [[_GAP.join(padded(i, *line[i]) for i in part).rstrip() for line in lines] for part in parts]
    return "\n\n".join("\n".join(part).lstrip("\n") for part in joined)


def _shown(cell: Any) -> tuple[str, int]:
    """A cell as it is written, and the columns that it takes."""
    given = cell if isinstance(cell, list) else [(str(cell), None)]
    parts = [(printable(text), share) for text, share in given]
    shown = (text if share is None else painted(text, share) for text, share in parts)
    return "".join(shown), sum(columns_of(text) for text, _ in parts)


def page(title: str, *parts: str, style: str = _STYLE) -> str:
    """A page in ASCII, so that it is read alike in any encoding. Its parts are HTML of the functions below.

    >>> "<h1>a &lt;b&gt;</h1>" in page("a <b>", paragraph("\N{BULLET}"))
    True
    """
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(title)}</title>'
    body = f"<main><h1>{_text(title)}</h1>\n{chr(10).join(parts)}\n</main>"
    whole = f'<!doctype html>\n<html lang="en"><head>{head}<style>{style}</style></head>\n<body>{body}</body></html>\n'
    return whole.encode("ascii", "xmlcharrefreplace").decode()


def heading(text: str) -> str:
    """A heading of a section."""
    return f"<h2>{_text(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{_text(text)}</p>"


def html_table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], marked: int | None = None) -> str:
    """A table whose first column names the rows, with a row that is marked.

    Cells are text, or shares, which are floats. A share is written with three digits, on a background that darkens from
    0 to 1; NaN is empty.
    """
    top = "".join(f'<th scope="col">{_text(head)}</th>' for head in heads)
    lines = "".join(
        f'<tr{" class=marked" * (place == marked)}><th scope="row">{_text(name)}</th>{"".join(map(_cell, cells))}</tr>'
        for place, (name, *cells) in enumerate(rows)
    )
    told = _text(caption)
    # The caption is outside of the box that scrolls, so that a wide table does not cut it off.
    return (
        f'<p class="caption">{told}</p><div class="wide" role="region" aria-label="{told}" tabindex="0">'
        f'<table aria-label="{told}"><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def picture(figure: Any, alt: str) -> str:
    """A figure of matplotlib, inside the page, and what a reader who does not see it should know."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return f'<p><img alt="{_text(alt)}" src="data:image/png;base64,{b64encode(png.getvalue()).decode()}"></p>'


def note(lines: Sequence[str], alert: bool = False) -> str:
    """Lines of plain text, for a part of a page that changes. An alert is read out at once by screen readers."""
    return f'<div role="{"alert" if alert else "status"}">{"".join(map(paragraph, lines))}</div>'


def _cell(value: Any) -> str:
    if value != value:
        return "<td></td>"
    if isinstance(value, float):
        strength = min(max(value, 0.0), 1.0) ** 0.5 * 0.6
        return f'<td class="number" style="background:rgba(var(--bar),{strength:.2f})">{value:.3f}</td>'
    number = ' class="number"' if _NUMBER.fullmatch(str(value)) else ""
    return f"<td{number}>{_text(value)}</td>"


def _text(value: Any) -> str:
    return escape("\n".join(map(printable, str(value).split("\n"))))


def numbers_of(column: Tensor) -> list[float | None]:
    """The numbers of a column, None for NaN."""
    return [one if one == one else None for one in column.tolist()]


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
    told = "Green: positive, red: negative. Each row is scaled by its own largest score."
    table = f"<table><caption>{told}</caption><tr>{heads}</tr>{body}</table>"
    whole = page(title, table, style=_RECORD_STYLE)
    write_file(path, whole)
    return whole


def _cells(record: Any) -> list[str]:
    """The cells of a record, empty where nothing was given."""
    known = record.pred_prob == record.pred_prob
    predicted = f"{record.pred_class!s} ({record.pred_prob:.2f})" if known else str(record.pred_class)
    total = f"{record.attr_score:.2f}".replace("-0.00", "0.00")
    texts = [str(record.true_class), predicted, str(record.attr_class), total]
    cells = [f"<td>{text}</td>" if text else "" for text in texts]
    return [*cells, visualization.format_word_importances(record.raw_input_ids, record.word_attributions)]
