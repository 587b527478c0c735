"""What explains a text: rows, tokens and predictions, with their picture, their view and their tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz._files import written
from captum_vz.app.computing import Chosen, Row, Scores
from captum_vz.app.tasks import Predictions
from captum_vz.functional import normalize_rows
from captum_vz.generation.words import TokenText
from captum_vz.methods import Method, residual_text, rollout_of
from captum_vz.methods.method import INSIDE
from captum_vz.study import Table
from captum_vz.subjects import Subject
from captum_vz.visualization import View, draw_comparison, draw_maps, terminal_text, view
from captum_vz.visualization.terminal import score_texts

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Explanation:
    """What :func:`captum_vz.explain` returns. It prints, and a notebook shows its view.

    Attributes:
        task: What the model does: "sequence-classification", "masked-lm" and so on.
        method: The name of the method.
        kind: The method, as a row of :data:`~captum_vz.study.METHODS`.
        tokens: The tokens as a person reads them, special tokens included; the words, if words were zeroed.
        rows: The rows, one for each thing that is explained: its name, its token, its scores `(in,)`.
        predictions: What the model predicts, with probabilities: labels, words, an answer. Of a regression its number.
        layer: The layer of the scores, from 0; of joined maps, the last of the layers; None: all layers.
        depth: The number of layers from which `layer` is chosen.
        maps: A map `(out, in)` for each layer; empty if the method has no layer maps. Of a text that was read in
            windows the map of one layer, each row from the window in which its token has the most context.
        rollout: The joined maps `(out, in)` through all layers; None if no method joins these maps.
        words: The number of each token's word in the text.
        special: Whether each token begins, ends or pads texts. Masks and unknown words are content.
        raw_tokens: The tokens as the vocabulary writes them.
        windows: The tokens `(start, stop)` that were read together, if the text was cut. No row looks outside.
        distances: Maps of Value Zeroing before rows are divided by their sums; empty unless they were asked for.
        residual: What the rollout adds to each map for the residual connection, 0.5 or None. "inside": the maps hold
            it, or there is no rollout.
    """

    task: str
    method: str
    kind: Method
    tokens: list[str]
    rows: list[Row]
    predictions: Predictions
    layer: int | None
    depth: int
    maps: list[Tensor]
    rollout: Tensor | None
    words: list[int]
    special: list[bool]
    raw_tokens: list[str]
    windows: list[tuple[int, int]]
    distances: list[Tensor] = field(default_factory=list)
    residual: float | str | None = INSIDE

    @classmethod
    def of(
        cls,
        subject: Subject,
        chosen: Chosen,
        found: Scores,
        predictions: Predictions,
        tokens: Sequence[str],
        read: TokenText | None,
        special: Sequence[bool],
        raw: Sequence[str],
        by_words: bool,
        windows: list[tuple[int, int]],
    ) -> Explanation:
        """The explanation of scores. `read` is the text; None: an image or a sound. See the class for the others."""
        words = list(range(len(tokens))) if read is None else list(read.words)
        if by_words and read is not None:
            firsts = [words.index(word) for word in range(len(read.word_texts))]
            tokens, special = read.word_texts, [special[place] for place in firsts]
            windows = [(words[start], words[stop - 1] + 1) for start, stop in windows]
            raw = ["".join(one for one, word in zip(raw, words, strict=True) if word == k) for k in range(len(firsts))]
            words = list(range(len(firsts)))
        depth, joining = found.depth, rollout_of(chosen.method)
        return cls(
            subject.task,
            chosen.name,
            chosen.method,
            list(tokens),
            found.rows,
            predictions,
            chosen.layer % depth if chosen.method.layered else None,
            depth,
            found.maps,
            found.rollout,
            words,
            list(special),
            list(raw),
            windows,
            found.distances,
            INSIDE if joining is None else joining.residual,
        )

    @property
    def scores(self) -> Tensor:
        """The scores of the first row, `(in,)`."""
        return self.rows[0].scores

    @property
    def token(self) -> int | None:
        """The position of the first row's token; None: the whole input is explained."""
        return self.rows[0].token

    @property
    def scope(self) -> str:
        """What is scored, such as "layer 3" or "layers 0 to 3, residual 0.5"; empty for a method without layers."""
        return self.kind.scope(self.layer or 0)

    @property
    def rollout_name(self) -> str:
        """The name of the rollout in pictures, such as "rollout, residual 0.5"."""
        return ", ".join(filter(None, ["rollout", residual_text(self.residual)]))

    @property
    def is_signed(self) -> bool:
        """Whether scores are amounts of an output, with signs, and no shares that sum to 1."""
        return self.kind.is_signed

    def named_rows(self) -> dict[str, Tensor]:
        """The rows by names that differ. A word that occurs twice has its position before it."""
        names = [row.name for row in self.rows]
        found = {}
        for row in self.rows:
            window = (
                "" if row.window is None or row.token is not None else f", tokens {row.window[0]} to {row.window[1]}"
            )
            place = f"{row.token} " if names.count(row.name) > 1 and row.token is not None else ""
            found[f"{place}{row.name}{window}"] = row.scores
        return found

    def named_maps(self, distances: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """The maps, or the distances in their place, by the names of their layers, and the rollout by its name."""
        maps = distances or self.maps
        found = {self.scope: maps[0]} if self.windows else {f"layer {index}": one for index, one in enumerate(maps)}
        return found if self.rollout is None else found | {self.rollout_name: self.rollout}

    def heading(self, row: Row) -> str:
        """What a row shows, in a sentence."""
        if self.is_signed:
            return f"how much each token supports {row.name}"
        return f"how much {row.name} draws on each token"

    def plot(self) -> Figure:
        """The maps of all layers and their rollout, or the rows of a method without layer maps."""
        return draw_explanation(self)

    def view(self, title: str = "") -> View:
        """The interactive view of the maps, or of the rows."""
        return explanation_view(title or self.kind.title, [self])

    @property
    def prediction(self) -> str:
        """What the model predicts, in a sentence; empty if it predicts nothing."""
        words = ", ".join(f"{word} {number:.2f}" for word, number in self.predictions)
        return f"The model predicts {words}." if words else ""

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row for each token, and a column for each row. It needs pandas, of the extra `study`."""
        import pandas as pd

        about = {"token": self.tokens, "raw": self.raw_tokens, "word": self.words, "special": self.special}
        return pd.DataFrame(about | {name: scores.tolist() for name, scores in self.named_rows().items()})

    def to_dict(self) -> dict[str, Any]:
        """The numbers, as lists."""
        token = self.token
        return {
            "method": self.method,
            "tokens": self.tokens,
            "token": {"position": token, "text": self.rows[0].name if token is None else self.tokens[token]},
            "layer": self.layer,
            "scores": self.scores.tolist(),
            "maps": [one.tolist() for one in self.maps],
            "rollout": None if self.rollout is None else self.rollout.tolist(),
            "predictions": [{"token": word, "probability": number} for word, number in self.predictions],
            "task": self.task,
            "raw_tokens": self.raw_tokens,
            "rows": [
                {"name": row.name, "token": row.token, "scores": row.scores.tolist(), "window": row.window}
                for row in self.rows
            ],
            "windows": [list(one) for one in self.windows],
            "residual": self.residual,
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """A JSON object of :meth:`to_dict`, also written to `path` if it is given."""
        return written(json.dumps(self.to_dict(), ensure_ascii=False), path)

    def __str__(self) -> str:
        """The rows, as lines of text with bars."""
        lines = []
        for row in self.rows:
            lines.append(f"{', '.join(filter(None, [self.method, self.scope]))}: {self.heading(row)}")
            lines.append(row_text(self, row))
        return "\n".join([*lines, *self.remarks()])

    __repr__ = __str__

    def remarks(self) -> list[str]:
        """What the model predicts, and how the text was read."""
        found = []
        if self.predictions:
            words = ", ".join(f"{word} {number:.2f}" for word, number in self.predictions)
            found.append(f"the model predicts: {words}")
        if self.windows:
            found.append(f"read in {len(self.windows)} windows that overlap: no row looks outside its window")
        return found

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.remarks())
        return lines + str(self.view()._repr_html_())


def row_text(found: Explanation, row: Row) -> str:
    """A row as plain lines: shares with bars from 0 to 1, amounts with their signs."""
    if not found.is_signed:
        return terminal_text(found.tokens, row.scores, row.token, color=False, full=1)
    lines = terminal_text(found.tokens, row.scores.abs(), row.token, color=False).split("\n")
    plain, signed = score_texts(row.scores.abs().tolist()), score_texts(row.scores.tolist(), signed=True)
    return "\n".join(
        line.replace(f"  {one}", f"  {other}") for line, one, other in zip(lines, plain, signed, strict=True)
    )


def side_by_side(found: Sequence[Explanation]) -> Table:
    """The first rows of several methods on one text, in one table. Amounts with signs become shares that sum to 1."""
    scores = {one.method: normalize_rows(one.scores.double().abs()).cpu() for one in found}
    token = next((one.token for one in found if one.token is not None), None)
    layer = next((one.layer for one in found if one.layer is not None), 0)
    return Table(tuple(found[0].tokens), token, scores, layer, {}, {one.method: one.scope for one in found})


def draw_explanation(found: Explanation) -> Figure:
    """The maps of all layers and their rollout, or the rows of a method without layer maps."""
    title = found.kind.title
    rows = {name: scores.double().cpu() for name, scores in found.named_rows().items()}
    if found.is_signed:
        look: dict[str, Any] = {"scale": "shared", "title": f"{title} on the output"}
        return draw_comparison(rows, found.tokens, found.token, "score of a token", **look)
    if not found.maps and len(rows) > 1:
        return draw_comparison(rows, found.tokens, found.token, title=", ".join(filter(None, [title, found.scope])))
    if not found.maps:
        scores = {found.method: found.scores.double().cpu()}
        token = found.token or 0
        return Table(tuple(found.tokens), token, scores, found.layer or 0, {}, {found.method: found.scope}).plot()
    panels = found.named_maps()
    # Rows sum to 1, so pictures of any two texts have the same scale.
    look = {"scale": "root", "vmax": 1.0, "label": "share of the row (rows sum to 1)"}
    title = f"{title}: the maps of the layers, and their rollout"
    return draw_maps(panels, found.tokens, found.token, title=title, **look)


def explanation_view(title: str, found: Sequence[Explanation], about: Mapping[str, str] | None = None) -> View:
    """The maps of one text by one or several methods, with their rollouts.

    Value Zeroing has its distances where they were computed, so that the page shows how much there was to divide.
    Methods without layer maps show their rows. They are shown only if no method has maps.

    Args:
        title: The heading.
        found: The explanations of the same token of the same text.
        about: Where the numbers come from, by field.
    """
    told: dict[str, Any] = {"title": title, "subtitle": found[0].prediction, "about": about}
    first = found[0]
    with_maps = [one for one in found if one.maps]
    if not with_maps:
        rows = {one.method: {one.scope or "scores": torch.stack([row.scores for row in one.rows])} for one in found}
        named = list(first.named_rows())
        sides: dict[str, Any] = {"columns": first.tokens, "column_words": first.words, "special": first.special}
        if first.token is not None and len(named) == 1:
            named, sides["offset"] = [first.tokens[first.token]], first.token
        return view(rows, named, **sides, token=0, **told)
    maps = {one.method: one.named_maps(one.distances) for one in with_maps}
    # Who asks for joined maps sees them first. All others see a layer.
    layer = len(first.maps) if first.layer is None and first.rollout is not None else -1
    layer = layer if first.layer is None else first.layer
    depths = {len(one) for one in maps.values()}
    shown = layer if len(depths) == 1 and not first.windows else 0
    return view(
        maps,
        first.tokens,
        words=first.words,
        special=first.special,
        token=first.token,
        layer=shown,
        **told,
    )
