"""The page: one document with its style sheet, its data and its module, and a table for viewers without scripts."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import sys
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from captum_vz.visualization.tokens import visible

FRAME_HEIGHT = 480  # CSS pixels, until the page knows its own height
# Shown where the frame's tags are removed and their text stays, as in JupyterLab.
LEFT_OUT = "The interactive page is left out here. Run the cell, or trust the notebook (JupyterLab: Trust Notebook)."


def _record(data: Any) -> dict[str, Any]:
    """What the page's module reads."""
    encoded = data.encoded
    methods = [
        {
            "name": visible(method.name) if method.name else "",
            "signed": method.signed,
            "maps": [
                {
                    "label": visible(panel.label),
                    "scale": scale,
                    "totals": None if panel.totals is None else [float(f"{one:.4g}") for one in panel.totals.tolist()],
                }
                for panel, scale in zip(method.panels, scales, strict=True)
            ],
        }
        for method, scales in zip(data.methods, encoded.scales, strict=True)
    ]
    return {
        "rows": asdict(data.rows),
        "columns": asdict(data.columns),
        "offset": data.offset,
        "methods": methods,
        "levels": encoded.levels,
        "signed": encoded.signed,
        "numbers": encoded.text,
        "id": fingerprint(data),
        "token": data.token,
        "layer": data.layer,
        "predict": list(data.predict),
        "out": [1] * data.leaves_out,
        "continues": data.continues,
        "title": visible(data.title),
        "subtitle": visible(data.subtitle) if data.subtitle else "",
        "about": _origin(data),
    }


def _origin(data: Any) -> str:
    """Where the numbers come from, on one line."""
    version = getattr(sys.modules["captum_vz"], "__version__", "")
    fields = data.about | {"package": f"captum_vz {version}"}
    return visible(" \u00b7 ".join(f"{field}: {value}" for field, value in fields.items()))


def page(data: Any, static: str = "") -> str:
    """The document, in ASCII. `static` is for readers who have switched off scripts."""
    found = _record(data)
    # A "<" in the data could end the script element.
    text = json.dumps(found, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    whole = Template(_asset("view.html")).substitute(
        title=escape(found["title"]),
        subtitle=escape(found["subtitle"]),
        about=escape(found["about"]),
        help=_help(data),
        theme=data.theme,
        style=_asset("view.css"),
        module=_module(),
        data=text.replace("&", "\\u0026"),
        static=static,
    )
    return whole.encode("ascii", "xmlcharrefreplace").decode()


def _help(data: Any) -> str:
    """How the numbers of Value Zeroing are made, if the page has them."""
    named = [method.name.lower().replace("-", " ") for method in data.methods]
    if not any("value zeroing" in name for name in named):
        return ""
    diagram = three_steps().replace(' xmlns="http://www.w3.org/2000/svg"', "")  # HTML needs no address
    return (
        f"{diagram}<p>Value Zeroing runs a layer again with the value vector of one token set to zero, and keeps all "
        "attention weights. The further the output at the framed token turns, the more that token draws on the zeroed "
        "one.</p>"
    )


def three_steps() -> str:
    """The definition of Value Zeroing as a diagram, in SVG: zero one value, keep the weights, compare the outputs.

    A notebook shows it with `IPython.display.SVG`.

    >>> three_steps()[:4], three_steps().count("<text")
    ('<svg', 18)
    """
    return _asset("three_steps.svg")


def frame(document: str, title: str) -> str:
    """The document inside a frame, whose height follows its content."""
    inside = document.replace("&", "&amp;").replace('"', "&quot;")
    name = escape(visible(title)).encode("ascii", "xmlcharrefreplace").decode()
    style = f"width:100%;height:{FRAME_HEIGHT}px;border:0"
    attributes = f'title="{name}" style="{style}" allow="clipboard-write" srcdoc="{inside}"'
    return f"<iframe {attributes}>{LEFT_OUT}</iframe>"


def fingerprint(data: Any) -> str:
    """Eight digits that differ between pages with other tokens or numbers."""
    names = json.dumps([data.rows.tokens, data.columns.tokens, data.encoded.scales])
    return hashlib.sha256((names + data.encoded.text).encode()).hexdigest()[:8]


@cache
def _asset(name: str) -> str:
    """A file of the page, without its comments, its indentation; a style sheet also without its spaces."""
    lines = [line.strip() for line in files(__package__).joinpath(name).read_text("ascii").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("//", "/*"))]
    text = "".join(f"{line}\n" for line in lines)
    return re.sub(r"\s*([{};,])\s*|(?<=:) ", r"\1", text) if name.endswith(".css") else text


@cache
def _module() -> str:
    """The code of the page, compressed like the numbers, so that a page of few tokens is small."""
    return base64.b64encode(gzip.compress(_asset("view.js").encode("ascii"), mtime=0)).decode("ascii")


MOST_WHOLE = 25  # tokens of a whole map; longer texts have the strongest sources of each token
STRONGEST = 5
CELL = "padding:2px 5px;border:1px solid #999;text-align:right"


def static_table(data: Any) -> str:
    """The map that the page shows at first, as a closed `<details>` with styles inside its elements, in ASCII."""
    method = data.methods[0]
    panel = method.panels[min(data.layer, len(method.panels) - 1)]
    name = ", ".join(filter(None, [method.name, panel.label]))
    what, names, rows = f"{name}: each row is an output token", data.columns.tokens, ""
    is_whole, highest = len(names) <= MOST_WHOLE, float(panel.scores.abs().max()) or 1.0
    for token, row in zip(data.rows.tokens, panel.scores, strict=True):
        if is_whole:
            cells = "".join(_cell(value, highest) for value in row.tolist())
        else:
            places = row.abs().argsort(descending=True, stable=True)[:STRONGEST].tolist()
            named = [f"<bdi>{escape(names[i])}</bdi> {row[i].item():.3f}" for i in places]
            cells = f'<td style="padding:2px 5px">{", ".join(named)}</td>'
        rows += f"<tr>{_head(token, 'row')}{cells}</tr>"
    heads = f"<thead><tr><td></td>{''.join(_head(token, 'col') for token in names)}</tr></thead>" if is_whole else ""
    what += "" if is_whole else f", with its {STRONGEST} strongest"
    caption = f"<caption>{escape(what)}</caption>{heads}<tbody>{rows}</tbody>"
    table = f'<table style="border-collapse:collapse;font-size:12px">{caption}</table>'
    text = f'<details><summary style="cursor:pointer">Table: {escape(name)}</summary>{table}</details>'
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _head(token: str, scope: str) -> str:
    return f'<th scope="{scope}" style="{CELL}"><bdi>{escape(token)}</bdi></th>'


def _cell(value: float, highest: float) -> str:
    # Pale enough for black text, on light and on dark pages. Notebooks that are not trusted lose gradients,
    # and keep the black of the text. So the color is plain.
    strongest = (255, 140, 60) if value < 0 else (66, 146, 198)
    weight = abs(value) / highest * 0.85
    shade = "".join(f"{round(255 - (255 - one) * weight):02x}" for one in strongest)
    return f'<td style="{CELL};background-color:#{shade};color:#000">{value:.2f}</td>'
