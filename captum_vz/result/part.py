"""What one method computed for one input: its rows and the maps behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from captum_vz.methods import METHODS, Method, residual_text, rollout_of
from captum_vz.methods import shares as shares_of
from captum_vz.methods.method import INSIDE
from captum_vz.visualization import terminal_text

#: The first token is set apart if it takes a QUARTER of the row that is shown, and HALF of it in a TENTH of the layers.
QUARTER, HALF, TENTH = 0.25, 0.5, 0.1
NEARLY_ALL = 0.95  #: joined maps end in the first token if it takes this part of a row


@dataclass
class Row:
    """The scores of all tokens for one thing that is explained, `(in,)`.

    Amounts of an output have a sign: a positive score supports what is explained. Other scores are shares.
    """

    name: str  #: what is explained: a token, a label, a word and its label
    token: int | None  #: the position of the token whose row this is, or whose label it explains; None: the whole input
    scores: Tensor
    window: tuple[int, int] | None = None  #: the tokens that were read together; None: the whole text, or a mean
    explained: float | None = None  #: the number of the output that is explained, such as a logit, if it is known


@dataclass
class Maps:
    """The maps behind the rows of a method.

    Attributes:
        layers: A map `(out, in)` for each layer; empty if the method has no layer maps. If the text was read in
            windows: the map of one layer, each row from the window in which its token has the most context.
        rollout: The joined maps `(out, in)` through all layers; None if no method joins these maps.
        distances: Maps of Value Zeroing before rows are divided by their sums; empty for other methods.
    """

    layers: list[Tensor] = field(default_factory=list)
    rollout: Tensor | None = None
    distances: list[Tensor] = field(default_factory=list)


@dataclass
class Part:
    """What one method computed."""

    name: str  #: the name of the method
    method: Method  #: the method, as a row of :data:`~captum_vz.study.METHODS`
    rows: list[Row]  #: the rows at the layer that is shown, one for each thing that is explained
    scores: Tensor  #: all scores, raw and with their signs, `(rows, layers, tokens)`
    layers: tuple[str, ...]  #: the names of these layers
    layer: int | None  #: the layer that is shown, from 0; of joined maps, the last of the layers; None: all layers
    make_maps: Callable[[], Maps] = Maps  #: computes the maps, when they are first needed
    is_causal: bool = False  #: whether the model predicts next words, so that all tokens can draw on the first one

    @cached_property
    def maps(self) -> Maps:
        """The maps behind the rows."""
        return self.make_maps()

    @property
    def scope(self) -> str:
        """What is scored, such as "layer 3" or "layers 0 to 3, residual 0.5"; empty for a method without layers."""
        return self.method.scope(self.layer or 0)

    @property
    def family(self) -> str:
        """The kind of the method, for pictures that keep kinds together; empty for a method of the user."""
        if self.name not in METHODS:
            return ""
        if self.method.joins or self.method.explains_output:
            return "joins layers" if self.method.joins else "explains the output"
        return "a layer" if self.method.maps is not None else "without a model"

    @property
    def title(self) -> str:
        """Its name and what is scored."""
        return ", ".join(filter(None, (self.name, self.scope)))

    @property
    def residual(self) -> float | str | None:
        """What the rollout of its maps adds to each map for the residual connection. "inside": nothing."""
        joining = rollout_of(self.method)
        return INSIDE if joining is None else joining.residual

    @property
    def shares(self) -> Tensor:
        """The sizes of the first row as shares of their sum, `(tokens,)` in float64."""
        return shares_of(self.rows[0].scores.double().cpu())

    @property
    def apart(self) -> float | None:
        """The share of the first token in the first row, if this token is set apart; None: it is not.

        Layers of large causal models put rows on the first token, whatever it is (an attention sink). It is set apart
        in rows without signs if it takes a quarter of the row that is shown, and half of it in a tenth of the layers.
        """
        row, of_layers = self.shares, shares_of(self.scores[0].double().cpu())[:, 0]
        if not self.is_causal or self.method.is_signed or len(row) < 3 or self.rows[0].token == 0:
            return None
        is_sink = QUARTER < row[0] < 1 and (of_layers > HALF).double().mean() >= TENTH
        return float(row[0]) if is_sink and not self.remarks("") else None

    @property
    def shown(self) -> Tensor:
        """The shares that are shown. If the first token is apart, it has NaN, and the others sum to 1."""
        if self.apart is None:
            return self.shares
        others = self.shares.index_fill(0, torch.tensor(0), float("nan"))
        return others / others.nansum()

    def _ends_in_first(self, rows: Tensor) -> bool:
        """Whether joined maps put nearly all of each row `(rows, tokens)` on the first token."""
        shares = shares_of(rows.double())
        return self.rows[0].token != 0 and shares.shape[1] > 2 and bool((shares[:, 0] > NEARLY_ALL).all())

    def remarks(self, first: str, layer: int | None = None) -> list[str]:
        """What a reader should know about the row, in a sentence. `first` is the first token as a person reads it."""
        rows = torch.stack([row.scores for row in self.rows]) if layer is None else self.scores[:, layer]
        if not self.method.joins or not self._ends_in_first(rows):
            return []
        return [
            f"{self.name} says nothing here: nearly all is on {first}, the first token, because a product of many "
            "lower-triangular maps ends in its first column. Choose layer 'deciding', or the method 'decision'"
        ]

    def named_rows(self) -> dict[str, Tensor]:
        """The rows by names that differ. A word that occurs twice has its position before it."""
        names, found = [row.name for row in self.rows], {}
        for row in self.rows:
            place = f"{row.token} " if names.count(row.name) > 1 and row.token is not None else ""
            window = f", tokens {row.window[0]} to {row.window[1]}" if row.window and row.token is None else ""
            found[f"{place}{row.name}{window}"] = row.scores
        return found

    def rows_of_layers(self, every: bool = True) -> dict[str, Tensor]:
        """The rows `(rows, tokens)` by the names of all layers, or of what is shown."""
        if every and self.layer is not None:
            return dict(zip(self.layers, self.scores.unbind(1), strict=True))
        return {self.scope or "scores": torch.stack([row.scores for row in self.rows])}

    def named_maps(self, is_cut: bool, distances: bool = False) -> dict[str, Tensor]:
        """The maps, or the distances in their place, by the names of their layers, and the rollout by its name.

        A rollout whose row is on the first token says nothing, and is left out.
        """
        maps = (self.maps.distances if distances else []) or self.maps.layers
        found = {self.scope: maps[0]} if is_cut else {f"layer {index}": one for index, one in enumerate(maps)}
        name, rollout = ", ".join(filter(None, ["rollout", residual_text(self.residual)])), self.maps.rollout
        token = self.rows[0].token
        if rollout is None or self._ends_in_first(rollout[[-1 if token is None else token]]):
            return found
        return found | {name: rollout}

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the layer that is shown, as lists."""
        return {
            "method": self.name,
            "scores": self.rows[0].scores.tolist(),
            "rows": [
                {"name": row.name, "token": row.token, "scores": row.scores.tolist(), "window": row.window}
                for row in self.rows
            ],
            "residual": self.residual,
        }

    def layers_to_dict(self, maps: bool) -> dict[str, Any]:
        """The numbers of all layers, as lists: the maps, or only the scores of the first row in each layer."""
        if not maps:
            return {"layers": {name: rows[0].tolist() for name, rows in self.rows_of_layers().items()}}
        rollout = None if self.maps.rollout is None else self.maps.rollout.tolist()
        return {"maps": [one.tolist() for one in self.maps.layers], "rollout": rollout}

    def heading(self, row: Row) -> str:
        """What a row shows, in a sentence."""
        if self.method.is_signed:
            return f"how much each token supports {row.name}"
        return f"how much {row.name} {'rests' if self.method.explains_output else 'draws'} on each token"

    def lines(self, tokens: Sequence[str], **look: Any) -> list[str]:
        """The rows with bars, without the first token if it is set apart; see `terminal_text` for the look."""
        found, is_apart, signed = list[str](), self.apart is not None, self.method.is_signed
        for row in self.rows:
            scores = self.shown.nan_to_num(nan=0.0) if is_apart else row.scores
            text = terminal_text(tokens, scores, row.token, full=None if signed else 1, signed=signed, **look)
            found += [f"{self.title}: {self.heading(row)}", *text.split("\n")[is_apart:]]
        return found

    def strongest(self, tokens: Sequence[str]) -> str:
        """The tokens on which the first row rests most, in a sentence."""
        row = self.rows[0]
        best = row.scores.argsort(descending=True, stable=True)[:2].tolist()
        told = ", ".join(f"{tokens[i]} {row.scores[i]:.2f}" for i in best if row.scores[i] >= 0.1)
        return f"{row.name} rests on {told}."

    def size(self) -> str:
        """How large all scores of each row are together, in a sentence; empty for shares."""
        told = ", ".join(
            f"{row.name} {100 * row.scores.abs().sum().item() / abs(row.explained):.0f} % of {row.explained:+.2f}"
            for row in self.rows
            if row.explained and self.method.is_signed
        )
        return f"size of all scores together: {told}" if told else ""
