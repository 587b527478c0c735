"""The page: one document with its style sheet, its data and its module."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from captum_vz.visualization.view.labels import visible

if TYPE_CHECKING:
    from captum_vz.visualization.view.interactive import View
    from captum_vz.visualization.view.labels import Labels

FRAME_HEIGHT = 480  # CSS pixels, until the page knows its own height
# Shown where the frame's tags are removed and their text stays, as in JupyterLab.
LEFT_OUT = "The interactive page is left out here. Run the cell, or trust the notebook (JupyterLab: Trust Notebook)."


def record(view: View) -> dict[str, Any]:
    """What the page's module reads."""
    encoded = view.encoded
    methods = [
        {
            "name": visible(method.name) if method.name else "",
            "signed": method.signed,
            "maps": [
                {"label": visible(panel.label), "scale": scale, "totals": _rounded(panel.totals)}
                for panel, scale in zip(method.panels, scales, strict=True)
            ],
        }
        for method, scales in zip(view.methods, encoded.scales, strict=True)
    ]
    return {
        "rows": _side(view.rows),
        "columns": _side(view.columns),
        "offset": view.offset,
        "methods": methods,
        "levels": encoded.levels,
        "signed": encoded.signed,
        "numbers": encoded.text,
        "id": fingerprint(view),
        "token": view.token,
        "layer": view.layer,
        "predict": list(view.predict),
    }


def page(data: dict[str, Any], title: str, theme: str, static: str = "") -> str:
    """The document, in ASCII. `static` is for readers who have switched off scripts."""
    # A "<" in the data could end the script element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    found = Template(_asset("view.html")).substitute(
        title=escape(visible(title)),
        theme=theme,
        style=_asset("view.css"),
        module=_asset("view.js"),
        data=text.replace("&", "\\u0026"),
        static=static,
    )
    return found.encode("ascii", "xmlcharrefreplace").decode()


def frame(document: str, title: str) -> str:
    """The document inside a frame, whose height follows its content."""
    inside = document.replace("&", "&amp;").replace('"', "&quot;")
    name = escape(visible(title)).encode("ascii", "xmlcharrefreplace").decode()
    style = f"width:100%;height:{FRAME_HEIGHT}px;border:0"
    attributes = f'title="{name}" style="{style}" allow="clipboard-write" srcdoc="{inside}"'
    return f"<iframe {attributes}>{LEFT_OUT}</iframe>"


def fingerprint(view: View) -> str:
    """Eight digits that differ between pages with other tokens or numbers."""
    names = json.dumps([view.rows.tokens, view.columns.tokens, view.encoded.scales])
    return hashlib.sha256((names + view.encoded.text).encode()).hexdigest()[:8]


@cache
def _asset(name: str) -> str:
    """A file of the page, without its comments and its indentation, a style sheet also without its spaces."""
    lines = [line.strip() for line in files(__package__).joinpath(name).read_text("ascii").splitlines()]
    text = "".join(f"{line}\n" for line in lines if line and not line.startswith(("//", "/*")))
    return re.sub(r"\s*([{};])\s*|(?<=:) ", r"\1", text) if name.endswith(".css") else text


def _side(labels: Labels) -> dict[str, Any]:
    return {
        "tokens": labels.tokens,
        "groups": labels.groups,
        "words": labels.words,
        "kinds": labels.kinds,
        "wordKinds": labels.word_kinds,
    }


def _rounded(totals: Any) -> list[float] | None:
    return None if totals is None else [float(f"{one:.4g}") for one in totals.tolist()]
