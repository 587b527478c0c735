"""The paper's evaluations as figures, each in one column of print, and all of them on one page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from captum_vz.study import METRICS
from captum_vz.study.figures import (
    FONT,
    LAST_LAYER,
    ROW,
    draw_layers,
    draw_points,
    in_order,
    label_ends,
    last_layers,
    mark_of,
    method_color,
    name_layers,
    new_figure,
    panel_title,
    set_table,
    share_limits,
    stacked,
    whole_figure,
    write_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

_QUOTED: Final = "the paper's Table 3, BERT family (second-hand;\nthat the methods are the same is assumed)"
_OF_GRAMMAR: Final = "of the grammar"
#: The width of a page of two columns, in inches.
PAGE: Final = 6.9


def draw_faithfulness(summary: DataFrame, paper: Mapping[str, float], data: str = "") -> Figure:
    """Draws the faithfulness of each method to blanking out, with intervals: a panel for each model, on one scale.

    Args:
        summary: As :attr:`Study.summary` has it, with the metric "blank_out". The group "all" is drawn, in the last
            layer of methods with layers.
        paper: Published values by the names of methods, drawn as diamonds.
        data: The name of the data, for the titles.
    """
    drawn = summary[(summary["metric"] == "blank_out") & (summary["group"] == "all")]
    models = drawn["model"].unique().tolist()
    panels = stacked([1.2 + max(0.5, ROW * drawn["method"].nunique())], models=len(models))
    for panel, model in zip(panels, models, strict=True):
        of_model = drawn[drawn["model"] == model]
        last = last_layers(of_model)
        draw_points(panel, last)
        quoted = [(paper[method], place) for place, method in enumerate(last["method"]) if method in paper]
        if quoted:
            look: Any = {"marker": "d", "s": 14, "facecolor": "white", "edgecolor": "black", "linewidth": 0.7}
            panel.scatter(*zip(*quoted, strict=True), label=_QUOTED, zorder=3, **look)
            foot: Any = panel.figure
            foot.legend(loc="outside lower center", fontsize=FONT - 0.5, frameon=False)
        panel.axvline(0, color="black", linewidth=0.6)
        count = f"{int(of_model['examples'].max()):,} sentences"
        write_title(panel, panel_title(str(model), data, count, f"{LAST_LAYER} (hollow: all layers)"))
        panel.set_xlabel(METRICS["blank_out"].title, fontsize=FONT)
    share_limits(panels, "x")
    return whole_figure(panels)


def draw_probing(probing: DataFrame, correlation: DataFrame, data: str = "") -> Figure:
    """Draws the compression of the labels in each layer, and its correlation with each method's cue alignment.

    Args:
        probing: As :attr:`Reproduction.probing` has it.
        correlation: ``model``, ``method``, ``statistic``, ``low``, ``high`` and ``layers``.
        data: The name of the data, for the titles.
    """
    models = probing["model"].unique().tolist()
    rows_height = max(0.5, ROW * correlation["method"].nunique())
    panels = stacked([2.1, rows_height + 0.7], models=len(models))
    for above, below, model in zip(panels[::2], panels[1::2], models, strict=True):
        rows = probing[probing["model"] == model]
        above.plot(rows["layer"], rows["compression"], color="black", linewidth=1.2, marker=".")
        above.fill_between(rows["layer"], rows["lowest"], rows["highest"], color="black", alpha=0.2, linewidth=0)
        above.plot(rows["layer"], rows["control"], color="0.5", linestyle=":", linewidth=1.2)
        look: Any = {"color": "0.4", "fontsize": FONT, "ha": "right", "va": "bottom"}
        above.text(rows["layer"].iloc[-1], rows["control"].iloc[-1] * 1.03, "shuffled labels", **look)
        name_layers(above)
        ticks = [f"{row.layer}\n{row.accuracy:.2f}" for row in rows.itertuples()]
        above.set_xticks(rows["layer"], ticks, fontsize=FONT)
        above.set_xlabel("layer, and below it the accuracy of a linear probe", fontsize=FONT)
        above.set_yscale("log")
        for axis_format in (above.yaxis.set_major_formatter, above.yaxis.set_minor_formatter):
            axis_format(LogFormatter(minor_thresholds=(2, 0.5)))
        above.tick_params(axis="y", which="both", labelsize=FONT)
        above.set_ylabel("compression (1: nothing)", fontsize=FONT)
        told = f"{rows['examples'].max():,} sentences, band: {rows['seeds'].max()} seeds"
        write_title(above, panel_title(str(model), data, "probing of the label", told))
        of_model = correlation[correlation["model"] == model].set_index("method")
        draw_points(below, of_model.loc[in_order(of_model.index)].reset_index(), "statistic")
        below.set_xlim(-1.05, 1.05)
        below.axvline(0, color="black", linewidth=0.6)
        below.set_xlabel(f"Spearman over {rows['layer'].nunique()} layers", fontsize=FONT)
        write_title(below, panel_title(str(model), data, "cue alignment (dot product) and compression"))
    share_limits(panels[::2], "y")
    return whole_figure(panels)


def draw_sanity(checks: DataFrame, model: str, data: str = "", near: float = 0.2) -> Figure:
    """Draws the correlation of each method's scores with its scores for copies with random layers.

    Bands are the intervals over sentences. The names of the methods stand at the ends of their lines.

    Args:
        checks: As :func:`~captum_vz.study.sanity_checks` gives it.
        model: The name of the model, for the title.
        data: The name of the data, for the title.
        near: The correlation below which a method passes, with its whole interval.
    """
    lines = {str(method): rows for method, rows in checks.groupby("method", sort=False)}
    most = int(checks["random"].max())
    height = max(1.6, ROW * len(lines) + 0.2)
    figure = new_figure(height + 0.75)
    panel = figure.subplots()
    for method in in_order(lines):
        rows, color = lines[method], method_color(method)
        panel.plot([0, *rows["random"]], [1, *rows["mean"]], linewidth=1.0, **mark_of(method))
        panel.fill_between(rows["random"], rows["low"], rows["high"], color=color, alpha=0.15, linewidth=0)
    panel.axhspan(-near, near, color="0.93", zorder=0)
    panel.set_ylim(min(-0.3, float(checks["low"].min()) - 0.05), 1.08)
    ends = {method: (most, float(np.nan_to_num(lines[method]["mean"].iloc[-1]))) for method in in_order(lines)}
    label_ends(panel, ends, height)
    panel.tick_params(labelsize=FONT, length=2)
    panel.set_xticks(range(most + 1))
    panel.set_xlabel("random layers, from the last on", fontsize=FONT)
    panel.set_ylabel("Spearman with the trained model", fontsize=FONT)
    count = int(checks["examples"].max())
    about = panel_title(model, data, "sanity checks", f"{count} sentences")
    write_title(panel, f"{about}\npassed: the interval at the right is in the grey band (±{near:g})")
    last = checks[checks["random"] == most]
    told = ", ".join(f"{row.method} {row.mean:.2f}" for row in last.itertuples())
    sentence = f"{model}, correlation with the scores for a copy whose {most} layers are random: {told}."
    set_table(panel, sentence, checks, ("method", "random", "mean", "low", "high", "examples", "undefined"))
    return figure


class Column(NamedTuple):
    """What a column of a page shows: ``model``, ``method``, ``mean``, ``low``, ``high`` and ``examples``.

    Attributes:
        title: Its measure.
        rows: The table.
        counted: What the examples are.
        near: The size below which values pass, which is shaded. None: there is no such size.
    """

    title: str
    rows: DataFrame
    counted: str = "sentences"
    near: float | None = None


def _columns(tables: Mapping[str, DataFrame], near: float) -> list[Column]:
    """The columns of points that have any."""
    found = [
        Column("cue alignment,\naverage precision", _last(tables["summary"], "cue_ap")),
        Column("blank-out,\nSpearman", _last(tables["summary"], "blank_out")),
    ]
    if "truth" in tables:
        found.append(
            Column("truth by patching\nvalues, overlap", _last(tables["truth"], "value_patching"), _OF_GRAMMAR)
        )
    if "sanity" in tables:
        sanity = tables["sanity"]
        every = sanity["random"] == sanity.groupby("model")["random"].transform("max")
        found.append(Column("all layers random,\nSpearman (grey: pass)", sanity[every], _OF_GRAMMAR, near))
    return [column for column in found if len(column.rows)]


def draw_page(tables: Mapping[str, DataFrame], near: float = 0.2, level: float | None = None, data: str = "") -> Figure:
    """Draws all evaluations on one page: a row for each model, a column for each measure, a line for each method.

    Points have the intervals of the tables. The last column has the lowest and the highest rank of a method in the
    variants of blank-out, with a mark at the mean rank. The row below shows cue alignment by layer, of methods with
    layers.

    Args:
        tables: As :attr:`Reproduction.tables` has them.
        near: The size of a mean correlation below which a method passes the sanity checks.
        level: The confidence level of the intervals. None: it is unknown.
        data: The name of the data, for the title.
    """
    summary, variants = tables["summary"], tables.get("variants")
    columns = _columns(tables, near)
    models = summary["model"].unique().tolist()
    count = len(columns) + (variants is not None)
    rows = {model: in_order(summary[summary["model"] == model]["method"]) for model in models}
    heights = [max(0.5, ROW * len(rows[model])) + 0.3 for model in models]
    layered = summary[(summary["metric"] == "cue_ap") & summary["layer"].notna() & (summary["group"] == "all")]
    lines_height = max(1.3, 1.05 * ROW * layered["method"].nunique())
    figure = new_figure(sum(heights) + lines_height + 1.25, PAGE)
    parts: Any = figure.subfigures(2, 1, height_ratios=[sum(heights) + 0.75, lines_height + 0.5])  # typed as one
    above, below = parts
    grid = above.subplots(len(models), count, squeeze=False, sharex="col", height_ratios=heights)
    for place, (line, model) in enumerate(zip(grid, models, strict=True)):
        for panel, column in zip(line, columns, strict=False):
            _points(panel, column, column.rows[column.rows["model"] == model], rows[model], place == 0)
        if variants is not None:
            _spread(line[-1], variants[variants["model"] == model], rows[model], place == 0)
            line[-1].set_xlim(0, max(map(len, rows.values())) + 1)
        for panel in line[1:]:
            panel.tick_params(axis="y", labelleft=False)
        line[0].set_ylabel(model, fontsize=FONT + 1.5, weight="bold").set_parse_math(False)
    percent = "" if level is None else f"{100 * level:g} % "
    told = (
        f"last layer, {percent}intervals over sentences. Filled: one layer, and its truth; hollow: all layers, or none."
    )
    above.suptitle(panel_title(data, told), fontsize=FONT + 0.5).set_parse_math(False)
    panels = list(below.subplots(1, len(models), squeeze=False, sharey=True)[0])
    ends = [draw_layers(panel, layered[layered["model"] == model]) for panel, model in zip(panels, models, strict=True)]
    for panel, model, of_panel in zip(panels, models, ends, strict=True):
        label_ends(panel, of_panel, lines_height)
        panel.set_title(f"{model}, by layer", fontsize=FONT).set_parse_math(False)
        panel.set_ylabel("cue alignment, average precision" if model == models[0] else "", fontsize=FONT)
    return figure


def _last(summary: DataFrame, metric: str) -> DataFrame:
    """The rows of one metric in the last layer of each method, over all sentences."""
    drawn = summary[(summary["metric"] == metric) & (summary["group"] == "all")]
    return drawn.groupby(["model", "method"], sort=False).tail(1)


def _points(panel: Axes, column: Column, rows: DataFrame, methods: list[str], first: bool) -> None:
    draw_points(panel, rows.set_index("method").reindex(methods).reset_index())
    panel.axvline(0, color="black", linewidth=0.6)
    if column.near is not None:
        panel.axvspan(-column.near, column.near, color="0.93", zorder=0)
    _head(panel, column.title if first else "", rows, column.counted)


def _spread(panel: Axes, variants: DataFrame, methods: list[str], first: bool) -> None:
    """A line from the lowest to the highest rank of each method in the variants of blank-out."""
    ranks = variants.pivot(index="method", columns="variant", values="rank").reindex(methods)
    spread: dict[str, Any] = {"mean": ranks.mean(axis=1), "low": ranks.min(axis=1), "high": ranks.max(axis=1)}
    draw_points(panel, pd.DataFrame(spread).reset_index(names="method"))
    _head(panel, f"blank-out, {ranks.shape[1]} variants,\nrank (1: none higher)" if first else "", variants)


def _head(panel: Axes, title: str, rows: DataFrame, counted: str = "sentences") -> None:
    """A panel's title, and under it the number of sentences."""
    count = f"{int(rows['examples'].max()):,} {counted}" if len(rows) else "not computed"
    panel.set_title(f"{title}\n{count}".strip(), fontsize=FONT)
