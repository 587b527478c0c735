"""Figures that only the paper's evaluations have: means of groups, ranks in variants, agreement of methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from captum_vz.study.figures import (
    COLUMN,
    IN_CELLS,
    ROW,
    draw_grid,
    in_order,
    length_of,
    metric_title,
    panel_title,
    set_table,
    stacked,
    whole_figure,
    write_title,
)
from captum_vz.visualization.pictures.scales import COLORS, SIGNED_COLORS, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

# In inches: the width of a column of means, of a column of ranks, and of the methods' names.
_CELL: Final = 0.23
_RANK: Final = 0.15
_NAMES: Final = 1.15
_NUMBERS: Final = ("mean", "low", "high", "examples", "undefined")


def _panels(rows: DataFrame, height: float, width: float = COLUMN) -> Iterator[tuple[Axes, str, DataFrame]]:
    """A panel for each model, with the model and its rows."""
    models = rows["model"].unique().tolist()
    for panel, model in zip(stacked([height], width, len(models)), models, strict=True):
        yield panel, model, rows[rows["model"] == model]


def draw_groups(groups: DataFrame, metric: str, data: str = "") -> Figure:
    """Draws the mean of each method by paradigm and label, pooled, and as the mean of the means: a panel for a model.

    Args:
        groups: As :func:`~paper.further.further_tables` gives it.
        metric: One of its metrics.
        data: The name of the data, for the titles.
    """
    drawn = groups[groups["metric"] == metric]
    most = drawn.groupby("model").apply(lambda rows: len(group_columns(rows)), include_groups=False).max()
    width = max(COLUMN, _NAMES + _CELL * most)
    panels = []
    for panel, model, rows in _panels(drawn, 1.75 + ROW * drawn["method"].nunique(), width):
        columns = group_columns(rows)
        means, ranks = (
            rows.pivot(index="method", columns=["by", "group"], values=value).loc[in_order(rows["method"]), columns]
            for value in ("mean", "rank")
        )
        sizes = rows.groupby(["by", "group"])["examples"].max()
        heads = [f"{group_title(group, columns)} ({sizes[by, group]:,})" for by, group in columns]
        values = means.to_numpy()
        signed = bool((np.nan_to_num(values) < -0.05).any())  # colours begin at -1 if a mean is clearly negative
        texts = [["" if one != one else short_number(round(one, 2) + 0.0) for one in row] for row in values]
        look = (SIGNED_COLORS, (-1, 1)) if signed else (COLORS, (0, 1))
        draw_grid(panel, values, texts, list(means.index), [in_two_lines(head) for head in heads], *look)
        about = f"{panel_title(model, data, metric_title(metric))}\nmeans (sentences); framed: no method is higher"
        write_title(panel, about, width)
        highest = ranks == 1  # methods that are not told apart are framed alike
        for row, column in np.argwhere(highest.to_numpy()):
            corner = int(column) - 0.46, int(row) - 0.46
            panel.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, edgecolor="black", linewidth=1.2))
        best = [
            f"{head}: {' and '.join(means.index[one])}"
            for head, one in zip(heads, highest.to_numpy().T, strict=True)
            if one.any()
        ]
        sentence = f"{model}, {metric_title(metric)}, the methods that none exceeds: {', '.join(best)}."
        set_table(panel, sentence, rows, ("method", "by", "group", *_NUMBERS))
        panels.append(panel)
    return whole_figure(panels)


def draw_variants(variants: DataFrame, titles: Mapping[str, str], data: str = "") -> Figure:
    """Draws the rank of each method in each variant of blank-out, 1 if none is higher: for each model a panel.

    A row of one colour is a method whose rank does not depend on the variant. The last column has its lowest and
    highest rank.

    Args:
        variants: As :func:`~paper.further.further_tables` gives it.
        titles: The names of the variants in the figure, in the order in which they are drawn.
        data: The name of the data, for the titles.
    """
    width = max(COLUMN, _NAMES + 0.45 + _RANK * variants["variant"].nunique())
    height = 0.6 + length_of(titles.values()) + max(0.5, ROW * variants["method"].nunique())
    panels = []
    for panel, model, rows in _panels(variants, height, width):
        ranks = rows.pivot(index="method", columns="variant", values="rank").loc[in_order(rows["method"])]
        ranks = ranks[[name for name in titles if name in ranks]]
        texts = [["" if rank != rank else f"{rank:.0f}" for rank in row] for row in ranks.to_numpy()]
        colors = -ranks.to_numpy(dtype="float64")  # the first rank is the darkest
        heads = [titles[name] for name in ranks]
        draw_grid(panel, colors, texts, list(ranks.index), heads, COLORS, (-1.3 * len(ranks), -1))
        for row, (low, high) in enumerate(zip(ranks.min(axis=1), ranks.max(axis=1), strict=True)):
            if low == low:
                told = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
                panel.text(len(heads) - 0.3, row, told, **IN_CELLS | {"ha": "left", "in_layout": True})
        about = panel_title(model, data, f"{int(rows['examples'].max()):,} sentences")
        write_title(panel, f"{about}\nrank by Spearman with blank-out (1: none is higher)", width)
        firsts = ", ".join(f"{titles[name]}: {' and '.join(ranks.index[ranks[name] == 1])}" for name in ranks)
        sentence = f"{model}, the methods that none exceeds in each variant of blank-out: {firsts}."
        set_table(panel, sentence, rows, ("method", "variant", *_NUMBERS))
        panels.append(panel)
    return whole_figure(panels)


def draw_agreement(agreement: DataFrame, data: str = "") -> Figure:
    """Draws how far each pair of methods agrees: the mean Spearman correlation of their rows, a panel for each model.

    Args:
        agreement: As :func:`~paper.further.further_tables` gives it.
        data: The name of the data, for the titles.
    """
    count = len({*agreement["one"], *agreement["other"]})
    panels = []
    for panel, model, rows in _panels(agreement, 0.65 + length_of(agreement["one"]) + 0.155 * count):
        own = in_order([*rows["one"], *rows["other"]])
        values = np.full((len(own), len(own)), np.nan)
        for row in rows.itertuples():
            one, other = own.index(str(row.one)), own.index(str(row.other))
            values[one, other] = values[other, one] = row.mean
        texts = [["" if one != one else f"{round(100 * one)}" for one in row] for row in values]
        draw_grid(panel, values, texts, own, own, SIGNED_COLORS, (-1, 1))
        widest = 100 * float((rows["high"] - rows["low"]).max()) / 2
        about = panel_title(model, data, f"{int(rows['examples'].max()):,} sentences")
        write_title(panel, f"{about}\nSpearman of two rows, in hundredths, intervals up to ±{widest:.0f}")
        most = rows.loc[rows["mean"].idxmax()]
        sentence = f"{model}, {len(own)} methods. {most['one']} and {most['other']} agree most: {most['mean']:.2f}."
        set_table(panel, sentence, rows, ("one", "other", *_NUMBERS))
        panels.append(panel)
    return whole_figure(panels)


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


def in_two_lines(head: str) -> str:
    r"""A long head of a column, broken at the underscore that is nearest to its middle.

    >>> in_two_lines("regular_plural_subject_verb_agreement_1")
    'regular_plural_subject_\nverb_agreement_1'
    """
    breaks = [place + 1 for place, letter in enumerate(head) if letter == "_"]
    if len(head) <= 24 or not breaks:
        return head
    middle = min(breaks, key=lambda place: abs(2 * place - len(head)))
    return f"{head[:middle]}\n{head[middle:]}"
