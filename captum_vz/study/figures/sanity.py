"""Sanity checks as a figure: a line for each method over the number of random layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from captum_vz.study.figures.style import (
    FONT,
    ROW,
    in_order,
    label_ends,
    mark_of,
    method_color,
    new_figure,
    panel_title,
    write_title,
)
from captum_vz.visualization.pictures.description import Content, set_content

if TYPE_CHECKING:
    from pandas import DataFrame


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
    columns = ("method", "random", "mean", "low", "high", "examples", "undefined")
    last = checks[checks["random"] == most]
    told = ", ".join(f"{row.method} {row.mean:.2f}" for row in last.itertuples())
    sentence = f"{model}, correlation with the scores for a copy whose {most} layers are random: {told}."
    set_content(
        panel, Content(sentence, columns, lambda: list(checks[list(columns)].itertuples(index=False, name=None)))
    )
    return figure
