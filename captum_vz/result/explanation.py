"""What explains an input: rows, tokens and predictions of one or several methods, with pictures, a view and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure
from torch import Tensor

from captum_vz._files import comma_separated, written
from captum_vz.functional.scores import overlap
from captum_vz.methods import DEEP
from captum_vz.methods import shares as shares_of
from captum_vz.result.part import Part, Row
from captum_vz.visualization import View, draw_comparison, draw_maps, view
from captum_vz.visualization.forms import html_table, numbers_of, paragraph, text_table
from captum_vz.visualization.pictures.rows import clear_tau
from captum_vz.visualization.tokens import quoted

if TYPE_CHECKING:
    import pandas as pd

TRUTH: Final = "blank-out"  #: the name of the truth by blanking out
Predictions = list[tuple[str, float]]  #: what a model predicts, with probabilities


@dataclass
class Explanation:
    """What :func:`captum_vz.explain` and :func:`~captum_vz.study.compare` return. It prints, and a notebook shows it.

    Properties of one method, such as `scores` and `maps`, are those of the first method.

    Attributes:
        tokens: The tokens as a person reads them, special tokens included; the words, if words were explained.
        parts: What each method computed, by its name.
        task: What the model does: "sequence-classification", "masked-lm" and so on.
        predictions: What the model predicts, with probabilities: labels, words, an answer. A regression: its number.
        words: The number of each token's word in the text.
        special: Whether each token begins, ends or pads texts. Masks and unknown words are content.
        raw_tokens: The tokens as the vocabulary writes them.
        windows: The tokens `(start, stop)` that were read together, if the text was cut. No row looks outside.
        refused: The methods that were left out, with the reason.
        truth: What blanking out or patching each token does to the prediction, `(tokens,)` in float64: without sign,
            summing to 1, NaN for tokens that are not blanked out. None: it was not asked for.
        falls: How much the answer's log-probability, or its lead over the foil, falls without each token, `(tokens,)`,
            negative if it rises.
        truth_name: The name of the truth: "blank-out" or "patching".
        told: Sentences about the scores, which are printed below them.
        by_rows: Whether the rows of several methods are printed one after the other, and not as a table of shares.
    """

    tokens: list[str]
    parts: dict[str, Part]
    task: str = ""
    predictions: Predictions = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    special: list[bool] = field(default_factory=list)
    raw_tokens: list[str] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    truth: Tensor | None = None
    falls: Tensor | None = None
    truth_name: str = TRUTH
    told: list[str] = field(default_factory=list)
    by_rows: bool = False

    @property
    def first(self) -> Part:
        """What the first method computed."""
        return next(iter(self.parts.values()))

    @property
    def is_table(self) -> bool:
        """Whether it is shown as a table of shares: there are several methods, or a truth."""
        return (len(self.parts) > 1 and not self.by_rows) or self.truth is not None

    @property
    def method(self) -> str:
        """The name of the first method."""
        return self.first.name

    @property
    def rows(self) -> list[Row]:
        """The rows of the first method, one for each thing that is explained: its name, its token, its scores."""
        return self.first.rows

    @property
    def scores(self) -> Tensor:
        """The scores of the first row, `(tokens,)`."""
        return self.rows[0].scores

    @property
    def token(self) -> int | None:
        """The position of the explained token; None: the whole input is explained."""
        return next((one.rows[0].token for one in self.parts.values() if one.rows[0].token is not None), None)

    @property
    def layer(self) -> int | None:
        """The layer that is shown, of the first method that has layers; None: no method has."""
        return next((one.layer for one in self.parts.values() if one.layer is not None), None)

    @property
    def is_signed(self) -> bool:
        """Whether scores are signed amounts of an output. Otherwise they are shares that sum to 1."""
        return self.first.method.is_signed

    @property
    def maps(self) -> list[Tensor]:
        """The maps of the layers, see :class:`Maps`."""
        return self.first.maps.layers

    @property
    def rollout(self) -> Tensor | None:
        """The joined maps through all layers, see :class:`Maps`."""
        return self.first.maps.rollout

    @property
    def shares(self) -> dict[str, Tensor]:
        """For each method the sizes of its first row as shares of their sum, `(tokens,)` in float64 on the CPU."""
        return {name: one.shares for name, one in self.parts.items()}

    @property
    def shown(self) -> dict[str, Tensor]:
        """The shares that are read: the first token has NaN where it is set apart, but next to a truth it counts."""
        return self.shares if self.truth is not None else {name: one.shown for name, one in self.parts.items()}

    def sign(self, name: str, place: int) -> int:
        """-1 if the score of a token by this method is negative, else 1: shares have no signs."""
        return -1 if name in self.parts and self.parts[name].rows[0].scores[place] < 0 else 1

    @property
    def scopes(self) -> dict[str, str]:
        """For each method the layers that its scores are about, such as "layer 3" or "layers 0 to 3, residual 0.5"."""
        return {name: one.scope for name, one in self.parts.items()}

    @property
    def agreement(self) -> dict[str, float]:
        r"""How far each method agrees with the truth, from 0 to 1. Empty without a truth.

        .. math:: 1 - \tfrac12 \textstyle\sum_j \lvert s_j - b_j \rvert

        s are the method's shares and b the truth's shares. It is the part of the shares that lies on the same tokens.
        A token that is not blanked out has the truth 0. NaN if blanking out changes nothing.
        """
        truth = self.truth
        return {} if truth is None else {name: float(overlap(column, truth)) for name, column in self.shares.items()}

    @property
    def kendall(self) -> dict[str, float]:
        """Kendall's rank correlation of each method with the truth. Empty without a truth.

        NaN if fewer than four entries of the truth exceed a hundredth of the largest: the order of the others is noise.
        """
        truth = self.truth
        return {} if truth is None else {name: clear_tau(column, truth) for name, column in self.shares.items()}

    def plot(self, *, maps: bool = False, **options: Any) -> Figure:
        """The maps of all layers and their rollout, or the rows of a method without layer maps.

        For several methods, a table: methods down, tokens across, the truth above them, and how far they agree. For
        deep models, what a next word rests on, and below it the rows of all layers.

        Args:
            maps: Whether to compute the maps of a model with more than 12 layers.
            options: Options of :func:`captum_vz.visualization.draw_comparison`, such as `scale`, `dim` and `words`, for
                pictures of rows.
        """
        if self.by_rows or (not self.is_table and len(self.rows) == 1 and self.has_rows_only(maps)):
            return self._plot_layers(**options)
        part, title = self.first, self.first.method.title
        rows = {name: scores.double().cpu() for name, scores in part.named_rows().items()}
        if self.is_table or not (self.is_signed or self.maps or len(rows) > 1):
            look: dict[str, Any] = {"scopes": self.scopes, "families": {x: one.family for x, one in self.parts.items()}}
            if self._first_apart:
                first = f"{quoted(self.tokens[0])} is left out where it is white"
                look["title"] = f"What {quoted(self.tokens[self.token or 0])} draws on. {first}"
            shown = {name: one.nan_to_num(nan=0.0) for name, one in self.shown.items()}
            marked = self.token if self.is_table else self.token or 0
            look |= {"truth": self.truth, "truth_name": self.truth_name.replace(TRUTH, "blanking out"), **options}
            return draw_comparison(shown, self.tokens, marked, **look)
        if self.maps:
            # Rows sum to 1, so pictures of any two texts have the same scale.
            drawn, label = part.named_maps(bool(self.windows)), "share of the row (rows sum to 1)"
            heading = f"{title}: the maps of the layers" + ", and their rollout" * (len(drawn) > len(self.maps))
            look = {"scale": "root", "vmax": 1.0, "label": label, "title": heading}
            if part.apart is not None:
                look |= {"dim": [0], "title": f"{heading}, {quoted(self.tokens[0])} pale"}
            return draw_maps(drawn, self.tokens, self.token, **(look | options))
        look = {"title": ", ".join(filter(None, [title, part.scope]))}
        if self.is_signed:
            look = {"scale": "shared", "title": f"{title} on the output", "label": "score of a token"}
        return draw_comparison(rows, self.tokens, self.token, **(look | options))

    def _plot_layers(self, **options: Any) -> Figure:
        """The first row of each method, then of a method with layers its row in each layer."""
        rows: dict[str, Tensor] = {}
        for part in self.parts.values():
            of_layers = part.rows_of_layers() if part.layer is not None else {}
            rows |= {part.title: part.rows[0].scores, **{name: shares_of(one[0]) for name, one in of_layers.items()}}
        title = f"What {self.rows[0].name} rests on, and where it is read" if self.by_rows else self.first.title
        return draw_comparison(rows, self.tokens, self.token, **({"title": title, "scale": "shared"} | options))

    def has_rows_only(self, maps: bool) -> bool:
        """Whether pages and pictures show the explained token alone: there are many layers, and no maps are wanted."""
        return not maps and any(one.layer is not None and len(one.layers) > DEEP for one in self.parts.values())

    def view(self, *, title: str = "", about: Mapping[str, str] | None = None, maps: bool = False) -> View:
        """The interactive view of the maps of all methods, with their rollouts, or of the rows if no method has maps.

        Value Zeroing has its distances, so that the page shows how much there was to divide. The view of a model with
        more than 12 layers has the rows of the explained token in all layers, unless maps are wanted.

        Args:
            title: The heading. Empty: the method's.
            about: Where the numbers come from, by field.
            maps: Whether to compute the maps of a model with more than 12 layers: the rows of all tokens.
        """
        parts, cut, of_rows = list(self.parts.values()), bool(self.windows), self.has_rows_only(maps)
        part = next((one for one in parts if one.layer is not None), self.first)
        special, apart = self.special or None, self._first_apart
        if apart and special:
            special = [True, *special[1:]]
            apart = apart.replace(": shares of the others are without it", ", and is left out (Options).")
        rests = self.first.strongest(self.tokens) if self.by_rows else ""
        if self.is_signed and len(self.rows) == 1:
            rests = f"The numbers say {self.first.heading(self.rows[0])}."
        below = " ".join(filter(None, [self.prediction, rests, apart]))
        look = dict[str, Any](title=title or part.method.title, about=about, subtitle=below, special=special)
        drawn = {} if of_rows else {one.name: one.named_maps(cut, True) for one in parts if one.maps.layers}
        if drawn:
            # Who asks for joined maps sees them first. All others see a layer.
            layer = len(drawn.get(part.name, [])) - 1 if part.layer is None else part.layer
            shown = layer if len({len(one) for one in drawn.values()}) == 1 and not cut else 0
            look |= {"words": self.words or None, "token": self.token, "layer": shown}
            return replace(view(drawn, self.tokens, **look), leaves_out=bool(apart))
        layered = [one for one in parts if of_rows and one.layer is not None]
        rows = {one.name: one.rows_of_layers(every=of_rows) for one in layered or parts}
        names, place = list(part.named_rows()), part.rows[0].token
        if place is not None and len(names) == 1:
            names, look["offset"] = [self.tokens[place]], place
        look |= {"columns": self.tokens, "column_words": self.words, "token": 0}
        found = view(rows, names, layer=-1 if part.layer is None or not layered else part.layer, **look)
        return replace(found, leaves_out=bool(apart), continues=False)

    @property
    def prediction(self) -> str:
        """What the model predicts, in a sentence; empty if it predicts nothing."""
        return f"The model predicts {_listed(self.predictions)}." if self.predictions else ""

    def remarks(self) -> list[str]:
        """What the model predicts, how large the scores are, how the text was read, and which methods are left out."""
        found = list[str]()
        if not self.is_table:
            found += [f"the model predicts: {_listed(self.predictions)}"] if self.predictions else []
            found += filter(None, [self.first.size()])
        found += [*self.told, *filter(None, [self._first_apart])]
        found += [told for part in self.parts.values() for told in part.remarks(self.tokens[0])]
        if self.windows:
            found.append(f"read in {len(self.windows)} windows that overlap: no row looks outside its window")
        for what, numbers in (("agrees", self.agreement), ("Kendall's tau", self.kendall)):
            known = ", ".join(f"{name} {one:.2f}" for name, one in numbers.items() if one == one)
            found += [f"{what} with {self.truth_name}: {known}"] if known else []
        return found + [f"without {name}: {reason}" for name, reason in self.refused.items()]

    @property
    def _first_apart(self) -> str:
        """A sentence about the first token, if it is set apart for a method; else an empty one."""
        several = len(self.parts) > 1
        apart = [f"{one.apart:.0%}" + f" of {name}" * several for name, one in self.parts.items() if one.apart]
        taken = f"takes {', '.join(apart)}: shares of the others are without it".replace("%", " %")
        return f"{self.tokens[0]}, the first token, {taken}" if apart and self.truth is None else ""

    def columns(self, shown: bool = False) -> dict[str, Tensor]:
        """The columns of a table: the truth, then of one method its rows, of several their shares.

        If they are `shown`, the first token is left out where it is set apart.
        """
        given = {"fall": self.falls, self.truth_name: self.truth}
        truth = {name: column for name, column in given.items() if column is not None}
        scores = self.shares if len(self.parts) > 1 else self.first.named_rows()
        apart = dict(zip(scores, self.shown.values(), strict=False)) if shown and self._first_apart else {}
        return truth | scores | apart

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row for each token, and the columns of :meth:`columns`. Needs pandas, of `study`."""
        import pandas as pd

        about = {"token": self.tokens, "explained": [place == self.token for place in range(len(self.tokens))]}
        if self.raw_tokens:
            about |= {"raw": self.raw_tokens, "word": self.words, "special": self.special}
        return pd.DataFrame(about | {name: column.tolist() for name, column in self.columns().items()})

    def to_csv(self, path: str | Path | None = None) -> str:
        """Comma-separated values, one line for each token, also written to `path` if it is given."""
        columns = map(numbers_of, self.columns().values())
        marks = [place == self.token for place in range(len(self.tokens))]
        rows = zip(self.tokens, marks, *columns, strict=True)
        return written(comma_separated([["token", "explained", *self.columns()], *rows]), path)

    def to_dict(self) -> dict[str, Any]:
        """The numbers, as lists. A model with more than 12 layers: the rows of all layers, and no maps."""
        token = self.token
        found: dict[str, Any] = {"tokens": self.tokens, "layer": self.layer}
        apart = {name: numbers_of(one.shown) for name, one in self.parts.items() if one.apart is not None}
        found |= {"without_first": apart} if apart else {}
        if self.is_table:
            scores = {name: column.tolist() for name, column in self.shares.items()}
            found |= {"token": token, "scores": scores, "refused": self.refused, "scopes": self.scopes}
            if self.truth is None:
                return found
            numbers = {"agreement": self.agreement, "kendall": self.kendall}
            found |= {name: {k: x if x == x else None for k, x in of.items()} for name, of in numbers.items()}
            return found | {"truth": numbers_of(self.truth)}
        others = list(self.parts.values())[1:]
        if others:
            found["others"] = {one.name: {"layer": one.layer, "scores": one.rows[0].scores.tolist()} for one in others}
        return (
            found
            | self.first.to_dict()
            | self.first.layers_to_dict(not self.has_rows_only(False))
            | {
                "token": {"position": token, "text": self.rows[0].name if token is None else self.tokens[token]},
                "predictions": [{"token": word, "probability": number} for word, number in self.predictions],
                "task": self.task,
                "raw_tokens": self.raw_tokens,
                "windows": [list(one) for one in self.windows],
            }
        )

    def to_json(self, path: str | Path | None = None, **options: Any) -> str:
        """A JSON object of :meth:`to_dict`, which takes the options, also written to `path` if it is given."""
        return written(json.dumps(self.to_dict(**options), ensure_ascii=False), path)

    def printed(self, color: bool = False, columns: int | None = None) -> str:
        """What is printed: of one method its rows with bars, of several a table of shares.

        `color` says whether words and bars have the colours of a terminal, and `columns` how wide it is; None: any.
        """
        if self.is_table:
            heads = [name.replace("-", "\n") for name in self.columns()]
            lines = [text_table(["", *heads], self._lines(color), right=range(1, len(heads) + 1))]
        else:
            each = self.parts.values()
            lines = [line for part in each for line in part.lines(self.tokens, columns=columns, color=color)]
        return "\n".join([*lines, *self.remarks()])

    def __str__(self) -> str:
        """As :meth:`printed`, without colours."""
        return self.printed()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = "".join(map(paragraph, self.remarks()))
        if not self.is_table:
            return lines + str(self.view()._repr_html_())
        return self.html_table("Shares of each method") + lines

    def html_table(self, caption: str, kept: Sequence[int] | None = None) -> str:
        """The columns that are read as HTML, of all tokens or of those that are kept."""
        columns, kept = self.columns(shown=True), range(len(self.tokens)) if kept is None else kept
        heads = ["token", *(", ".join(filter(None, [name, self.scopes.get(name)])) for name in columns)]
        rows = [[f"{i} {self.tokens[i]}", *(one[i].item() for one in columns.values())] for i in kept]
        return html_table(caption, heads, rows, None if self.token not in kept else kept.index(self.token))

    def _lines(self, color: bool) -> list[list[Any]]:
        """A line for each token, numbers with three decimals. Marks: the explained token, the largest numbers."""
        columns = list(map(numbers_of, self.columns(shown=True).values()))
        highest = [max((one for one in column if one is not None), default=None) for column in columns]
        digits, lines = len(str(len(self.tokens) - 1)), []
        for place, token in enumerate(self.tokens):
            numbers = [column[place] for column in columns]
            cells: list[Any] = ["" if one is None else f"{one:.3f}" for one in numbers]
            stars = zip(cells, numbers, highest, strict=True)
            cells = [cell + ("*" if cell.strip() and one == most else " ") for cell, one, most in stars]
            token = f"{'>' if place == self.token else ' '} {place:>{digits}}  {token}"
            if color:
                signs = (self.sign(name, place) for name in self.columns())
                cells = [[(cell, (one or 0) * sign)] for cell, one, sign in zip(cells, numbers, signs, strict=True)]
            lines.append([token, *cells])
        return lines


def _listed(predictions: Predictions) -> str:
    return ", ".join(f"{word} {number:.2f}" for word, number in predictions)
