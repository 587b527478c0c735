"""Tables of numbers as figures: means of groups, ranks in variants, agreement and differences of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from captum_vz.study.figures.style import (
    COLUMN,
    FONT,
    ROW,
    in_order,
    label_color,
    length_of,
    metric_title,
    panel_title,
    stacked,
    whole_figure,
    write_title,
)
from captum_vz.visualization.pictures.files import Content, set_content
from captum_vz.visualization.pictures.scales import COLORS, SIGNED_COLORS, ink_on, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

# In inches: the width of a column of means, of a column of ranks, and of the methods' names.
_CELL: Final = 0.23
_RANK: Final = 0.15
_NAMES: Final = 1.15
# The size of the numbers in the cells, in points.
_SMALL: Final = 6
# Cells are inside their axes, so the layout need not measure their texts, which takes most of its time.
_CENTRED: Final[Mapping[str, Any]] = {"ha": "center", "va": "center", "fontsize": _SMALL, "in_layout": False}


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
        _grid(panel, means.to_numpy(), list(means.index), [in_two_lines(head) for head in heads])
        about = f"{panel_title(model, data, metric_title(metric))}\nmeans (sentences); framed: no method is higher"
        write_title(panel, about, width)
        ranks = of_model.pivot(index="method", columns=["by", "group"], values="rank")
        highest = ranks.loc[means.index, columns[model]] == 1  # methods that do not differ are framed alike
        for place, column in np.argwhere(highest.to_numpy()):
            panel.add_patch(_frame(int(column), int(place)))
        names = ("method", "by", "group", "mean", "low", "high", "examples", "undefined")
        filled = [k for k in range(len(heads)) if highest.iloc[:, k].any()]
        best = ", ".join(f"{heads[k]}: {' and '.join(means.index[highest.iloc[:, k]])}" for k in filled)
        sentence = f"{model}, {metric_title(metric)}, the methods that none exceeds: {best}."
        set_content(panel, Content(sentence, names, partial(_tuples, of_model, names)))
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
        panel.imshow(colors, cmap=COLORS, vmin=-1.3 * len(ranks), vmax=-1, aspect="auto")
        for (row, column), rank in np.ndenumerate(ranks.to_numpy()):
            if rank == rank:
                ink = ink_on(COLORS((1.3 * len(ranks) - rank) / (1.3 * len(ranks) - 1)))
                panel.text(column, row, f"{rank:.0f}", color=ink, **_CENTRED)
        for row, (low, high) in enumerate(zip(ranks.min(axis=1), ranks.max(axis=1), strict=True)):
            if low == low:
                told = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
                panel.text(len(shown) - 0.3, row, told, fontsize=_SMALL, va="center")
        _name_axes(panel, list(means.index), [titles[name] for name in shown])
        count = int(rows["examples"].max())
        about = (
            f"{panel_title(model, data, f'{count:,} sentences')}\nrank by Spearman with blank-out (1: none is higher)"
        )
        write_title(panel, about, width)
        names = ("method", "variant", "mean", "low", "high", "examples", "undefined")
        firsts = ", ".join(f"{titles[name]}: {' and '.join(ranks.index[ranks[name] == 1])}" for name in shown)
        sentence = f"{model}, the methods that none exceeds in each variant of blank-out: {firsts}."
        set_content(panel, Content(sentence, names, partial(_tuples, rows, names)))
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
        _grid(panel, values, own, own, signed=True, hundredths=True)
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
        set_content(panel, Content(sentence, shown, partial(_tuples, rows, shown)))
    return whole_figure(panels)


def draw_differences(differences: DataFrame, metric: str, data: str = "") -> Figure:
    """Draws the mean difference of each pair of methods, row minus column, for each model.

    A pair that does not differ is grey, with an equals sign.

    Args:
        differences: As :attr:`Study.differences` has it.
        metric: One of its metrics.
        data: The name of the data, for the titles.

    Raises:
        ValueError: There is no such metric, or there are no pairs.
    """
    drawn = differences[differences["metric"] == metric]
    if drawn.empty:
        known = ", ".join(map(repr, differences["metric"].unique()))
        raise ValueError(f"metric is {metric!r}: pass one of {known}, of a study with two methods.")
    models = drawn["model"].unique().tolist()
    count = len(set(drawn["one"]) | set(drawn["other"]))
    panels = stacked([0.65 + length_of(drawn["one"]) + 0.155 * count], models=len(models))
    for panel, model in zip(panels, models, strict=True):
        _matrix(panel, drawn[drawn["model"] == model], panel_title(str(model), data, metric_title(metric)))
    return whole_figure(panels)


def _matrix(panel: Axes, rows: DataFrame, title: str) -> None:
    names = in_order([*rows["one"], *rows["other"]])
    gaps = np.full((len(names), len(names)), np.nan)
    tied = np.zeros_like(gaps, dtype=bool)
    for row in rows.itertuples():
        one, other = names.index(str(row.one)), names.index(str(row.other))
        gaps[one, other], gaps[other, one] = row.mean, -row.mean
        tied[one, other] = tied[other, one] = row.tied
    shown = np.where(tied, np.nan, gaps)
    limit = float(np.nanmax(np.abs(shown))) if np.isfinite(shown).any() else 1.0
    panel.set_facecolor("0.9")
    panel.imshow(shown, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
    for (row, column), gap in np.ndenumerate(gaps):
        if row == column or gap != gap:
            continue
        dark = not tied[row, column] and abs(gap) > 0.6 * limit
        text = "=" if tied[row, column] else _hundredths(gap)
        panel.text(column, row, text, color="w" if dark else "k", **_CENTRED)
    _name_axes(panel, names, names)
    few, most = int(rows["examples"].min()), int(rows["examples"].max())
    write_title(
        panel,
        f"{title}, {_range(few, most)} sentences\nrow minus column, in hundredths; =: no difference (Holm)",
    )
    ties = int(rows["tied"].sum())
    columns = ("one", "other", "mean", "low", "high", "p", "examples", "tied")
    sentence = f"{title}: {ties} of {len(rows)} pairs of methods do not differ."
    set_content(panel, Content(sentence, columns, partial(_tuples, rows, columns)))


def _hundredths(gap: float) -> str:
    """A difference as a cell shows it: "12", or ".4" if it is below a hundredth.

    >>> _hundredths(0.123), _hundredths(-0.004), _hundredths(-1.2)
    ('12', '-.4', '-120')
    """
    return f"{100 * gap:.0f}" if abs(gap) >= 0.01 else f"{100 * gap:.1f}".replace("0.", ".")


def _range(few: int, most: int) -> str:
    return f"{most:,}" if few == most else f"{few:,} to {most:,}"


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


def _tuples(rows: DataFrame, names: Sequence[str]) -> list[Any]:
    return list(rows[list(names)].itertuples(index=False, name=None))


def _frame(column: int, row: int) -> Any:
    return Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, edgecolor="black", linewidth=1.2)


def _grid(
    panel: Axes,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    signed: bool = False,
    hundredths: bool = False,
) -> None:
    """A matrix with a number in each cell."""
    signed = signed or bool((np.nan_to_num(values) < -0.05).any())
    colors, low = (SIGNED_COLORS, -1) if signed else (COLORS, 0)
    panel.set_facecolor("0.92")
    panel.imshow(values, cmap=colors, vmin=low, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if value == value:
            told = f"{round(100 * value)}" if hundredths else short_number(round(value, 2) + 0.0)
            panel.text(column, row, told, color=ink_on(colors((value - low) / (1 - low))), **_CENTRED)
    _name_axes(panel, rows, columns)


def _name_axes(panel: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    panel.set_xticks(range(len(columns)), columns, rotation=90)
    panel.set_yticks(range(len(rows)), rows)
    panel.tick_params(labelsize=FONT, length=0)
    for labels, names in ((panel.get_yticklabels(), rows), (panel.get_xticklabels(), columns)):
        for label, name in zip(labels, names, strict=True):
            if name in rows:
                label.set_color(label_color(name))
