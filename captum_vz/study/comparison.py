"""Several methods on one text, and the table that shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure
from torch import Tensor, nn

from captum_vz import find_layers
from captum_vz._files import comma_separated, written
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.study.examples.text import class_number, prepare_text
from captum_vz.study.methods import (
    COMPARED_METHODS,
    DEFAULT_METHODS,
    METHODS,
    Method,
    encoder_of,
    joined_first,
)
from captum_vz.study.scoring import Batch
from captum_vz.study.scoring.given import checked_rows, given_methods
from captum_vz.visualization import draw_comparison
from captum_vz.visualization.pictures.comparison import clear_tau, overlap
from captum_vz.visualization.pictures.parts.style import MARK
from captum_vz.visualization.terminal import printable

if TYPE_CHECKING:
    import pandas as pd


def compare(
    model: Any,
    tokenizer: Any,
    inputs: str | Mapping[str, Any],
    methods: Any = None,
    target: int | str | None = None,
    *,
    foil: int | str | None = None,
    layer: int = -1,
    layers: list[nn.Module] | None = None,
    token: int | str | None = None,
    truth: bool = False,
    residual: float | str | None = 0.5,
    advance: Callable[[str], object] | None = None,
) -> Table:
    """How much a token of a text draws on each of its tokens, by several methods: one table, tokens by methods.

    Every method's scores are shares: not negative, summing to 1. Scores of gradient methods are the Euclidean norms
    of the tokens' vectors.

    Args:
        model: A model of transformers in eval mode. Of a model with encoder and decoder, the encoder is explained.
        tokenizer: Its tokenizer.
        inputs: A text, in which ``[MASK]`` stands for the tokenizer's own mask token, or what the tokenizer returned
            for one text, with tensors `(1, tokens)`.
        methods: Names of :data:`~captum_vz.study.METHODS`, classes, objects or functions, see
            :func:`~captum_vz.study.as_method`, or a mapping from names to these. None: the five of
            :data:`~captum_vz.study.COMPARED_METHODS`. "all": those of :data:`~captum_vz.study.DEFAULT_METHODS`. Of None
            and of "all", methods that refuse this model are left out, and the table lists them with the reason.
        target: What is explained by the methods that explain the output: a word of the vocabulary or its id, or for a
            model with a head for labels a label or its number. None: the model's prediction.
        foil: The word or label whose logit is subtracted from the target's logit. None: none.
        layer: The layer of methods with a map for each layer, from 0; the last layer of rollouts. Negative numbers
            count from the end. Methods without layers ignore it.
        layers: The layers of the model, if :func:`~captum_vz.find_layers` does not find them.
        token: The token that is explained, by its position (negative ones count from the end) or as it is written.
            Logits of words, and labels of tokens, are read there. None: the mask or, without a mask, the last token
            that is no special token; for labels of the whole text the token that the head reads, such as `[CLS]`.
        truth: Whether to add what blanking out each token does to the prediction at `token`, and how far each method
            agrees with it. It needs the extra `study`, and one forward pass for each token. Without a `foil` it also
            counts which of two words fits better that are both right: pass one that differs in what you ask.
        residual: What registered rollouts and flows add to each map for the residual connection. 0.5: half of each row.
            None: nothing. "paper": the choice of the method's paper. Methods whose maps hold the residual connection
            (ALTI, GlobEnc), and classes that you pass, are not changed.
        advance: Called with the name of each method before it runs, for a progress bar.

    Returns:
        A table that prints, draws itself (`plot`) and is exported (`to_pandas`, `to_csv`, `to_json`, `to_markdown`).

    Raises:
        ArgumentError: A method is unknown; there is no such token, layer or target; or the text is too long or empty.
        RefusedError: A method that was named, or each of the default methods, refuses the model.

    >>> from captum_vz.study import compare
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> print(compare(model, tokenizer, "the pictures of some hat [MASK].", ["value-zeroing", "attention", "position"]))
                 value
                 zeroing  attention  position
    ...
    > 6  [MASK]  0...
    ...
    """
    several: tuple[str, ...] | None = COMPARED_METHODS if methods is None else None
    several = DEFAULT_METHODS if isinstance(methods, str) and methods == "all" else several
    given = given_methods(methods if several is None else several)
    chosen = {name: method.with_residual(residual) for name, method in given.items()}
    model = encoder_of(model)
    layers = find_layers(model) if layers is None else layers
    text = prepare_text(model, tokenizer, inputs, token)
    targets, foils = (
        None if wanted is None else [class_number(model, tokenizer, wanted, name)]
        for name, wanted in (("target", target), ("foil", foil))
    )
    if targets is not None and targets == foils:
        raise ArgumentError(f"foil is {foil!r}, which is the target: pass another foil.", "foil")
    batch = Batch(model, tokenizer, layers, text.inputs, [text.token], targets, foils)
    found, refused = _rows(batch, chosen, several is not None, advance)
    depths = [len(rows) for name, rows in found.items() if chosen[name].layered]
    depth = max(depths, default=1)
    if depths and not -depth <= layer < depth:
        raise ArgumentError(
            f"layer {layer} is out of range: the model has {depth} layers, {-depth} to {depth - 1}.", "layer"
        )
    scores = {name: rows[layer if chosen[name].layered else 0][0].double().cpu() for name, rows in found.items()}
    scopes = {name: chosen[name].scope(layer % depth) for name in found}
    effect = None
    if truth:
        from captum_vz.study.scoring.truth import blank_out_text

        effect = blank_out_text(model, tokenizer, text, targets, foils).shares
    return Table(text.tokens, text.token, scores, layer % depth, refused, scopes, effect)


def _rows(
    batch: Batch, methods: Mapping[str, Method], skip: bool, advance: Callable[[str], object] | None
) -> tuple[dict[str, list[Tensor]], dict[str, str]]:
    """The rows of the methods, and the reasons of methods that refuse, if they may be skipped."""
    found: dict[str, list[Tensor]] = {}
    refused: dict[str, str] = {}
    for name in joined_first(methods, methods):
        if advance is not None:
            advance(name)
        try:
            found[name] = list(checked_rows(name, methods[name], batch, ["the text"]))
        except RefusedError as error:
            if not skip:
                raise
            refused[name] = str(error)
    if not found:
        raise RefusedError(f"No method can explain this model: {next(iter(refused.values()))}")
    return {name: found[name] for name in methods if name in found}, refused


def family_of(name: str) -> str:
    """What kind of method a name is of, for pictures that keep kinds together: empty if the name is unknown."""
    method = METHODS.get(name)
    if method is None:
        return ""
    if method.joined is not None:
        return "joins layers"
    if method.explains_output:
        return "explains the output"
    return "a layer" if method.maps is not None else "without a model"


#: The name of the column of the truth.
TRUTH: Final = "blank-out"


@dataclass(frozen=True)
class Table:
    """How much one token of a text draws on each token, by several methods: one column of shares for each method.

    Printing it marks the explained token with `>` and the highest score of each method with `*`. A notebook shows it
    with colours.

    Attributes:
        tokens: The tokens, as a person reads them.
        token: The position of the token that is explained. None: a label of the whole text is explained.
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
    token: int | None
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
            for what, found in (("Kendall's tau", self.kendall), ("agrees", self.agreement)):
                numbers = ", ".join(f"{name} {one:.2f}" for name, one in found.items() if one == one)
                omitted = [f"{what} with {TRUTH}: {numbers}", *omitted] if numbers else omitted
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
        """The table as a figure: methods down, tokens across, the truth above them, at the right how far they agree.

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
        r"""How far each method agrees with the truth, from 0 to 1. Empty without a truth.

        .. math:: 1 - \tfrac12 \textstyle\sum_j \lvert s_j - b_j \rvert

        s are the method's shares and b those of the truth. It is the part of the shares that lies on the same tokens.
        A token that is not blanked out has the truth 0. NaN if blanking out changes nothing.
        """
        if self.truth is None:
            return {}
        return {name: overlap(column, self.truth) for name, column in self.scores.items()}

    @property
    def kendall(self) -> dict[str, float]:
        """Kendall's rank correlation of each method with the truth. Empty without a truth.

        NaN if fewer than four entries of the truth exceed a hundredth of the largest: the order of the others is noise.
        """
        if self.truth is None:
            return {}
        return {name: clear_tau(column, self.truth) for name, column in self.scores.items()}

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
            fields["truth"] = [None if one == "" else one for one in _known(self.truth)]
            for key, found in (("agreement", self.agreement), ("kendall", self.kendall)):
                fields[key] = {name: None if one != one else one for name, one in found.items()}
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
