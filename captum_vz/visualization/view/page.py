"""What a page shows, its tokens and its maps as compressed numbers; and the page, one document that loads nothing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import reprlib
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization.tokens import (
    STOP_WORDS,
    is_special,
    one_example,
    visible,
    without_marks,
    without_piece,
    word_texts,
    words_of,
)

SUM_ERROR = 1e-3  # of rows that are said to sum to 1

EXPECTED = (
    "a map (out, in), a list or stack of layer maps, a dict of titles to maps, or a dict of methods to lists of maps"
)
# Levels of a share's root, finest first. The finest that fits the room is used. 12 bits show three digits of a share.
LEVELS = (65535, 4095, 1023, 255, 127, 63, 31, 15)
SIGNED_LEVELS = (32767, 4095, 1023, 127, 63, 31, 15)
LEAST_BYTES, MOST_BYTES, BYTES_PER_PAIR = 56_000, 1_350_000, 12
LEAST_RATIO = 4  # compression does not save more than this

#: The kinds of source tokens, in the order of their codes in the page.
KINDS = ("", "special", "stop", "punctuation")


@dataclass(frozen=True)
class Labels:
    """The tokens along one side of a map."""

    tokens: list[str]
    groups: list[int]  # the number of each token's word, from 0 in the order of the text
    words: list[str]
    kinds: list[int]  # of each token, its index in `KINDS`
    word_kinds: list[int]


def read_labels(tokens: Any, words: Any, special: Any, name: str) -> Labels:
    """The labels of one side. `words` and `special` may be None; `name` is the argument's name, for errors."""
    if not tokens or isinstance(tokens, str) or not all(isinstance(one, str) for one in tokens):
        raise ArgumentError(
            f"{name} is {reprlib.repr(tokens)}: pass a list of strings, one for each token of the maps."
        )
    shown = [visible(one) for one in without_marks(tokens)]
    groups = words_of(tokens, words, "words" if name == "tokens" else f"{name[:-1]}_words")
    named = [visible(one) for one in word_texts(tokens, groups)]
    marks = [is_special(token) for token in shown] if special is None else torch.as_tensor(special).flatten().tolist()
    if len(marks) != len(shown):
        raise ArgumentError(
            f"special is {reprlib.repr(special)} for the {len(shown)} {name}: pass True or False for each token, such "
            "as the special_tokens_mask of the tokenizer."
        )
    plain = [_kind(without_piece(text), mark) for text, mark in zip(shown, marks, strict=True)]
    members = [[mark for mark, group in zip(marks, groups, strict=True) if group == word] for word in range(len(named))]
    whole = [_kind(text, all(one)) for text, one in zip(named, members, strict=True)]
    # A piece of a word is no stop word or punctuation by itself.
    kinds = [kind if len(members[group]) == 1 or kind < 2 else 0 for kind, group in zip(plain, groups, strict=True)]
    return Labels(shown, groups, named, kinds, whole)


def _kind(text: str, special: bool) -> int:
    text = text.strip().lower()
    is_word = re.search(r"[^\W_]", text) or any(unicodedata.category(one)[0] not in "PZ" for one in text)
    return 1 if special else 2 if text in STOP_WORDS else 0 if is_word else 3


@dataclass(frozen=True)
class Panel:
    """One map of a method, such as "layer 3" or "rollout"."""

    label: str
    scores: Tensor  # (out, in) in float64: shares of rows that sum to 1 or are zero; scores as given if there are signs
    totals: Tensor | None  # the sums of the rows before they were divided, (out,); None: rows are given as shares


@dataclass(frozen=True)
class Method:
    """A method, its maps in the order of the layers, and whether scores have signs."""

    name: str
    panels: tuple[Panel, ...]
    signed: bool


def read_methods(maps: Any, rollout: Any, shape: tuple[int, int]) -> list[Method]:
    """The methods of `view`'s argument `maps`, all maps `shape` (out, in)."""
    if isinstance(maps, Mapping) and any(_is_many(one) for one in maps.values()):
        found = {str(name): _labelled(one, f"{name}: ") for name, one in maps.items()}
    else:
        found = {"": _labelled(maps, "")}
    if not found or not all(found.values()):
        raise ArgumentError(f"maps holds no map: expected {EXPECTED}.")
    named = isinstance(rollout, Mapping)
    joined = rollout if named else {} if rollout is None else {next(iter(found)): rollout}
    unknown = [str(name) for name in joined if str(name) not in found]
    if unknown or (joined and not named and len(found) > 1):
        raise ArgumentError(
            f"rollout is {'a dict of ' + ', '.join(unknown) if unknown else 'one map'}, and the methods are "
            f"{', '.join(found)}: pass a dict of these names to maps."
        )
    for name, one in joined.items():
        found[str(name)]["rollout"] = one
    return [_method(name, panels, shape) for name, panels in found.items()]


def _is_many(value: Any) -> bool:
    """Whether a value of a dict is a method's list of maps, and not one map."""
    if isinstance(value, Tensor):
        return value.dim() > 3 or (value.dim() == 3 and len(value) > 1)
    return isinstance(value, (Mapping, Sequence))


def _labelled(maps: Any, place: str) -> dict[str, Any]:
    if isinstance(maps, Mapping):
        return {str(label): one for label, one in maps.items()}
    if isinstance(maps, Tensor) and maps.dim() == 2:
        return {"map": maps}
    if isinstance(maps, str) or not isinstance(maps, (Tensor, Sequence)):
        raise ArgumentError(f"{place}got {type(maps).__name__}: expected {EXPECTED}.")
    found: dict[str, Any] = {}
    for index, one in enumerate(maps):
        has_heads = isinstance(one, Tensor) and one.dim() == 4 and len(one) == 1
        heads = {f"layer {index}, head {head}": scores for head, scores in enumerate(one[0])} if has_heads else {}
        found |= heads or {f"layer {index}": one}
    return found


def _method(name: str, panels: Mapping[str, Any], shape: tuple[int, int]) -> Method:
    place = f"{name}, " if name else ""
    checked = {label: one_example(one, *shape, place=f"{place}{label}: ").double() for label, one in panels.items()}
    signed = any(bool((one < 0).any()) for one in checked.values())
    made = list[Panel]()
    for label, scores in checked.items():
        sums = scores.sum(1)
        are_shares = bool(((sums - 1).abs() <= SUM_ERROR)[sums > 0].all())
        shares = scores if signed else scores / torch.where(sums > 0, sums, 1)[:, None]
        made.append(Panel(label, shares, None if signed or are_shares else sums))
    return Method(name, tuple(made), signed)


@dataclass(frozen=True)
class Encoded:
    """All maps of a page."""

    text: str  # base64 of the compressed integers: methods after each other, maps after each other, row by row
    levels: int  # the integer of the largest score of a map
    signed: bool  # whether integers have signs
    scales: list[list[float]]  # the largest absolute score of each map, for each method
    maps: list[list[Tensor]]  # what the integers say, which differs from the scores by rounding


def encode(methods: Sequence[Method]) -> Encoded:
    r"""Quantise roots of scores, so that small shares keep their relative precision.

    .. math:: q = \operatorname{round}\big( Q \sqrt{|s| / \textstyle\max |s|} \big) \operatorname{sign} s

    Q is the largest number of levels with which all maps fit into the room that a page has.
    """
    scales = [[float(f"{panel.scores.abs().max().item():.6g}") for panel in method.panels] for method in methods]
    scores = [panel.scores.numpy() for method in methods for panel in method.panels]
    ends = [scale or 1.0 for row in scales for scale in row]
    roots = [np.sqrt(np.minimum(np.abs(one) / end, 1)) for one, end in zip(scores, ends, strict=True)]
    room = max(LEAST_BYTES, min(MOST_BYTES, BYTES_PER_PAIR * scores[0].size))
    signed = any(method.signed for method in methods)
    for levels in SIGNED_LEVELS if signed else LEVELS:
        found = [np.sign(one) * np.round(levels * root) for one, root in zip(scores, roots, strict=True)]
        width, last = 2 if levels > 255 else 1, levels == LEVELS[-1]
        numbers = np.stack(found).ravel().astype(f"<{'i' if signed else 'u'}{width}")
        if numbers.nbytes > LEAST_RATIO * room and not last:
            continue
        # The low bytes of all integers, then the high bytes, which compress better apart.
        planes = numbers.view(np.uint8).reshape(len(numbers), -1).T.tobytes()
        text = base64.b64encode(gzip.compress(planes, 6, mtime=0)).decode("ascii")
        if len(text) <= room or last:
            break
    parts = iter(found)
    maps = [
        [torch.from_numpy(np.sign(q) * scale * (q / levels) ** 2) for scale, q in zip(row, parts, strict=False)]
        for row in scales
    ]
    return Encoded(text, levels, signed, scales, maps)


FRAME_HEIGHT = 480  # CSS pixels, until the page knows its own height
# Shown where the frame's tags are removed and their text stays, as in JupyterLab.
LEFT_OUT = "The interactive page is left out here. Run the cell, or trust the notebook (JupyterLab: Trust Notebook)."


def _record(data: Any) -> dict[str, Any]:
    version, encoded = getattr(sys.modules["captum_vz"], "__version__", ""), data.encoded
    fields = data.about | {"package": f"captum_vz {version}"}
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
        "about": visible(" \u00b7 ".join(f"{field}: {value}" for field, value in fields.items())),
    }


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
    if not any("value zeroing" in method.name.lower().replace("-", " ") for method in data.methods):
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
    # Gradio warns of each "<script", also of one inside a frame.
    inside = document.replace("&", "&amp;").replace('"', "&quot;").replace("<script", "&lt;script")
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
