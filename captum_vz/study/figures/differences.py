"""Paired differences of methods as a figure: a matrix for each model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from captum_vz.study.figures.style import (
    FONT,
    in_order,
    label_color,
    length_of,
    metric_title,
    panel_title,
    stacked,
    whole_figure,
    write_title,
)
from captum_vz.visualization.pictures.description import Content, set_content

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


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
    panels = stacked([0.65 + length_of(drawn["one"]) + 0.155 * count] * len(models))
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
        panel.text(column, row, text, ha="center", va="center", fontsize=6, color="w" if dark else "k")
    panel.set_xticks(range(len(names)), names, rotation=90, fontsize=FONT)
    panel.set_yticks(range(len(names)), names, fontsize=FONT)
    panel.tick_params(length=0)
    for labels in (panel.get_xticklabels(), panel.get_yticklabels()):
        for label, name in zip(labels, names, strict=True):
            label.set_color(label_color(name))
    few, most = int(rows["examples"].min()), int(rows["examples"].max())
    write_title(
        panel,
        f"{title}, {_range(few, most)} sentences\nrow minus column, in hundredths; =: no difference (Holm)",
    )
    ties = int(rows["tied"].sum())
    columns = ("one", "other", "mean", "low", "high", "p", "examples", "tied")
    sentence = f"{title}: {ties} of {len(rows)} pairs of methods do not differ."
    set_content(panel, Content(sentence, columns, lambda: list(rows[list(columns)].itertuples(index=False, name=None))))


def _hundredths(gap: float) -> str:
    """A difference as a cell shows it: "12", or ".4" if it is below a hundredth.

    >>> _hundredths(0.123), _hundredths(-0.004), _hundredths(-1.2)
    ('12', '-.4', '-120')
    """
    return f"{100 * gap:.0f}" if abs(gap) >= 0.01 else f"{100 * gap:.1f}".replace("0.", ".")


def _range(few: int, most: int) -> str:
    return f"{most:,}" if few == most else f"{few:,} to {most:,}"
