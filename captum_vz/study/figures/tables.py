"""Tables of numbers as figures: means by paradigm and label, and the agreement of methods."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from captum_vz.study.figures.summary import metric_title, write_title
from captum_vz.visualization.pictures.description import Content, set_content
from captum_vz.visualization.pictures.parts.picture import Picture
from captum_vz.visualization.pictures.parts.style import COLORS, FONT_SIZE, SIGNED_COLORS, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


def draw_groups(groups: DataFrame, metric: str) -> Figure:
    """Draws the mean of each method by paradigm and label, pooled, and as the mean of the means: a panel for a model.

    Args:
        groups: ``model``, ``method``, ``metric``, ``by``, ``group``, ``mean``, ``low``, ``high`` and ``examples``.
        metric: One of its metrics.

    Raises:
        ValueError: There is no such metric.
    """
    drawn = groups[groups["metric"] == metric]
    if drawn.empty:
        known = ", ".join(map(repr, groups["metric"].unique()))
        raise ValueError(f"metric is {metric!r}: pass one of {known}.")
    models = drawn["model"].unique().tolist()
    count = drawn["method"].nunique()
    figure = Picture(figsize=(6.5, (2.2 + 0.2 * count) * len(models)), dpi=150, layout="constrained")
    for panel, model in zip(figure.subplots(len(models), 1, squeeze=False)[:, 0], models, strict=True):
        of_model = drawn[drawn["model"] == model]
        columns = group_columns(of_model)
        means = of_model.pivot(index="method", columns=["by", "group"], values="mean")[columns]
        means = means.loc[of_model["method"].unique()]
        sizes = of_model.groupby(["by", "group"])["examples"].max()
        heads = [f"{group_title(group, columns)} ({sizes[by, group]})" for by, group in columns]
        _grid(panel, means.to_numpy(), list(means.index), heads)
        write_title(panel, f"{model}, {metric_title(metric)}\nmeans (number of sentences); framed: highest of a column")
        written = means.round(2)  # as the cells say it: what they show as equal is framed alike
        highest = written == written.max()
        for place, column in np.argwhere(highest.to_numpy()):
            panel.add_patch(_frame(int(column), int(place)))
        names = ("method", "by", "group", "mean", "low", "high", "examples", "undefined")
        filled = [k for k in range(len(columns)) if means.iloc[:, k].notna().any()]
        best = ", ".join(f"{heads[k]}: {' and '.join(means.index[highest.iloc[:, k]])}" for k in filled)
        sentence = f"{model}, {metric_title(metric)}, the method with the highest mean: {best}."
        set_content(panel, Content(sentence, names, partial(_tuples, of_model, names)))
    return figure


def draw_agreement(agreement: DataFrame) -> Figure:
    """Draws how far each pair of methods agrees: the mean Spearman correlation of their rows, a panel for each model.

    Args:
        agreement: ``model``, ``one``, ``other``, ``mean``, ``low``, ``high`` and ``examples``.
    """
    models = agreement["model"].unique().tolist()
    names = list(dict.fromkeys([*agreement["one"], *agreement["other"]]))
    side = 2.2 + 0.28 * len(names)
    figure = Picture(figsize=(side, side * len(models)), dpi=150, layout="constrained")
    for panel, model in zip(figure.subplots(len(models), 1, squeeze=False)[:, 0], models, strict=True):
        rows = agreement[agreement["model"] == model]
        own = list(dict.fromkeys([*rows["one"], *rows["other"]]))
        values = np.full((len(own), len(own)), np.nan)
        for row in rows.itertuples():
            one, other = own.index(str(row.one)), own.index(str(row.other))
            values[one, other] = values[other, one] = row.mean
        _grid(panel, values, own, own, signed=True)
        widest = float((rows["high"] - rows["low"]).max())
        count = int(rows["examples"].max())
        write_title(
            panel, f"{model}: Spearman of two methods' rows\n{count} sentences; intervals up to ±{widest / 2:.2f}"
        )
        shown = ("one", "other", "mean", "low", "high", "examples", "undefined")
        most = rows.loc[rows["mean"].idxmax()]
        sentence = f"{model}, {len(own)} methods. {most['one']} and {most['other']} agree most: {most['mean']:.2f}."
        set_content(panel, Content(sentence, shown, partial(_tuples, rows, shown)))
    return figure


def group_columns(rows: DataFrame) -> list[tuple[str, str]]:
    """The paradigms, the labels, and then all sentences pooled and the mean of the paradigms' means."""
    pairs = list(dict.fromkeys(rows[["by", "group"]].itertuples(index=False, name=None)))
    first = pairs[0][0]
    parts = [pair for pair in pairs if pair[1] not in ("all", "macro")]
    return [*parts, *(pair for pair in pairs if pair[0] == first and pair not in parts)]


def group_title(group: str, columns: Sequence[tuple[str, str]]) -> str:
    """A group as a column's head, with the number of paradigms or labels in a mean of means.

    Args:
        group: The group.
        columns: As :func:`group_columns` gives them.
    """
    by = columns[-1][0]
    count = sum(pair[0] == by for pair in columns) - 2
    return {"all": "all, pooled", "macro": f"mean of {count} {by}s"}.get(group, group)


def _tuples(rows: DataFrame, names: Sequence[str]) -> list[Any]:
    return list(rows[list(names)].itertuples(index=False, name=None))


def _frame(column: int, row: int) -> Any:
    return Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, edgecolor="black", linewidth=1.2)


def _grid(panel: Axes, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], signed: bool = False) -> None:
    """A matrix with a number in each cell."""
    signed = signed or bool((np.nan_to_num(values) < -0.05).any())
    colors, low = (SIGNED_COLORS, -1) if signed else (COLORS, 0)
    panel.set_facecolor("0.92")
    panel.imshow(values, cmap=colors, vmin=low, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if value == value:
            color = ink_on(colors((value - low) / (1 - low)))
            panel.text(
                column,
                row,
                f"{round(value, 2) + 0.0:.2f}",
                ha="center",
                va="center",
                fontsize=FONT_SIZE - 2,
                color=color,
            )
    panel.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor")
    panel.set_yticks(range(len(rows)), rows)
    panel.tick_params(labelsize=FONT_SIZE - 1, length=0)
