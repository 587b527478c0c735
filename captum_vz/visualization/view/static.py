"""A table without code or style sheet, for viewers that leave out frames."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from captum_vz.visualization.view.interactive import View

MOST_WHOLE = 25  # tokens of a whole map; longer texts have the strongest sources of each token
STRONGEST = 5
CELL = "padding:2px 5px;border:1px solid #999;text-align:right"


def static_table(view: View) -> str:
    """The map that the page shows at first, as a closed `<details>` with styles inside its elements, in ASCII."""
    method = view.methods[0]
    panel = method.panels[min(view.layer, len(method.panels) - 1)]
    name = ", ".join(filter(None, [method.name, panel.label]))
    scores = panel.scores
    width = len(view.columns.tokens)
    parts = [_whole(view, scores)] if width <= MOST_WHOLE else [_strongest(view, scores)]
    what = f"{name}: each row is an output token" + ("" if width <= MOST_WHOLE else f", with its {STRONGEST} strongest")
    table = (
        f'<table style="border-collapse:collapse;font-size:12px"><caption>{escape(what)}</caption>{parts[0]}</table>'
    )
    text = f'<details><summary style="cursor:pointer">Table: {escape(name)}</summary>{table}</details>'
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _whole(view: View, scores: Tensor) -> str:
    highest = float(scores.abs().max()) or 1.0
    heads = "".join(_head(token, "col") for token in view.columns.tokens)
    rows = []
    for token, row in zip(view.rows.tokens, scores.tolist(), strict=True):
        cells = "".join(_cell(value, highest) for value in row)
        rows.append(f"<tr>{_head(token, 'row')}{cells}</tr>")
    return f"<thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _strongest(view: View, scores: Tensor) -> str:
    rows = []
    for token, row in zip(view.rows.tokens, scores, strict=True):
        places = row.abs().argsort(descending=True, stable=True)[:STRONGEST].tolist()
        named = [f"<bdi>{escape(view.columns.tokens[i])}</bdi> {row[i].item():.3f}" for i in places]
        rows.append(f'<tr>{_head(token, "row")}<td style="padding:2px 5px">{", ".join(named)}</td></tr>')
    return f"<tbody>{''.join(rows)}</tbody>"


def _head(token: str, scope: str) -> str:
    return f'<th scope="{scope}" style="{CELL}"><bdi>{escape(token)}</bdi></th>'


def _cell(value: float, highest: float) -> str:
    # Pale enough for black text, on light and on dark pages. Notebooks that are not trusted lose gradients,
    # and keep the black of the text. So the color is plain.
    strongest = (255, 140, 60) if value < 0 else (66, 146, 198)
    weight = abs(value) / highest * 0.85
    shade = "".join(f"{round(255 - (255 - one) * weight):02x}" for one in strongest)
    return f'<td style="{CELL};background-color:#{shade};color:#000">{value:.2f}</td>'
