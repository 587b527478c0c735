"""What `compare` returns: tokens by methods, to print, draw and export."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from captum_vz.visualization.maps import CELL, COLORS, FONT_SIZE, MARK, shortened
from captum_vz.visualization.terminal import printable

if TYPE_CHECKING:
    import pandas as pd

# A figure of more tokens than this has no numbers in its cells, because they would be too small.
MOST_NUMBERED = 40


@dataclass(frozen=True)
class Table:
    """How much one token of a text draws on each token, by several methods: one column of shares for each method.

    Printing it marks the explained token with `>` and the highest score of each method with `*`. A notebook shows it
    with colours.

    Attributes:
        tokens: The tokens, as a person reads them.
        token: The position of the token that is explained.
        scores: For each method, by its name, `(tokens,)` in float64 on the CPU: not negative, summing to 1.
        layer: The layer that was asked for.
        refused: The omitted methods, with the reason.
        scopes: For each method the layers that its column is about, such as "layer 3" or "layers 0 to 3".

    >>> import torch
    >>> table = Table(("it", "[MASK]"), 1, {"random": torch.tensor([0.75, 0.25])}, 3)
    >>> print(table)
                 random
      0  it      0.750*
    > 1  [MASK]  0.250
    """

    tokens: tuple[str, ...]
    token: int
    scores: Mapping[str, Tensor]
    layer: int
    refused: Mapping[str, str] = field(default_factory=dict)
    scopes: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Aligned text, one line for each token."""
        names = [name.split("-") for name in self.scores]
        height = max(map(len, names), default=1)
        heads = [[""] * (height - len(name)) + name for name in names]
        columns = [[*head, *self._marked(name)] for head, name in zip(heads, self.scores, strict=True)]
        digits = len(str(len(self.tokens) - 1))
        marks = [">" if i == self.token else " " for i in range(len(self.tokens))]
        places = [f"{mark} {i:>{digits}}" for i, mark in enumerate(marks)]
        rows = zip(*_aligned([[""] * height + places, [""] * height + list(self.tokens), *columns]), strict=True)
        omitted = [f"without {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join([*("  ".join(row).rstrip() for row in rows), *omitted])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{escape(name)}</th>" for name in self.scores)
        rows = []
        for place, token in enumerate(self.tokens):
            cells = []
            for column in self.scores.values():
                score = column[place].item()
                # The strength of one blue: the text stays black on it.
                cells.append(f'<td style="background:rgba(66,146,198,{score:.2f})">{score:.3f}</td>')
            style = f' style="color:{MARK}"' if place == self.token else ""
            rows.append(f"<tr><th{style}>{place} {escape(token)}</th>{''.join(cells)}</tr>")
        omitted = "".join(f"<p>without {escape(name)}: {escape(reason)}</p>" for name, reason in self.refused.items())
        return f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>{omitted}"

    def plot(self) -> Figure:
        """The table as a figure: methods down, tokens across, one colour scale from 0 to the highest score.

        Each method is labelled with its layers. The explained token's column is marked. Cells that round to 0.00 have
        no number.

        Returns:
            A matplotlib figure; `figure.savefig("comparison.png")` writes it.
        """
        count, methods = len(self.tokens), list(self.scores)
        labels = [", ".join(filter(None, [name, self.scopes.get(name)])) for name in methods]
        names = [shortened(token) for token in self.tokens]
        numbered = count <= MOST_NUMBERED
        cell = 2.4 * CELL if numbered else CELL
        names_take = 0.075 * max(map(len, labels)) + 0.075 * max(map(len, names))
        size = (cell * count + names_take + 1.2, 0.26 * len(methods) + 0.075 * max(map(len, names)) + 0.9)
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        panel = figure.subplots()
        rows = [self.scores[name].tolist() for name in methods]
        highest = max(max(row) for row in rows) or 1
        image = panel.imshow(rows, cmap=COLORS, vmin=0, vmax=highest, aspect="auto")
        panel.set_xticks(range(count), names, rotation=90, fontsize=FONT_SIZE)
        panel.set_yticks(range(len(methods)), labels, fontsize=FONT_SIZE)
        panel.tick_params(length=2)
        for text in panel.get_xticklabels():
            text.set_parse_math(False)  # a token may be a dollar sign
        panel.get_xticklabels()[self.token].set(color=MARK, fontweight="bold")
        mark = Rectangle((self.token - 0.5, -0.5), 1, len(methods), fill=False, edgecolor=MARK, linewidth=1.2)
        panel.add_patch(mark)
        for row, scores in enumerate(rows if numbered else []):
            for place, score in enumerate(scores):
                if f"{score:.2f}" != "0.00":
                    ink = "white" if score > 0.55 * highest else "black"
                    panel.text(
                        place, row, f"{score:.2f}".lstrip("0"), ha="center", va="center", color=ink, fontsize=6.5
                    )
        bar = figure.colorbar(image, ax=panel, pad=0.01)
        bar.set_label("share", fontsize=FONT_SIZE)
        bar.ax.tick_params(labelsize=FONT_SIZE)
        title = panel.set_title(f"What {names[self.token]} draws on", fontsize=FONT_SIZE + 2)
        title.set_parse_math(False)
        return figure

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row for each token and a column for each method. It needs pandas, of the extra `study`."""
        import pandas as pd

        columns = {name: column.tolist() for name, column in self.scores.items()}
        return pd.DataFrame({"token": self.tokens, "explained": self._is_explained()} | columns)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Comma-separated values, one line for each token, also written to `path` if it is given."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["token", "explained", *self.scores])
        columns = [column.tolist() for column in self.scores.values()]
        writer.writerows(zip(self.tokens, self._is_explained(), *columns, strict=True))
        return _written(text.getvalue(), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """A JSON object with the attributes of this class, also written to `path` if it is given."""
        fields: dict[str, Any] = {
            "tokens": self.tokens,
            "token": self.token,
            "layer": self.layer,
            "scores": {name: column.tolist() for name, column in self.scores.items()},
            "refused": dict(self.refused),
            "scopes": dict(self.scopes),
        }
        return _written(json.dumps(fields, ensure_ascii=False), path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """A table in Markdown, the explained token in bold, also written to `path` if it is given."""
        heads = ["token", *map(_escaped, self.scores)]
        lines = [heads, ["---", *["---:"] * len(self.scores)]]
        for place, token in enumerate(self.tokens):
            name = f"**{_escaped(token)}**" if place == self.token else _escaped(token)
            lines.append([name, *(f"{column[place].item():.3f}" for column in self.scores.values())])
        return _written("".join(f"| {' | '.join(line)} |\n" for line in lines), path)

    def _is_explained(self) -> list[bool]:
        return [place == self.token for place in range(len(self.tokens))]

    def _marked(self, name: str) -> list[str]:
        column = self.scores[name].tolist()
        return [f"{score:.3f}{'*' if score == max(column) else ' '}" for score in column]


def _aligned(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Each column padded to its widest entry."""
    return [[entry.ljust(max(map(len, column))) for entry in column] for column in columns]


def _escaped(token: str) -> str:
    """The token on one line, with all characters escaped that Markdown would interpret."""
    return re.sub(r"[\\`*_<>&|~$]", r"\\\g<0>", printable(token))


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
