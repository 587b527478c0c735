"""What `compare` returns: tokens by methods, to print, draw and export."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure
from torch import Tensor

from captum_vz.study.methods import family_of
from captum_vz.visualization import draw_comparison
from captum_vz.visualization._files import comma_separated, written
from captum_vz.visualization.pictures.comparison import kendall_tau
from captum_vz.visualization.pictures.parts.style import MARK
from captum_vz.visualization.terminal import printable

if TYPE_CHECKING:
    import pandas as pd

#: The name of the column of the truth.
TRUTH: Final = "blank-out"


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
        truth: What blanking out each token does to the prediction, `(tokens,)` in float64: without sign, summing to 1,
            NaN for tokens that are not blanked out. None: it was not asked for.

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
    truth: Tensor | None = None

    def __str__(self) -> str:
        """Aligned text, one line for each token."""
        names = [name.split("-") for name in self._columns()]
        height = max(map(len, names), default=1)
        heads = [[""] * (height - len(name)) + name for name in names]
        columns = [[*head, *self._marked(name)] for head, name in zip(heads, self._columns(), strict=True)]
        digits = len(str(len(self.tokens) - 1))
        marks = [">" if i == self.token else " " for i in range(len(self.tokens))]
        places = [f"{mark} {i:>{digits}}" for i, mark in enumerate(marks)]
        rows = zip(*_aligned([[""] * height + places, [""] * height + list(self.tokens), *columns]), strict=True)
        omitted = [f"without {name}: {reason}" for name, reason in self.refused.items()]
        if self.truth is not None:
            taus = ", ".join(f"{name} {tau:.2f}" for name, tau in self.agreement.items())
            omitted = [f"Kendall's tau with {TRUTH}: {taus}", *omitted]
        return "\n".join([*("  ".join(row).rstrip() for row in rows), *omitted])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{escape(name)}</th>" for name in self._columns())
        rows = []
        for place, token in enumerate(self.tokens):
            cells = []
            for column in self._columns().values():
                score = column[place].item()
                if score != score:
                    cells.append("<td></td>")
                    continue
                # The strength of one blue: the text stays black on it.
                cells.append(f'<td style="background:rgba(66,146,198,{score:.2f})">{score:.3f}</td>')
            style = f' style="color:{MARK}"' if place == self.token else ""
            rows.append(f"<tr><th{style}>{place} {escape(token)}</th>{''.join(cells)}</tr>")
        omitted = "".join(f"<p>without {escape(name)}: {escape(reason)}</p>" for name, reason in self.refused.items())
        return f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>{omitted}"

    def plot(self, **options: Any) -> Figure:
        """The table as a figure: methods down, tokens across, the truth above them with Kendall's tau at the right.

        Methods that join layers, methods that explain the output, and methods without a model stand apart. Each method
        is labelled with its layers. The explained token's column is marked. Cells that round to 0.00 have no number.

        Args:
            options: Options of :func:`captum_vz.visualization.draw_comparison`, such as `scale`, `dim` and `words`.

        Returns:
            A matplotlib figure; `figure.savefig("comparison.png")` writes it.
        """
        chosen: dict[str, Any] = {
            "truth": self.truth,
            "scopes": self.scopes,
            "families": {name: family_of(name) for name in self.scores},
        }
        return draw_comparison(self.scores, self.tokens, self.token, **(chosen | options))

    @property
    def agreement(self) -> dict[str, float]:
        """Kendall's rank correlation of each method with the truth. Empty without a truth; NaN without an order."""
        if self.truth is None:
            return {}
        return {name: kendall_tau(column, self.truth) for name, column in self.scores.items()}

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row for each token and a column for each method. It needs pandas, of the extra `study`."""
        import pandas as pd

        columns = {name: column.tolist() for name, column in self._columns().items()}
        return pd.DataFrame({"token": self.tokens, "explained": self._is_explained()} | columns)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Comma-separated values, one line for each token, also written to `path` if it is given."""
        columns = [_known(column) for column in self._columns().values()]
        rows = zip(self.tokens, self._is_explained(), *columns, strict=True)
        return written(comma_separated([["token", "explained", *self._columns()], *rows]), path)

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
        if self.truth is not None:
            taus = {name: None if tau != tau else tau for name, tau in self.agreement.items()}
            fields |= {"truth": [None if one == "" else one for one in _known(self.truth)], "kendall": taus}
        return written(json.dumps(fields, ensure_ascii=False), path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """A table in Markdown, the explained token in bold, also written to `path` if it is given."""
        shown = self._columns()
        heads = ["token", *map(_escaped, shown)]
        lines = [heads, ["---", *["---:"] * len(shown)]]
        for place, token in enumerate(self.tokens):
            name = f"**{_escaped(token)}**" if place == self.token else _escaped(token)
            lines.append([name, *(_number(column[place].item()) for column in shown.values())])
        return written("".join(f"| {' | '.join(line)} |\n" for line in lines), path)

    def _is_explained(self) -> list[bool]:
        return [place == self.token for place in range(len(self.tokens))]

    def _columns(self) -> dict[str, Tensor]:
        """The columns of scores, the truth first."""
        return ({} if self.truth is None else {TRUTH: self.truth}) | dict(self.scores)

    def _marked(self, name: str) -> list[str]:
        column = self._columns()[name]
        highest = float(column.nan_to_num(nan=-1.0).max())
        return [f"{_number(score)}{'*' if score == highest else ' '}" for score in column.tolist()]


def _number(score: float) -> str:
    """Three decimals; nothing for NaN."""
    return f"{score:.3f}" if score == score else ""


def _known(column: Tensor) -> list[Any]:
    """The scores, "" in the place of NaN."""
    return [score if score == score else "" for score in column.tolist()]


def _aligned(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Each column padded to its widest entry."""
    return [[entry.ljust(max(map(len, column))) for entry in column] for column in columns]


def _escaped(token: str) -> str:
    """The token on one line, with all characters escaped that Markdown would interpret."""
    return re.sub(r"[\\`*_<>&|~$]", r"\\\g<0>", printable(token))
