"""Tables as text and as HTML, and the parts of HTML pages of one file, which load nothing."""

from __future__ import annotations

import io
import re
from base64 import b64encode
from collections.abc import Collection, Sequence
from html import escape
from itertools import zip_longest
from typing import Any, Final

from torch import Tensor

from captum_vz._start import room
from captum_vz.visualization import View
from captum_vz.visualization.pictures.axes import MARK
from captum_vz.visualization.terminal import columns_of, painted
from captum_vz.visualization.tokens import printable
from captum_vz.visualization.view.page import frame as document_frame

_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]\d+)?")
_GAP: Final = "  "  # between the columns of a text
_STYLE: Final = f"""
:root {{ color-scheme: light dark; --line: #8886; --bar: 33, 113, 181; --mark: {MARK}; }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.5rem 0 1.5rem; }}
.caption {{ margin: 1rem 0 0; }}
th, td {{ border-bottom: 1px solid var(--line); padding: 0.2rem 0.6rem; text-align: left; white-space: pre-wrap; }}
td.number {{ text-align: right; }}
tbody th {{ white-space: pre; }}
tr.marked th {{ border-left: 4px solid var(--mark); }}
img {{ background: white; height: auto; max-width: 100%; }}
pre {{ overflow-x: auto; }}
"""


def text_table(heads: Sequence[str], rows: Sequence[Sequence[Any]], right: Collection[int] = ()) -> str:
    """Aligned columns, one line for each row. Control characters are written as escapes.

    A table that is wider than the terminal is written in parts, each with the first column.

    Args:
        heads: The heads of the columns, which may have several lines.
        rows: Cells. A list is a cell in parts: pairs of a text and the share from -1 to 1 that colours it, or None.
        right: The columns that are aligned at the right, also their heads.

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


def page(title: str, *parts: str) -> str:
    """A page in ASCII, so that it is read alike in any encoding.

    Args:
        title: The title and the heading.
        parts: HTML, as the other functions of this module return it.

    >>> "<h1>a &lt;b&gt;</h1>" in page("a <b>", paragraph("\N{BULLET}"))
    True
    """
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(title)}</title>'
    body = f"<main><h1>{_text(title)}</h1>\n{chr(10).join(parts)}\n</main>"
    whole = f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>{body}</body></html>\n'
    return whole.encode("ascii", "xmlcharrefreplace").decode()


def heading(text: str) -> str:
    """A heading of a section."""
    return f"<h2>{_text(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{_text(text)}</p>"


def html_table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], marked: int | None = None) -> str:
    """A table whose first column names the rows.

    Args:
        caption: What the table shows.
        heads: The heads of the columns.
        rows: Cells: text, or shares, which are floats. A share is written with three digits, on a background that
            darkens from 0 to 1; NaN is empty.
        marked: The row that is marked.
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
    inner = "".join(map(paragraph, lines))
    return f'<div role="alert">{inner}</div>' if alert else f'<div role="status">{inner}</div>'


def frame(view: View) -> str:
    """An interactive view, inside a frame of the page."""
    # Gradio warns of each "<script", also of one inside a frame.
    return document_frame(view.html(), view.title).replace("<script", "&lt;script")


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
