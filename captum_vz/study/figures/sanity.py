"""Sanity checks as a figure: a line for each method over the number of random layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from captum_vz.study.figures.summary import label_color, method_color, write_title
from captum_vz.visualization.pictures.description import Content, set_content
from captum_vz.visualization.pictures.parts.picture import Picture
from captum_vz.visualization.pictures.parts.style import FONT_SIZE

if TYPE_CHECKING:
    from pandas import DataFrame


def draw_sanity(checks: DataFrame, model: str) -> Figure:
    """Draws the correlation of each method's scores with its scores for copies with random layers.

    Bands are the intervals over sentences. The names of the methods stand at the ends of their lines.

    Args:
        checks: As :func:`~captum_vz.study.sanity_checks` gives it.
        model: The name of the model, for the title.
    """
    methods = list(checks["method"].unique())
    most = int(checks["random"].max())
    figure = Picture(figsize=(6, max(3.0, 1 + 0.24 * len(methods))), dpi=150, layout="constrained")
    panel = figure.subplots()
    ends = []
    for method, rows in checks.groupby("method", sort=False):
        color = method_color(str(method))
        panel.plot([0, *rows["random"]], [1, *rows["mean"]], color=color, marker=".", linewidth=1.4)
        panel.fill_between(rows["random"], rows["low"], rows["high"], color=color, alpha=0.15, linewidth=0)
        ends.append(float(np.nan_to_num(rows["mean"].iloc[-1])))
    panel.plot([0, most], [0, 0], color="0.6", linestyle=":")
    panel.set_ylim(min(-0.3, float(checks["low"].min()) - 0.05), 1.08)
    for method, place in zip(methods, _apart(ends, panel.get_ylim()), strict=True):
        panel.text(most + 0.08 * most, place, method, color=label_color(method), fontsize=FONT_SIZE, va="center")
    panel.set_xlim(0, most * 1.55)
    panel.tick_params(labelsize=FONT_SIZE)
    panel.set_xticks(range(most + 1))
    panel.set_xlabel("random layers, from the last on", fontsize=FONT_SIZE)
    panel.set_ylabel("Spearman with the trained model's scores", fontsize=FONT_SIZE)
    count = int(checks["examples"].max())
    write_title(panel, f"{model}: sanity checks, {count} sentences\n(passed: the interval is near 0)")
    columns = ("method", "random", "mean", "low", "high", "examples", "undefined")
    last = checks[checks["random"] == most]
    told = ", ".join(f"{row.method} {row.mean:.2f}" for row in last.itertuples())
    sentence = f"{model}, correlation with the scores for a copy whose {most} layers are random: {told}."
    set_content(
        panel, Content(sentence, columns, lambda: list(checks[list(columns)].itertuples(index=False, name=None)))
    )
    return figure


def _apart(ends: list[float], limits: tuple[float, float]) -> list[float]:
    """Heights of labels near the ends of their lines, moved apart so that no two overlap."""
    gap = min(0.075, (limits[1] - limits[0]) / max(len(ends), 1))
    order = sorted(range(len(ends)), key=lambda place: ends[place])
    placed = [0.0] * len(ends)
    lowest = limits[0] + gap / 2
    for place in order:
        placed[place] = lowest = max(ends[place], lowest)
        lowest += gap
    over = max(0.0, lowest - gap - (limits[1] - gap / 2))
    ceiling = limits[1] - gap / 2
    for place in reversed(order):
        placed[place] = min(placed[place], ceiling) if over else placed[place]
        ceiling = placed[place] - gap
    return placed
