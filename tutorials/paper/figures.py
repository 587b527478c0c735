"""Figures of the paper's evaluations: each in one column of print, and the paper's on one page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from captum_vz.study.figures import (
    DPI,
    FONT,
    ROW,
    draw_layers,
    draw_points,
    in_order,
    name_layers,
    share_limits,
    stacked,
    write_title,
)
from captum_vz.visualization.pictures.files import Picture

if TYPE_CHECKING:
    from pandas import DataFrame

PAGE: Final = 6.9  #: the width of a page of two columns, in inches
LINES: Final = 1.3  #: the height of panels of lines, in inches


def draw_probing(probing: DataFrame, correlation: DataFrame, data: str = "") -> Figure:
    """Draws the compression of the labels in each layer, and its correlation with each method's cue alignment."""
    models = probing["model"].unique().tolist()
    figure, panels = stacked([2.1, 0.7 + max(0.5, ROW * correlation["method"].nunique())], len(models))
    for model, above, below in zip(models, panels[::2], panels[1::2], strict=True):
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
    return figure


def draw_page(tables: Mapping[str, DataFrame], near: float, data: str = "") -> Figure:
    """Draws all evaluations on one page: a row for each model, a column for each measure, a line for each method.

    Points have the intervals of the tables. The row below shows cue alignment by layer, of methods with layers.
    """
    summary = tables["summary"]
    found = {  # the title, and what is counted
        "cue_ap": ("cue alignment,\naverage precision", "sentences", _last(summary, "cue_ap")),
        "blank_out": ("blank-out,\nSpearman", "sentences", _last(summary, "blank_out")),
    }
    if "truth" in tables:
        truth = _last(tables["truth"], "value_patching")
        found["truth"] = ("truth by patching\nvalues, overlap", "of the grammar", truth)
    if "sanity" in tables:
        every = tables["sanity"].query("metric == 'sanity'")
        found["sanity"] = ("all layers random,\nSpearman (grey: pass)", "of the grammar", every)
    columns = {name: column for name, column in found.items() if len(column[2])}
    models = summary["model"].unique().tolist()
    methods = {model: in_order(summary[summary["model"] == model]["method"]) for model in models}
    heights = [max(0.5, ROW * len(methods[model])) + 0.3 for model in models]
    layered = summary[(summary["metric"] == "cue_ap") & summary["layer"].notna() & (summary["group"] == "all")]
    figure = Picture(figsize=(PAGE, sum(heights) + LINES + 1.25), dpi=DPI, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[sum(heights) + 0.75, LINES + 0.5])  # typed as one
    above, below = parts
    grid = above.subplots(len(models), len(columns), squeeze=False, sharex="col", height_ratios=heights)
    for line, model in zip(grid, models, strict=True):
        for panel, (name, (title, counted, table)) in zip(line, columns.items(), strict=True):
            rows = table[table["model"] == model]
            draw_points(panel, rows.set_index("method").reindex(methods[model]).reset_index())
            panel.axvline(0, color="black", linewidth=0.6)
            if name == "sanity":
                panel.axvspan(-near, near, color="0.93", zorder=0)
            told = f"{int(rows['examples'].max()):,} {counted}" if len(rows) else "not computed"
            panel.set_title(f"{title}\n{told}" if model == models[0] else told, fontsize=FONT)
        for panel in line[1:]:
            panel.tick_params(axis="y", labelleft=False)
        line[0].set_ylabel(model, fontsize=FONT + 1.5, weight="bold").set_parse_math(False)
    told = "last layer, 95 % intervals over sentences. Filled: one layer, and its truth; hollow: all layers, or none."
    above.suptitle(panel_title(data, told), fontsize=FONT + 0.5).set_parse_math(False)
    panels = list(below.subplots(1, len(models), squeeze=False, sharey=True)[0])
    for panel, model in zip(panels, models, strict=True):
        draw_layers(panel, layered[layered["model"] == model])
        panel.set_title(f"{model}, by layer", fontsize=FONT).set_parse_math(False)
        panel.set_ylabel("cue alignment, average precision" if model == models[0] else "", fontsize=FONT)
    return figure


def panel_title(*parts: str) -> str:
    """A title of model, data and what a panel shows; parts that are empty are left out."""
    return ", ".join(filter(None, parts))


def _last(summary: DataFrame, metric: str) -> DataFrame:
    """The rows of one metric in the last layer of each method, over all sentences."""
    drawn = summary[(summary["metric"] == metric) & (summary["group"] == "all")]
    return drawn.groupby(["model", "method"], sort=False).tail(1)
