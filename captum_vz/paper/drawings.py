"""Figures that only the paper's evaluations have: means of groups, ranks in variants, agreement of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from captum_vz.study.figures import (
    COLORS,
    COLUMN,
    IN_CELLS,
    ROW,
    SIGNED_COLORS,
    draw_grid,
    in_order,
    length_of,
    metric_title,
    panel_title,
    set_table,
    short_number,
    stacked,
    whole_figure,
    write_title,
)

if TYPE_CHECKING:
    from pandas import DataFrame

# In inches: the width of a column of means, of a column of ranks, and of the methods' names.
_CELL: Final = 0.23
_RANK: Final = 0.15
_NAMES: Final = 1.15


def draw_groups(groups: DataFrame, metric: str, data: str = "") -> Figure:
    """Draws the mean of each method by paradigm and label, pooled, and as the mean of the means: a panel for a model.

    Args:
        groups: ``model``, ``method``, ``metric``, ``by``, ``group``, ``mean``, ``low``, ``high``, ``examples`` and
            ``rank``.
        metric: One of its metrics.
        data: The name of the data, for the titles.

    Raises:
        ValueError: There is no such metric.
    """
    drawn = groups[groups["metric"] == metric]
    if drawn.empty:
        known = ", ".join(map(repr, groups["metric"].unique()))
        raise ValueError(f"metric is {metric!r}: pass one of {known}.")
    models = drawn["model"].unique().tolist()
    columns = {model: group_columns(drawn[drawn["model"] == model]) for model in models}
    width = max(COLUMN, _NAMES + _CELL * max(map(len, columns.values())))
    panels = stacked([1.75 + ROW * drawn["method"].nunique()], width, len(models))
    for panel, model in zip(panels, models, strict=True):
        of_model = drawn[drawn["model"] == model]
        means = of_model.pivot(index="method", columns=["by", "group"], values="mean")[columns[model]]
        means = means.loc[in_order(of_model["method"])]
        sizes = of_model.groupby(["by", "group"])["examples"].max()
        heads = [f"{group_title(group, columns[model])} ({sizes[by, group]:,})" for by, group in columns[model]]
        _shares(panel, means.to_numpy(), list(means.index), [in_two_lines(head) for head in heads])
        about = f"{panel_title(model, data, metric_title(metric))}\nmeans (sentences); framed: no method is higher"
        write_title(panel, about, width)
        ranks = of_model.pivot(index="method", columns=["by", "group"], values="rank")
        highest = ranks.loc[means.index, columns[model]] == 1  # methods that are not told apart are framed alike
        for place, column in np.argwhere(highest.to_numpy()):
            panel.add_patch(_frame(int(column), int(place)))
        names = ("method", "by", "group", "mean", "low", "high", "examples", "undefined")
        filled = [k for k in range(len(heads)) if highest.iloc[:, k].any()]
        best = ", ".join(f"{heads[k]}: {' and '.join(means.index[highest.iloc[:, k]])}" for k in filled)
        sentence = f"{model}, {metric_title(metric)}, the methods that none exceeds: {best}."
        set_table(panel, sentence, of_model, names)
    return whole_figure(panels)


def draw_variants(variants: DataFrame, titles: Mapping[str, str], data: str = "") -> Figure:
    """Draws the rank of each method in each variant of blank-out, 1 if none is higher: for each model a panel.

    A row of one colour is a method whose rank does not depend on the variant. The last column has its lowest and
    highest rank.

    Args:
        variants: ``model``, ``method``, ``variant``, ``mean``, ``examples`` and ``rank``.
        titles: The names of the variants in the figure, in the order in which they are drawn.
        data: The name of the data, for the titles.
    """
    models = variants["model"].unique().tolist()
    width = max(COLUMN, _NAMES + 0.45 + _RANK * variants["variant"].nunique())
    height = 0.6 + length_of(titles.values()) + max(0.5, ROW * variants["method"].nunique())
    panels = stacked([height], width, len(models))
    for panel, model in zip(panels, models, strict=True):
        rows = variants[variants["model"] == model]
        means = rows.pivot(index="method", columns="variant", values="mean").loc[in_order(rows["method"])]
        shown = [name for name in titles if name in means]
        ranks = rows.pivot(index="method", columns="variant", values="rank").loc[means.index, shown]
        colors = -ranks.to_numpy(dtype="float64")  # the first rank is the darkest
        texts = [["" if rank != rank else f"{rank:.0f}" for rank in row] for row in ranks.to_numpy()]
        columns = [titles[name] for name in shown]
        draw_grid(panel, colors, texts, list(means.index), columns, COLORS, (-1.3 * len(ranks), -1))
        for row, (low, high) in enumerate(zip(ranks.min(axis=1), ranks.max(axis=1), strict=True)):
            if low == low:
                told = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
                panel.text(len(shown) - 0.3, row, told, **IN_CELLS | {"ha": "left", "in_layout": True})
        count = int(rows["examples"].max())
        about = (
            f"{panel_title(model, data, f'{count:,} sentences')}\nrank by Spearman with blank-out (1: none is higher)"
        )
        write_title(panel, about, width)
        names = ("method", "variant", "mean", "low", "high", "examples", "undefined")
        firsts = ", ".join(f"{titles[name]}: {' and '.join(ranks.index[ranks[name] == 1])}" for name in shown)
        sentence = f"{model}, the methods that none exceeds in each variant of blank-out: {firsts}."
        set_table(panel, sentence, rows, names)
    return whole_figure(panels)


def draw_agreement(agreement: DataFrame, data: str = "") -> Figure:
    """Draws how far each pair of methods agrees: the mean Spearman correlation of their rows, a panel for each model.

    Args:
        agreement: ``model``, ``one``, ``other``, ``mean``, ``low``, ``high`` and ``examples``.
        data: The name of the data, for the titles.
    """
    models = agreement["model"].unique().tolist()
    count = len({*agreement["one"], *agreement["other"]})
    panels = stacked([0.65 + length_of(agreement["one"]) + 0.155 * count], models=len(models))
    for panel, model in zip(panels, models, strict=True):
        rows = agreement[agreement["model"] == model]
        own = in_order([*rows["one"], *rows["other"]])
        values = np.full((len(own), len(own)), np.nan)
        for row in rows.itertuples():
            one, other = own.index(str(row.one)), own.index(str(row.other))
            values[one, other] = values[other, one] = row.mean
        texts = [["" if one != one else f"{round(100 * one)}" for one in row] for row in values]
        draw_grid(panel, values, texts, own, own, SIGNED_COLORS, (-1, 1))
        widest = float((rows["high"] - rows["low"]).max())
        sentences = f"{int(rows['examples'].max()):,} sentences"
        write_title(
            panel,
            f"{panel_title(model, data, sentences)}\nSpearman of two rows, in hundredths, "
            f"intervals up to ±{100 * widest / 2:.0f}",
        )
        shown = ("one", "other", "mean", "low", "high", "examples", "undefined")
        most = rows.loc[rows["mean"].idxmax()]
        sentence = f"{model}, {len(own)} methods. {most['one']} and {most['other']} agree most: {most['mean']:.2f}."
        set_table(panel, sentence, rows, shown)
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


def _shares(panel: Any, means: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> None:
    """A matrix of means. Colours begin at -1 if a mean is clearly negative."""
    signed = bool((np.nan_to_num(means) < -0.05).any())
    texts = [["" if one != one else short_number(round(one, 2) + 0.0) for one in row] for row in means]
    draw_grid(panel, means, texts, rows, columns, SIGNED_COLORS if signed else COLORS, (-1 if signed else 0, 1))


def _frame(column: int, row: int) -> Any:
    return Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, edgecolor="black", linewidth=1.2)
